"""Runs a probe on each of several hosts by ssh, and collects their facts and how they reach each other.

doctor ─┬─ ssh ── probe      host a   ─┐
        ├─ ssh ── probe      host b    ├─ try the way to each other
        └─ probe             this host ─┘
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from shardwright.cluster.doctor import probe
from shardwright.cluster.doctor.reading import CommandResult, HostReading, Unreadable
from shardwright.cluster.programs.connection import NoAnswer, Probe, open_all
from shardwright.common.schema import SchemaError, checked
from shardwright.launch.hosts.hosts import Host, Hosts
from shardwright.launch.options.request import NamedHosts

_LOOKS_AT_CLOCK = 3
MOST_PAIRED = 12
"""So many hosts try the way to all others; of more, each tries those after it in the list."""
_AFTER = 3


@dataclass(frozen=True)
class TcpAttempt:
    """An attempt at an address: ``how`` as in `probe._connect`; ``mine`` is the address of this end."""

    address: str
    how: str
    mine: str | None
    said: str


@dataclass(frozen=True)
class Route:
    """A route from one host to another: by TCP to each address, the addresses of its name (if it is known), ssh."""

    tcp: tuple[TcpAttempt, ...]
    addresses: tuple[str, ...]
    ssh: CommandResult

    @property
    def best(self) -> TcpAttempt | None:
        """The address that lets everything through, or one that lets something through."""
        return next((t for how in ("all", "stalls") for t in self.tcp if t.how == how), None)


@dataclass(frozen=True)
class Cluster:
    """The readings of several hosts. ``ahead_s`` has each clock against ours; ``silent`` why others have none."""

    hosts: Hosts
    readings: Mapping[str, HostReading]
    silent: Mapping[str, str] = field(default_factory=dict)
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    ways: Mapping[tuple[str, str], Route] = field(default_factory=dict)


def ask_all(where: NamedHosts) -> Cluster:
    """Read all hosts at once. Raises `LaunchError` where ssh itself cannot be started here."""
    readings: dict[str, HostReading] = {}
    ahead_s: dict[str, float] = {}
    ports: dict[str, int] = {}
    with open_all(where, probe.__name__) as (opened, silent), ThreadPoolExecutor(max(1, len(where.hosts))) as pool:

        def look(name: str) -> None:
            try:
                ahead_s[name] = _ahead_s(opened[name])
                answer = opened[name].ask({"order": "look"})
                readings[name], ports[name] = HostReading.of(name, answer), int(answer["port"])
            except (NoAnswer, Unreadable) as error:
                silent[name] = str(error)
            except (KeyError, TypeError, ValueError) as error:
                silent[name] = f"it answered in another form than expected: {error!r}"

        list(pool.map(look, opened))
        good = [host for host in where.hosts if host.name not in silent]
        ways = _ways(good, readings, ports, opened, silent, pool)
    told = {host.name: with_way_out(readings[host.name], ways) for host in good}
    return Cluster(where.hosts, told, silent, ahead_s, ways)


def _ahead_s(one: Probe) -> float:
    """Return the seconds by which a host's clock is ahead of ours, by the quickest of some answers."""
    best = (float("inf"), 0.0)
    for _ in range(_LOOKS_AT_CLOCK):
        asked_s = time.time()
        theirs_s = float(one.ask({"order": "clock"})["time_s"])
        answered_s = time.time()
        best = min(best, (answered_s - asked_s, theirs_s - (asked_s + answered_s) / 2))
    return best[1]


def _ways(
    hosts: Sequence[Host], readings: Mapping[str, HostReading], ports: Mapping[str, int], opened: Mapping[str, Probe],
    silent: dict[str, str], pool: ThreadPoolExecutor,
) -> dict[tuple[str, str], Route]:  # fmt: skip
    words = {host.name: secrets.token_hex(16) for host in hosts}
    found: dict[tuple[str, str], Route] = {}

    def reach(host: Host) -> None:
        others = others_of(host, hosts)
        peers = [
            {
                "name": o.name, "target": o.login, "resolve": o.name, "port": ports[o.name], "word": words[o.name],
                "addresses": addresses_of(readings[o.name]),
            }
            for o in others
        ]  # fmt: skip
        try:
            answer = opened[host.name].ask({"order": "reach", "peers": peers, "word": words[host.name]})
        except NoAnswer as error:
            silent[host.name] = f"it was looked at, but then: {error}"
            return
        try:
            found.update({(host.name, other.name): checked(answer[other.name], Route) for other in others})
        except (KeyError, SchemaError) as error:
            silent[host.name] = f"it was looked at, but then answered in another form than expected: {error!r}"

    if len(hosts) > 1:
        list(pool.map(reach, hosts))
    return found


def others_of(host: Host, hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts to which a host tries the way."""
    at = hosts.index(host)
    after = [hosts[(at + step) % len(hosts)] for step in range(1, len(hosts))]
    return after if len(hosts) <= MOST_PAIRED else after[:_AFTER]


def addresses_of(reading: HostReading) -> list[str]:
    """Return the addresses that a host says it has, of those that are addresses."""
    return [address for _, address, _ in _entries(reading)]


def _entries(reading: HostReading) -> list[tuple[str, str, int]]:
    told = reading.facts.get("addresses")
    found = []
    for entry in told if isinstance(told, list) else ():
        with contextlib.suppress(ValueError, TypeError):
            interface, address, mbits_per_s = entry
            found.append((str(interface), str(ipaddress.ip_address(address)), int(mbits_per_s)))
    return found


def with_way_out(reading: HostReading, ways: Mapping[tuple[str, str], Route]) -> HostReading:
    """Return the reading with the fastest interface that leads to all others, which a host cannot know alone."""
    reached = [[t.mine for t in way.tcp if t.how == "all"] for (here, _), way in ways.items() if here == reading.name]
    leading = [
        (interface, mbits_per_s)
        for interface, address, mbits_per_s in _entries(reading)
        if reached and all(address in mine for mine in reached)
    ]
    leads_out = max(leading, key=lambda one: one[1])[0] if leading else None
    return replace(reading, facts={**reading.facts, "leads_out": leads_out})
