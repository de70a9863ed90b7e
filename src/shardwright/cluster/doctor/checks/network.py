"""Checks of a host's network as it sees it: interfaces, its own name, ports, programs to log in with."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from shardwright.cluster.doctor.checks.software import install
from shardwright.cluster.doctor.finding import Check, Finding, note, ok, problem, warning
from shardwright.cluster.doctor.reading import HostReading, Unreadable, typed

_NETS = "/sys/class/net"
_LOOPBACK_KIND = "772"
_FEWEST_PORTS = 10_000


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; ``speed`` is empty where nobody knows."""

    name: str
    mtu: int
    speed: str
    addresses: tuple[str, ...]


def interfaces(reading: HostReading) -> tuple[Interface, ...]:
    """Return the interfaces that are up, but the loopback."""
    found = []
    for path, state in reading.glob(f"{_NETS}/*/operstate").items():
        name = path.split("/")[4]
        if state not in ("up", "unknown") or reading.file(f"{_NETS}/{name}/type") == _LOOPBACK_KIND:
            continue
        mtu = reading.file(f"{_NETS}/{name}/mtu") or ""
        if not mtu.isdecimal():
            raise Unreadable(f"{_NETS}/{name}/mtu says {mtu!r}, expected a number")
        speed = reading.files.get(f"{_NETS}/{name}/speed", "").strip()  # refused for what has none
        rate = f"{int(speed) / 1000:g} Gb/s" if speed.isdecimal() and int(speed) > 0 else ""
        addresses = tuple(str(a) for where, a, _ in reading.fact("addresses", list) if where == name)
        found.append(Interface(name, int(mtu), rate, addresses))
    return tuple(found)


def devices(reading: HostReading) -> Finding:
    """Report the network interfaces that have an address, and warn where none has."""
    found = interfaces(reading)
    listed = "; ".join(
        " ".join(filter(None, (i.name, ", ".join(i.addresses), i.speed, f"MTU {i.mtu}"))) for i in found if i.addresses
    )
    if not listed:
        what = f"no interface has an address; up are: {', '.join(i.name for i in found) or 'none'}"
        return warning(f"{what}; other hosts cannot reach this one", "ip address")
    return ok(listed)


def own_name(reading: HostReading) -> Finding:
    """Check that the host's own name leads to an address that others reach too: gloo and MPI may tell it to others."""
    name, found = reading.fact("name", str), reading.facts.get("own_name")
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,255}", name) is None:
        raise Unreadable(f"the host is named {name!r}, which is no name of a host")
    mine = [str(address) for _, address, _ in reading.fact("addresses", list)]
    entry = typed("echo", f"{mine[0]} {name}") if mine else ""
    add = (f"{entry} | {reading.as_root('tee -a /etc/hosts')}",) if entry else ()
    if not found:
        return warning(f"nobody here knows the address of its own name, {name}", *add)
    addresses = [str(address) for address in found]
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        if not mine:
            return ok(f"{name} is {addresses[0]}, and there is no other network")
        what = f"{name} is {addresses[0]} here: mpirun and others may tell other hosts that address"
        out = typed("sed", "-i", "-E", rf"/^(127\.|::1)/s/\s{re.escape(name)}(\s|$)/\1/", "/etc/hosts")
        return note(what, reading.as_root(out), *add)
    return ok(f"{name} is {addresses[0]}")


def local_ports(reading: HostReading) -> Finding:
    """Check the number of ports that the kernel gives to connections: each pair of ranks takes some."""
    said = reading.file("/proc/sys/net/ipv4/ip_local_port_range")
    words = (said or "").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        raise Unreadable(f"ip_local_port_range says {said!r}, expected two numbers")
    first, last = map(int, words)
    if last - first + 1 < _FEWEST_PORTS:
        line = reading.as_root("sysctl -w net.ipv4.ip_local_port_range='32768 60999'")
        return warning(f"only the ports {first} to {last} are for connections", line)
    return ok(f"{first} to {last}")


def logins(reading: HostReading) -> Finding:
    """Check that there are ssh and sshd, which several hosts need."""
    there = reading.fact("programs", list)
    missing = [name for name in ("ssh", "sshd") if name not in there]
    if missing:
        what = f"no {' and no '.join(missing)}: needed by jobs on several hosts"
        return (warning if "ssh" in missing else note)(what, *install(reading, "ssh"))
    return ok(f"ssh and sshd, {reading.fact('user', str)}{' (root)' if reading.facts.get('root') is True else ''}")


def unreached(reason: str, name: str) -> Finding:
    """Return the finding about a host that does not answer."""
    return problem(reason, typed("ssh", "-v", "-o", "BatchMode=yes", name, "true"))


CHECKS = (
    Check("network", "interfaces", devices),
    Check("network", "own name", own_name),
    Check("network", "ports", local_ports),
    Check("network", "logins", logins),
)
