"""The network interfaces by which the hosts of a job reach each other, found by trying.

The first host listens, every other one connects to each of its addresses, and an address that all of them reach is
where the job meets. Who answers says a word that belongs to the job: addresses of bridges for containers exist on many
hosts, and lead each to itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import LaunchError
from shardwright.launch.host.system_files import number_of, text_of

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_REACH_S = 3.0
_GLOBAL_SCOPE = "00"


@dataclass(frozen=True)
class Address:
    """One address of a host. ``mbits_per_s`` is the speed of its interface, 0 where that is not known."""

    interface: str
    address: str
    mbits_per_s: int = 0

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})"


def ipv4_addresses() -> dict[str, str]:
    """Return the IPv4 address of every network interface that has one, without resolving any name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_addresses() -> list[Address]:
    """Return the addresses of all interfaces but the loopback: IPv4, and IPv6 of global scope."""
    addresses = [Address(name, address, _speed(name)) for name, address in ipv4_addresses().items()]
    for line in text_of("/proc/net/if_inet6").splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope == _GLOBAL_SCOPE:
            addresses.append(Address(name, str(ipaddress.IPv6Address(int(digits, 16))), _speed(name)))
    return [address for address in addresses if not ipaddress.ip_address(address.address).is_loopback]


def _speed(interface: str) -> int:
    return number_of(f"/sys/class/net/{interface}/speed")


def own_loopback() -> str | None:
    """Return the interface that has 127.0.0.1."""
    return next((name for name, address in ipv4_addresses().items() if address == "127.0.0.1"), None)


def infiniband_ports(sysfs: Path = Path("/sys")) -> list[str]:
    """Return the ports that are up, as NCCL names them; those over Ethernet count where there is no real one."""
    ports: dict[str, list[str]] = {}
    for path in sorted(sysfs.glob("class/infiniband/*/ports/*")):
        if "ACTIVE" in text_of(path / "state"):
            ports.setdefault(text_of(path / "link_layer"), []).append(f"{path.parents[1].name}:{path.name}")
    return ports.get("InfiniBand") or ports.get("Ethernet") or []


def listen() -> socket.socket:
    """Return a socket that listens on every address, at a free port, and never blocks."""
    both = socket.has_dualstack_ipv6()
    listening = socket.create_server(
        ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, backlog=128, dualstack_ipv6=both
    )
    listening.setblocking(False)
    return listening


def answer(listening: socket.socket, word: str) -> None:
    """Say the word to whoever has connected."""
    with contextlib.suppress(OSError):
        connected, _ = listening.accept()
        with connected:
            connected.sendall(word.encode())


def reach(addresses: Sequence[str], port: int, word: str) -> dict[str, str]:
    """Return the addresses that answer with the word, each with the interface of this host that leads there."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        own = list(pool.map(lambda address: _reach(address, port, word), addresses))
    names = {address.address: address.interface for address in own_addresses()}
    return {
        address: names[mine] for address, mine in zip(addresses, own, strict=True) if mine is not None and mine in names
    }


def _reach(address: str, port: int, word: str) -> str | None:
    """Return the address of this end of a connection, or None where the word was not heard at the other."""
    try:
        with socket.create_connection((address, port), timeout=_REACH_S) as connected:
            mine = str(connected.getsockname()[0])
            heard = b""
            while len(heard) < len(word) and (data := connected.recv(len(word) - len(heard))):
                heard += data
    except OSError:
        return None
    return mine if heard == word.encode() else None


def choose(
    first: str, addresses: Sequence[Address], reached: Mapping[str, Mapping[str, str]], wanted: str | None
) -> tuple[str, dict[str, str]]:
    """Return the address of the host ``first`` to meet at, and each host's interface.

    ``reached`` says for every other host which addresses it reaches, and by which interface. Among those that all
    reach the fastest is taken, of equal ones IPv4 and the first. ``wanted`` is ``--interface``. Raises `LaunchError`.
    """
    candidates = [a for a in addresses if wanted in (None, a.interface)]
    if not candidates:
        listed = ", ".join(map(str, addresses)) or "none"
        what = "no address but that of its loopback" if wanted is None else f"no address on --interface {wanted}"
        raise LaunchError(f"{first} has {what}; its addresses: {listed}. Type --interface NAME with one of those")
    good = [a for a in candidates if all(a.address in by for by in reached.values())]
    if not good:
        lacking = {host: [str(a) for a in candidates if a.address not in by] for host, by in reached.items()}
        lines = [f"  from {host}: {', '.join(missing)}" for host, missing in lacking.items() if missing]
        raise LaunchError(
            f"the hosts do not reach {first} over TCP, where the ranks are to meet; tried in vain\n"
            + "\n".join(lines)
            + "\nopen the firewall between the hosts, or type --interface NAME where another one of its interfaces "
            "leads there"
        )
    best = min(good, key=lambda a: (-a.mbits_per_s, ":" in a.address, candidates.index(a)))
    return best.address, {first: best.interface} | {host: by[best.address] for host, by in reached.items()}


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ADAPTERS = ("NCCL_IB_HCA",)


def wrong_names(
    environment: Mapping[str, str], interfaces: Collection[str], adapters: Collection[str]
) -> dict[str, Collection[str]]:
    """Return the variables that name no device of a host, each with the devices that there are.

    >>> wrong_names({"NCCL_SOCKET_IFNAME": "ib,eth", "GLOO_SOCKET_IFNAME": "eth"}, ["eth0"], [])
    {'GLOO_SOCKET_IFNAME': ['eth0']}
    """
    there = dict.fromkeys(INTERFACES, interfaces) | dict.fromkeys(ADAPTERS, adapters)
    return {
        name: known
        for name, known in there.items()
        if environment.get(name) and not _names_one(name, environment[name], known)
    }


def _names_one(variable: str, value: str, known: Collection[str]) -> bool:
    """Return whether NCCL would find the device: by a prefix, unless = is first; ^ leaves out; gloo by whole names."""
    gloo = variable.startswith("GLOO")
    if value.startswith("^") and not gloo:
        return True
    exact = gloo or value.startswith("=")
    words = [word.partition(":")[0] for word in (value if gloo else value.lstrip("=")).split(",")]
    return any(device == word or (not exact and device.startswith(word)) for word in words for device in known)
