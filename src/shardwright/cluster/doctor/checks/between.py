"""Checks between hosts: versions that differ, clocks that are wrong, and hosts that do not reach each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low

from shardwright.cluster.doctor import sources
from shardwright.cluster.doctor.checks.gpus import gpus
from shardwright.cluster.doctor.checks.network import Interface, interfaces, unreached
from shardwright.cluster.doctor.checks.software import install, numbers, pip
from shardwright.cluster.doctor.finding import MISREAD, Finding, HostFinding, Severity, misread, ok, problem, warning
from shardwright.cluster.doctor.reach import Cluster, Route, addresses_of
from shardwright.cluster.doctor.reading import HostReading, typed
from shardwright.common.words import plain
from shardwright.launch.carriers.agent_connection import pip_words
from shardwright.launch.hosts.rank_table import is_address

_WARN_CLOCK_S, _BAD_CLOCK_S = 0.5, 5.0
GROUP = "between hosts"
_OF_KEYS = ("Permission denied", "Host key verification", "host key is known")  # what `hosts trust` mends


@dataclass(frozen=True)
class Drift:
    """Something that is to be the same on all hosts: what it is on one, how bad a difference is, and what to type."""

    name: str
    value: Callable[[HostReading], str | None]
    severity: Severity
    remedy: Callable[[HostReading, str], tuple[str, ...]]


def _pip_same(name: str) -> Callable[[HostReading, str], tuple[str, ...]]:
    return lambda reading, version: (pip(reading, *pip_words(name, version)),)


def _by_hand(text: str) -> Callable[[HostReading, str], tuple[str, ...]]:
    return lambda _, expected: (f"# {text.format(plain(expected))}",)


def _nccl_same(reading: HostReading, version: str) -> tuple[str, ...]:
    package = reading.fact("nccl", dict)["package"]
    return (pip(reading, *pip_words(package, version)),) if package in sources.PACKAGES else ()


def _driver(reading: HostReading) -> str | None:
    return next((gpu.driver for gpu in gpus(reading)), None)


def _mpi(reading: HostReading) -> str | None:
    return next(iter((reading.ran(sources.MPIRUN) or "").splitlines()), None)


def _nccl(reading: HostReading) -> str | None:
    found = reading.facts.get("nccl")
    return str(found["version"]) if isinstance(found, dict) else None


DRIFTS = (
    Drift(
        "Python", lambda r: ".".join(r.fact("python", str).split(".")[:2]), Severity.PROBLEM,
        _by_hand("name one of version {} on this host, too: --python HOST=PATH"),
    ),
    Drift("torch", lambda r: r.package("torch"), Severity.PROBLEM, _pip_same("torch")),
    Drift("shardwright", lambda r: r.package("shardwright"), Severity.PROBLEM, _pip_same("shardwright")),
    Drift("code", lambda r: r.facts.get("code"), Severity.WARNING, _by_hand("install the same sources on all hosts")),
    Drift("numpy", lambda r: r.package("numpy"), Severity.WARNING, _pip_same("numpy")),
    Drift("GPU driver", _driver, Severity.WARNING, lambda r, version: install(r, "driver", str(numbers(version)[0]))),
    Drift("NCCL", _nccl, Severity.PROBLEM, _nccl_same),
    Drift("MPI", _mpi, Severity.WARNING, lambda r, _: install(r, "mpi")),
    Drift("user", lambda r: r.fact("user", str), Severity.WARNING, _by_hand("log in as {0}: -H {0}@HOST")),
)  # fmt: skip


def check_between(cluster: Cluster) -> list[HostFinding]:
    """Return all findings between the hosts of a cluster, and of those that do not answer."""
    found = [_found("reached", unreached(why, name), name) for name, why in cluster.silent.items()]
    if len(cluster.readings) > 1:
        for name, check in _CHECKS.items():
            try:
                found += check(cluster)
            except MISREAD as error:
                found.append(_found(name, misread(error), *cluster.readings))
    return found


def _found(name: str, finding: Finding, *hosts: str) -> HostFinding:
    return HostFinding(GROUP, name, hosts, finding)


def versions(cluster: Cluster) -> Iterator[HostFinding]:
    """Yield the versions that are to be the same on all hosts, and are not."""
    same = []
    for drift in DRIFTS:
        values: dict[str, str] = {}
        for name, reading in cluster.readings.items():
            try:
                if (value := drift.value(reading)) is not None:
                    values[name] = str(value)
            except MISREAD as error:
                yield _found(drift.name, misread(error), name)
        if not values:
            continue
        expected = Counter(values.values()).most_common(1)[0][0]  # of equally common ones that of the first host
        like = next(name for name, value in values.items() if value == expected)
        for name in (name for name, value in values.items() if value != expected):
            try:
                lines = drift.remedy(cluster.readings[name], expected)
            except MISREAD:
                lines = ()
            text = f"{drift.name} {values[name]} here, but {expected} on {like}"
            yield _found(drift.name, Finding(drift.severity, text, lines), name)
        if set(values.values()) == {expected}:
            same.append(drift.name)
    if same:
        yield _found("versions", ok(f"the same everywhere: {', '.join(same)}"), *cluster.readings)


def clocks(cluster: Cluster) -> Iterator[HostFinding]:
    """Compare each clock with that in the middle."""
    ahead = {name: seconds for name, seconds in cluster.ahead_s.items() if name in cluster.readings}
    if not ahead:
        return
    middle = median_low(ahead.values())
    like = next(name for name, seconds in ahead.items() if seconds == middle)
    for name, seconds in ahead.items():
        if (off := seconds - middle) and abs(off) > _WARN_CLOCK_S:
            reading = cluster.readings[name]
            text = (
                f"{abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} that of {like}: logs and causes are mixed up"
            )
            finding = problem if abs(off) > _BAD_CLOCK_S else warning
            line = reading.as_root("chronyc makestep")
            if "chronyd" not in reading.facts.get("programs", ()):
                line = reading.as_root("systemctl restart systemd-timesyncd")
            yield _found("clock", finding(text, line), name)
    if all(abs(seconds - middle) <= _WARN_CLOCK_S for seconds in ahead.values()):
        widest = max(ahead.values()) - min(ahead.values())
        yield _found("clock", ok(f"within {widest * 1000:.0f} ms of each other"), *ahead)


def _tried(cluster: Cluster, every: str, some: str) -> str:
    """Return a text about all routes between hosts, or about `some` where not each one was tried."""
    count = len(cluster.readings)
    ways = count * (count - 1)
    return every if len(cluster.ways) == ways else f"{some} ({len(cluster.ways)} of {ways} ways)"


def _names(cluster: Cluster) -> Iterator[HostFinding]:
    """Each host knows the names of the others, by addresses that are theirs."""
    bad = False
    for (here, there), way in cluster.ways.items():
        theirs = addresses_of(cluster.readings[there])
        if is_address(there) or set(way.addresses) & set(theirs):
            continue
        bad = True
        leads = f"{there} is {', '.join(way.addresses)} here, none of its addresses" if way.addresses else ""
        address = way.best.address if way.best else next(iter(theirs), None)
        entry = typed("echo", f"{address} {there}")
        add = (f"{entry} | {cluster.readings[here].as_root('tee -a /etc/hosts')}",) if address else ()
        yield _found("names", warning(leads or f"nobody here knows the name {there}", *add), here)
    if not bad and cluster.ways:
        text = _tried(cluster, "every host knows the names of the others", "every name that was asked for is known")
        yield _found("names", ok(text), *cluster.readings)


def _ports(cluster: Cluster) -> Iterator[HostFinding]:
    """Each host reaches the others by TCP, on a port that nobody has set aside."""
    bad = False
    for (here, there), way in cluster.ways.items():
        if way.best is not None:
            continue
        bad = True
        how = ", ".join(dict.fromkeys(_how(t.how, t.said) for t in way.tcp)) or "it has no address"
        back = cluster.ways.get((there, here))
        mine = back.best.address if back is not None and back.best else None
        source = mine or next(iter(addresses_of(cluster.readings[here])), None)
        text = f"{here} does not reach a free TCP port of this host ({how}): ranks meet at such ports"
        yield _found("ports", problem(text, *_opened(cluster.readings[there], source)), there)
    if not bad and cluster.ways:
        by = dict.fromkeys(_leaving(cluster, here, way) for (here, _), way in cluster.ways.items())
        text = _tried(cluster, "TCP in all directions", "TCP in all directions that were tried")
        yield _found("ports", ok(f"{text}, by {', '.join(filter(None, by))}"), *cluster.readings)


def _how(how: str, said: str) -> str:
    return {"refused": "refused", "another": "another host answers there"}.get(how, said or "no answer")


def _leaving(cluster: Cluster, host: str, way: Route) -> str:
    names = {str(address): str(name) for name, address, _ in cluster.readings[host].facts["addresses"]}
    return names.get(str(way.best.mine), "") if way.best else ""


def _opened(reading: HostReading, source: str | None) -> tuple[str, ...]:
    """Return the lines that let an address in, by the firewall that the host has."""
    programs = reading.facts.get("programs", ())
    if source is None:
        return ()
    if "ufw" in programs:
        return (reading.as_root(f"ufw allow from {source}"),)
    if "firewall-cmd" in programs:
        lines = (f"firewall-cmd --permanent --zone=trusted --add-source={source}", "firewall-cmd --reload")
        return tuple(map(reading.as_root, lines))
    if "iptables" in programs:
        return (reading.as_root(f"iptables -I INPUT -s {source} -j ACCEPT"),)
    if "nft" in programs:
        return (reading.as_root(f"nft insert rule inet filter input ip saddr {source} accept"),)
    return (f"# open TCP from {source} in what guards the network; here that may be:", "ip rule show")


def _mtus(cluster: Cluster) -> Iterator[HostFinding]:
    """Check the MTU of the interfaces by which hosts reach each other, and that packets of full size come through."""
    stalls = [pair for pair, way in cluster.ways.items() if way.best is not None and way.best.how == "stalls"]
    known: dict[tuple[str, str | None], Interface] = {}
    for host, reading in cluster.readings.items():
        try:
            known |= {(host, address): one for one in interfaces(reading) for address in one.addresses}
        except MISREAD as error:
            yield _found("MTU", misread(error), host)
    used: dict[tuple[str, str], int] = {}
    for (here, there), way in cluster.ways.items():
        if way.best is not None:
            ends = ((here, way.best.mine), (there, way.best.address))
            used |= {(end[0], known[end].name): known[end].mtu for end in ends if end in known}
    if not used:
        return
    counts = Counter(used.values())
    most = max(counts.values())
    common = [mtu for mtu, count in counts.items() if count == most]
    expected = min(common) if stalls else max(common)
    differing = {key: mtu for key, mtu in used.items() if mtu != expected}
    for (host, name), mtu in differing.items():
        line = cluster.readings[host].as_root(typed("ip", "link", "set", "dev", name, "mtu", expected))
        text = f"MTU {mtu} on {name}, but {expected} on most others"
        yield _found("MTU", (problem if stalls else warning)(f"{text}: packets may be lost", line), host)
    for here, there in stalls:
        text = f"{there} connects, but what it sends is lost: a small MTU on the way, or a firewall"
        least = min(1500, expected)
        names = [name for host, name in used if host == here]
        lines = [cluster.readings[here].as_root(typed("ip", "link", "set", "dev", n, "mtu", least)) for n in names]
        yield _found("MTU", problem(text, *(() if differing else lines)), here)
    if not differing and not stalls:
        text = _tried(cluster, f"{expected} everywhere", f"{expected} on all ways that were tried")
        yield _found("MTU", ok(f"{text}, and packets of full size come through"), *cluster.readings)


def logins(cluster: Cluster) -> Iterator[HostFinding]:
    """Check ssh from each host to each, without a password: mpirun and others need it, launch only from here."""
    refused: dict[tuple[str, bool], list[str]] = {}
    for (here, there), way in cluster.ways.items():
        if way.ssh.code != 0:
            keys = any(word in way.ssh.last_words() for word in _OF_KEYS)
            refused.setdefault((here, keys), []).append(there)
    trust = typed("shardwright", "hosts", "trust", "-H", ",".join(host.address for host in cluster.hosts))
    for (here, keys), others in refused.items():
        said = cluster.ways[here, others[0]].ssh.last_words()
        lines = [typed("ssh", "-v", "-o", "BatchMode=yes", there, "true") for there in others]
        if keys:
            lines = [f"{trust}  # where you launch from"]
        yield _found("ssh", warning(f"ssh to {', '.join(others)} fails: {said}", *lines), here)
    if not refused and cluster.ways:
        text = _tried(cluster, "without a password, all ways", "without a password, all ways that were tried")
        yield _found("ssh", ok(text), *cluster.readings)


_CHECKS: Mapping[str, Callable[[Cluster], Iterator[HostFinding]]] = {
    "versions": versions, "clock": clocks, "names": _names, "ports": _ports, "MTU": _mtus, "ssh": logins,
}  # fmt: skip
