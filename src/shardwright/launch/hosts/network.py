"""The counters of the network devices of this host: bytes, packets, errors and drops, read from sysfs.

An InfiniBand port counts words of four bytes, in 64 bits or, where it is old, in 32; both start anew from zero when
they are full. Packets over RDMA are seen by the port alone, not by the network device in front of it. Devices are those
of the network namespace in which ``/sys`` was mounted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwright.launch.host.system_files import number_of, text_of

DeviceKind = Literal["ethernet", "infiniband", "ip over infiniband", "loopback", "other"]
SYSFS = Path("/sys")
WORD_BYTES = 4

_KINDS: dict[int, DeviceKind] = {1: "ethernet", 32: "ip over infiniband", 772: "loopback"}  # linux/if_arp.h
_ETHERNET_TROUBLES = {
    "rx_errors": "errors in",
    "tx_errors": "errors out",
    "rx_dropped": "drops in",
    "tx_dropped": "drops out",
}
_PORT_TROUBLES = {
    "symbol_error": "symbol errors",
    "link_downed": "link downs",
    "port_rcv_errors": "errors in",
    "port_xmit_discards": "drops out",
    "port_xmit_wait": "waits",  # ticks in which there was something to send and no credit to send it
}
NARROW, WIDE = 2**32, 2**64
# A counter of an old port that stays where it is when it is full; the current standard's 64 bits never fill.
FULL_WORDS = NARROW - 1


@dataclass(frozen=True)
class Device:
    """One device of a reading: a network device, or one port of an InfiniBand device, ``mlx5_0/1``.

    ``in_bytes`` and ``out_bytes`` are bytes in multiples of ``unit_bytes``, what the counter itself counts.
    ``troubles`` are the counters of errors and drops that the device has. ``network_device`` is the one in front of an
    InfiniBand port, and ``parts`` are the devices below a bond, a bridge or a VLAN, which count the same bytes again.
    """

    name: str
    kind: DeviceKind
    up: bool
    in_bytes: int
    out_bytes: int
    in_packets: int = 0
    out_packets: int = 0
    troubles: Mapping[str, int] = field(default_factory=dict)
    speed: str = ""
    mtu: int | None = None
    unit_bytes: int = 1
    network_device: str = ""
    parts: tuple[str, ...] = ()

    @property
    def full(self) -> bool:
        """Return whether a counter of 32 bits has reached its end, where some old ports stop counting."""
        return self.kind == "infiniband" and FULL_WORDS * WORD_BYTES in (self.in_bytes, self.out_bytes)


@dataclass(frozen=True)
class NetworkReading:
    """All devices at one time: ``time_s`` is of the monotonic clock. ``unreadable`` says why a device is not there."""

    time_s: float
    devices: Mapping[str, Device]
    unreadable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """The traffic of a device between two readings ``seconds`` apart."""

    seconds: float
    in_bytes: int
    out_bytes: int
    in_packets: int
    out_packets: int
    troubles: Mapping[str, int]

    def __add__(self, other: Moved) -> Moved:
        names = dict.fromkeys([*self.troubles, *other.troubles])
        return Moved(
            self.seconds + other.seconds,
            self.in_bytes + other.in_bytes,
            self.out_bytes + other.out_bytes,
            self.in_packets + other.in_packets,
            self.out_packets + other.out_packets,
            {name: self.troubles.get(name, 0) + other.troubles.get(name, 0) for name in names},
        )


def read_devices(sysfs: Path = SYSFS) -> NetworkReading:
    """Read every device; a tree without any gives none."""
    devices: dict[str, Device] = {}
    unreadable: dict[str, str] = {}
    time_s = time.monotonic()
    ports = {f"{port.parents[1].name}/{port.name}": port for port in sysfs.glob("class/infiniband/*/ports/*")}
    interfaces = {path.name: path for path in sysfs.glob("class/net/*") if (path / "statistics").is_dir()}
    for paths, read in ((ports, _read_port), (interfaces, _read_interface)):
        for name, path in sorted(paths.items()):
            try:
                devices[name] = read(name, path)
            except (OSError, ValueError) as error:
                unreadable[name] = f"{type(error).__name__}: {error}"
    return NetworkReading(time_s, devices, unreadable)


def moved(before: Device, after: Device, seconds: float) -> Moved:
    """Return the traffic of one device between two readings.

    A counter that is smaller than it was has wrapped once, at 32 bits where it was below that and at 64 otherwise.
    Where the device could not have moved that much at ten times its speed, the counter began anew instead: a driver
    was loaded again, or somebody reset it.

    >>> before = Device("mlx5_0/1", "infiniband", True, (2**32 - 10) * 4, 0, unit_bytes=4)
    >>> after = Device("mlx5_0/1", "infiniband", True, 90 * 4, 0, unit_bytes=4)
    >>> moved(before, after, 1.0).in_bytes
    400
    """
    rate = bytes_per_s(after.speed)
    limit = float("inf") if rate is None else 10 * rate * seconds

    def grown(old: int, new: int, unit: int = 1, most: float = float("inf")) -> int:
        old, new = old // unit, new // unit
        if new >= old:
            return (new - old) * unit
        wrapped = (new - old + (NARROW if old < NARROW else WIDE)) * unit
        return wrapped if wrapped <= most else new * unit

    return Moved(
        seconds,
        grown(before.in_bytes, after.in_bytes, after.unit_bytes, limit),
        grown(before.out_bytes, after.out_bytes, after.unit_bytes, limit),
        grown(before.in_packets, after.in_packets, most=limit),
        grown(before.out_packets, after.out_packets, most=limit),
        {name: max(count - before.troubles.get(name, 0), 0) for name, count in after.troubles.items()},
    )


def counted_once(reading: NetworkReading) -> list[Device]:
    """Return the devices that together carry what leaves and enters the host, each byte once.

    Left out are the loopback, devices made of others (bonds, bridges, VLANs), and network devices in front of an
    InfiniBand port, whose bytes the port counts too.
    """
    behind = {device.network_device for device in reading.devices.values() if device.kind == "infiniband"}
    return [
        device
        for device in reading.devices.values()
        if device.kind != "loopback"
        and not device.parts
        and not (device.kind == "ip over infiniband" and device.name in behind)
    ]


def bytes_per_s(speed: str) -> float | None:
    """Return the bytes per second of a speed; None where it is not known.

    >>> bytes_per_s("100 Gb/s (4X EDR)"), bytes_per_s("400 Gb/sec (4X NDR)"), bytes_per_s("")
    (12500000000.0, 50000000000.0, None)
    """
    number, _, unit = speed.partition(" ")
    factor = {"Gb/s": 1e9, "Mb/s": 1e6}.get(unit[:4])
    with contextlib.suppress(ValueError):
        return None if factor is None else float(number) * factor / 8
    return None


def _troubles(folder: Path, names: Mapping[str, str]) -> dict[str, int]:
    return {word: int(text) for name, word in names.items() if (text := text_of(folder / name)).isdecimal()}


def _read_interface(name: str, path: Path) -> Device:
    counters = path / "statistics"
    speed, state = text_of(path / "speed"), text_of(path / "operstate")  # a virtual device has no speed
    return Device(
        name,
        _KINDS.get(number_of(path / "type"), "other"),
        up=state in ("up", "unknown"),  # the loopback and some virtual devices never say more than unknown
        in_bytes=int((counters / "rx_bytes").read_text()),
        out_bytes=int((counters / "tx_bytes").read_text()),
        in_packets=number_of(counters / "rx_packets"),
        out_packets=number_of(counters / "tx_packets"),
        troubles=_troubles(counters, _ETHERNET_TROUBLES),
        speed=f"{int(speed) / 1000:g} Gb/s" if speed.isdecimal() and int(speed) > 0 else "",
        mtu=number_of(path / "mtu") or None,
        parts=tuple(sorted(link.name.removeprefix("lower_") for link in path.glob("lower_*"))),
    )


def _read_port(name: str, path: Path) -> Device:
    counters = path / "counters"
    return Device(
        name,
        "infiniband",
        up="ACTIVE" in text_of(path / "state"),  # "4: ACTIVE"
        in_bytes=int((counters / "port_rcv_data").read_text()) * WORD_BYTES,
        out_bytes=int((counters / "port_xmit_data").read_text()) * WORD_BYTES,
        in_packets=number_of(counters / "port_rcv_packets"),
        out_packets=number_of(counters / "port_xmit_packets"),
        troubles=_troubles(counters, _PORT_TROUBLES),
        speed=text_of(path / "rate"),
        unit_bytes=WORD_BYTES,
        network_device=text_of(path / "gid_attrs" / "ndevs" / "0"),
    )


_EVERY_S = 10.0  # a host of many devices has hundreds of counters


class Wire:
    """A reader of the bytes that this host's devices, and its loopback, have moved since it was booted."""

    def __init__(self, sysfs: Path = SYSFS) -> None:
        self._sysfs = sysfs
        self._due_s = 0.0

    def __call__(self) -> dict[str, int] | None:
        """Return the bytes; None where it is too early to read again."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + _EVERY_S
        reading = read_devices(self._sysfs)
        between = counted_once(reading)
        within = [device for device in reading.devices.values() if device.kind == "loopback"]
        return {
            "in": sum(device.in_bytes for device in between),
            "out": sum(device.out_bytes for device in between),
            "within": sum(device.out_bytes for device in within),
        }
