"""`shardwright doctor`: look at this host or at several, and print what was found."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import click
from rich.console import Console

from shardwright.cluster.doctor import probe
from shardwright.cluster.doctor.checks import CHECKS
from shardwright.cluster.doctor.checks.between import check_between
from shardwright.cluster.doctor.finding import Found, Severity, examine
from shardwright.cluster.doctor.reach import Cluster, ask_all
from shardwright.cluster.doctor.reading import Reading
from shardwright.cluster.doctor.table import fix_script, merge, show, to_json
from shardwright.errors import UsageError
from shardwright.launch.hosts.hosts import Host, Hosts
from shardwright.launch.options.request import HostRequest, PerHost


def doctor(
    hosts: str | None,
    hostfile: str | None,
    python: Sequence[str],
    connect_timeout_s: float,
    as_json: bool,
    script: bool,
) -> int:
    """Look, print, and return the exit code: 0, 1 for warnings, 2 for problems."""
    if as_json and script:
        raise UsageError("--json and --fix-script both print everything; type one of them")
    named, _ = HostRequest(hosts=hosts, hostfile=hostfile).named(None)
    cluster = (
        look_here() if named is None else ask_all(named, PerHost.read("--python", python, named), connect_timeout_s)
    )
    found = find(cluster)
    names = [host.name for host in cluster.hosts]
    if as_json:
        click.echo(to_json(found, names))
    elif script:
        click.echo(fix_script(found, cluster.readings), nl=False)
    else:
        show(found, names, Console())
    return max((one.finding.severity for one in found), default=Severity.OK).exit_code


def look_here() -> Cluster:
    """This host alone, without a probe."""
    name = socket.gethostname()
    return Cluster(Hosts((Host(name),)), {name: Reading.of(name, probe.look())})


def find(cluster: Cluster) -> list[Found]:
    """All findings, as the table shows them."""
    each = [examine(check, reading) for check in CHECKS for reading in cluster.readings.values()]
    return merge([*check_between(cluster), *each])
