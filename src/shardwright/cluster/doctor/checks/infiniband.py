"""Checks of InfiniBand: what ibstatus, ibdev2netdev and ifconfig would tell together, port by port."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardwright.cluster.doctor import sources
from shardwright.cluster.doctor.checks.gpus import gpus
from shardwright.cluster.doctor.checks.software import install
from shardwright.cluster.doctor.finding import Check, Finding, not_applicable, note, ok, problem, warning
from shardwright.cluster.doctor.reading import HostReading, Unreadable

_ROOT = "/sys/class/infiniband"
_MAPPED = re.compile(r"^(\S+) port (\d+) ==> (\S+) \((Up|Down)\)$", re.MULTILINE)


@dataclass(frozen=True)
class Port:
    """One port: ``rate`` as the kernel writes it, the network device in front of it, and that one's address."""

    device: str
    port: str
    state: str
    rate: str
    link_layer: str
    network_device: str = ""
    address: str = ""

    @property
    def active(self) -> bool:
        return self.state.upper() == "ACTIVE"

    def __str__(self) -> str:
        front = " ".join(filter(None, (self.network_device, self.address)))
        return f"{self.device}/{self.port} {self.state}, {self.rate}, {self.link_layer}{f', {front}' if front else ''}"


def ports(reading: HostReading) -> tuple[Port, ...]:
    """Return all ports, by /sys or, where a container hides that, by ibstat and ibdev2netdev."""
    states = reading.glob(f"{_ROOT}/*/ports/*/state")
    found = _by_sysfs(reading, states) if states else _by_ibstat(reading)
    addresses = {str(interface): str(address) for interface, address, _ in reading.fact("addresses", list)}
    return tuple(replace(port, address=addresses.get(port.network_device, "")) for port in found)


def _by_sysfs(reading: HostReading, states: Mapping[str, str]) -> Iterator[Port]:
    for path, state in states.items():
        _, _, _, _, device, _, port, _ = path.split("/")
        folder = f"{_ROOT}/{device}/ports/{port}"
        number, colon, word = state.partition(": ")
        if not colon or not number.isdecimal():
            raise Unreadable(f"{path} says {state!r}, expected one like '4: ACTIVE'")
        rate, layer = reading.file(f"{folder}/rate") or "rate unknown", reading.file(f"{folder}/link_layer") or "?"
        # A port without a network device has the file, but the kernel refuses to read it.
        front = reading.files.get(f"{folder}/gid_attrs/ndevs/0", "").strip()
        yield Port(device, port, word, rate, layer, front)


def _by_ibstat(reading: HostReading) -> Iterator[Port]:
    said = reading.ran(sources.IBSTAT)
    mapped = _MAPPED.findall(reading.ran(sources.IBDEV2NETDEV) or "") if said else []
    fronts = {(device, port): front for device, port, front, _ in mapped}
    for part in re.split(r"^CA '", said or "", flags=re.MULTILINE)[1:]:
        device = part.partition("'")[0]
        for block in re.split(r"^\s*Port (?=\d+:)", part, flags=re.MULTILINE)[1:]:
            values = dict(re.findall(r"^\s*([A-Z][\w ]*): *(.*?)\s*$", block, re.MULTILINE))
            if "State" not in values:
                raise Unreadable("ibstat shows a port without its state")
            port, layer = block.partition(":")[0], values.get("Link layer", "?")
            rate = f"{values.get('Rate', '?')} Gb/sec"
            yield Port(device, port, values["State"], rate, layer, fronts.get((device, port), ""))


def devices(reading: HostReading) -> Finding:
    """Check that every port is up."""
    found = ports(reading)
    if not found:
        return note("no InfiniBand device here")
    listed = "; ".join(map(str, found))
    waiting = [port for port in found if port.state.upper() in ("INIT", "INITIALIZING", "ARMED")]
    if waiting:
        line = reading.as_root("systemctl enable --now opensm")
        return problem(
            f"{listed}: {waiting[0].device} waits for a subnet manager; on one host of the network, or on the switch:",
            *install(reading, "infiniband"), line,
        )  # fmt: skip
    if not any(port.active for port in found):
        fronts = [port.network_device for port in found if port.network_device]
        lines = [reading.as_root(f"ip link set dev {front} up") for front in fronts if _name(front)]
        return problem(f"no port is up: {listed}", *(lines or ["ibstat"]))
    if down := [port for port in found if not port.active]:
        return warning(f"{listed}: is {down[0].device}/{down[0].port} to be down? Look at its cable", "ibstat")
    return ok(listed)


def _name(word: str) -> bool:
    """Return whether a word may be the name of a network device, so that it can stand in a line to type."""
    return re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", word) is not None and not word.startswith("-")


def rates(reading: HostReading) -> Finding:
    """Check that ports of one kind run at one rate; a slow one has a bad cable or a wrong setting of the switch."""
    active = [port for port in ports(reading) if port.active]
    if len(active) < 2:
        return not_applicable()
    for layer in dict.fromkeys(port.link_layer for port in active):
        alike = {port: _gbits(port.rate) for port in active if port.link_layer == layer}
        if slow := [port for port, rate in alike.items() if rate < max(alike.values())]:
            names = ", ".join(f"{port.device}/{port.port} ({port.rate})" for port in slow)
            best = max(alike, key=lambda port: alike[port]).rate
            return warning(f"{names} slower than {best} of the others: look at the cable and the switch", "ibstat")
    return ok(f"{len(active)} ports at {active[0].rate}")


def _gbits(rate: str) -> float:
    if (match := re.match(r"[0-9.]+", rate)) is None:
        raise Unreadable(f"the rate {rate!r} is no number")
    return float(match[0])


def peer_memory(reading: HostReading) -> Finding:
    """Check the module by which the network reaches the GPUs' memory."""
    if not any(port.active for port in ports(reading)) or not gpus(reading):
        return not_applicable()
    if reading.file("/sys/module/nvidia_peermem/refcnt") is None:
        what = "nvidia_peermem is not loaded: what GPUs send over the network is copied once more"
        return warning(what, reading.as_root("modprobe nvidia_peermem"))
    return ok("nvidia_peermem is loaded")


CHECKS = (
    Check("InfiniBand", "ports", devices),
    Check("InfiniBand", "rates", rates),
    Check("InfiniBand", "GPU memory", peer_memory),
)
