"""`shardwright hosts trust` and `hosts check`: set up and verify logins between hosts without a password."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import click

from shardwright.cluster.programs.connection import Probe, open_all
from shardwright.cluster.trust import on_host
from shardwright.cluster.trust.plan import MissingLogins, SshState, authorized_line, known_lines, plan, public_key
from shardwright.common.words import plain
from shardwright.errors import LaunchError, UsageError
from shardwright.launch.hosts.hosts import Host, Hosts
from shardwright.launch.options.request import NamedHosts

Opened = Mapping[str, Probe]


def trust(where: NamedHosts | None, dry: bool, undo: bool, yes: bool) -> int:
    """Show what will be done, do it, and prove it; returns the exit code."""
    where = _checked(where)
    named = where.hosts
    alone = not sys.stdin.isatty()  # nobody whom ssh could ask
    with _open(where, batch=alone) as opened:
        looks = {host.name: SshState.of(host, opened[host.name].demand({"order": "look"})) for host in named}
        if undo:
            return _undo(named, opened, looks, dry, yes)
        known = {host.name: known_lines(host) for host in named}
        lacking = plan(named.hosts, looks, known)
        for line in (line for one in lacking for line in one.lines()):
            click.echo(line)
        if dry:
            return 0
        if not all(one.nothing for one in lacking):
            if not _may(yes):
                return 1
            _apply(named, opened, lacking, looks, known)
        return _prove(named, opened)


def check(where: NamedHosts | None) -> int:
    """Try ssh between all pairs; the exit code is 0 where every one needs no password."""
    where = _checked(where)
    named = where.hosts
    with _open(where, batch=True) as opened:
        return _prove(named, opened)


def _checked(where: NamedHosts | None) -> NamedHosts:
    if where is None:
        raise UsageError("no hosts are named; type -H a,b,... or --hostfile FILE")
    if len(where.hosts) < 2:
        raise UsageError(f"one host logs in to nobody, got {where.hosts.hosts[0].address}; type -H with two or more")
    return where


@contextlib.contextmanager
def _open(where: NamedHosts, batch: bool) -> Iterator[Opened]:
    """Yield the program on each host, connected. Raises `LaunchError` where one host is silent."""
    with open_all(where, on_host.__name__, batch) as (opened, silent):
        if silent:
            listed = "".join(f"\n  {name}: {plain(why)}" for name, why in silent.items())
            raise LaunchError(
                f"{len(silent)} of {len(where.hosts)} hosts cannot be used, and nothing was changed:{listed}"
            )
        yield opened


def _may(yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        click.echo("nothing was changed: nobody is here to ask; type --yes", err=True)
        return False
    return click.confirm("Go on?")


def _apply(
    hosts: Hosts, opened: Opened, lacking: Sequence[MissingLogins], looks: Mapping[str, SshState],
    known: Mapping[str, Sequence[str]],
) -> None:  # fmt: skip
    """Make keys, then let every host in at every other one."""
    keys: dict[str, str] = {}
    try:
        for one in lacking:
            key = looks[one.host.name].key
            if one.makes_key:
                key = public_key(one.host, opened[one.host.name].demand({"order": "key"}).get("key"))
            if key is None:
                raise LaunchError(f"{one.host.name}: no key was made")
            keys[one.host.name] = key
        for one in lacking:
            lines = [authorized_line(o, keys[o.name]) for o in hosts if o.name in one.lets_in]
            names = [line for name in one.knows for line in known[name]]
            if lines or names:
                opened[one.host.name].demand({"order": "add", "authorized": lines, "known": names})
    except LaunchError as error:
        typed = ",".join(host.address for host in hosts)
        raise LaunchError(f"{error}\nwhat was done until then is undone by `hosts trust -H {typed} --undo`") from None


def _undo(hosts: Hosts, opened: Opened, looks: Mapping[str, SshState], dry: bool, yes: bool) -> int:
    for host in hosts:
        files = ", ".join(f"~/.ssh/{plain(name)}" for name in looks[host.name].undo)
        click.echo(f"{host.name}: {f'put back {files}' if files else 'nothing to undo'}")
    if dry or not any(look.undo for look in looks.values()):
        return 0
    if not _may(yes):
        return 1
    for host in hosts:
        told = opened[host.name].demand({"order": "undo"})
        for name in told.get("cleaned", ()):
            click.echo(f"{host.name}: ~/.ssh/{plain(name)} was changed by others since; only our lines were taken out")
        for name in told.get("left", ()):
            click.echo(f"{host.name}: ~/.ssh/{plain(name)} was changed by others since, and was left")
    return 0


def _prove(hosts: Hosts, opened: Opened) -> int:
    targets = {host.name: host.login for host in hosts}

    def ask(host: Host) -> dict[str, str | None]:
        others = {name: target for name, target in targets.items() if name != host.name}
        said = opened[host.name].demand({"order": "login", "targets": list(others.values())}).get("logins")
        if not isinstance(said, dict) or any(target not in said for target in others.values()):
            raise LaunchError(f"{host.name} did not say whom it reaches")
        return {name: said[target] for name, target in others.items()}

    with ThreadPoolExecutor(len(hosts)) as pool:
        found = dict(zip((host.name for host in hosts), pool.map(ask, hosts), strict=True))
    bad = 0
    for name, others in found.items():
        if good := [other for other, why in others.items() if why is None]:
            click.echo(f"{name} → {', '.join(good)}: no password")
        for other, why in ((other, why) for other, why in others.items() if why is not None):
            bad += 1
            click.echo(f"{name} → {other}: {plain(why)}")
    count = len(hosts) * (len(hosts) - 1)
    click.echo(f"{count - bad} of {count} ways need no password")
    return 1 if bad else 0
