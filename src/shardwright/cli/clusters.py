"""The commands that prepare hosts: `shardwright doctor` looks, `hosts trust` and `hosts check` are about logins."""

from __future__ import annotations

import sys
from typing import Any

import click

from shardwright.cli.group import HOST, HOSTFILE, PYTHON, TIMEOUT, WDIR, on_hosts
from shardwright.errors import UsageError


@click.command()
@on_hosts
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
@click.option("--fix-script", "script", is_flag=True, help="Print a script of what to type; nothing is run.")
def doctor(as_json: bool, script: bool, **where: Any) -> None:
    """Look for what is in the way of a job on this host or on several, and say what to type.

    \b
    shardwright doctor
    shardwright doctor -H a,b
    shardwright doctor -H a,b --fix-script > fix.sh

    The exit code is 0, or 1 where something slows or endangers a job, or 2 where something is in its way.
    """
    from shardwright.cluster.doctor.command import doctor as run
    from shardwright.launch.options.request import NamedHosts

    if as_json and script:
        raise UsageError("--json and --fix-script both print everything; type one of them")
    sys.exit(run(NamedHosts.read(**where), as_json, script))


@click.group()
def hosts() -> None:
    """Let hosts log in to each other without a password, and prove that they do."""


@hosts.command()
@on_hosts
@click.option("--dry-run", "dry", is_flag=True, help="Show what would be done, and end.")
@click.option("--undo", is_flag=True, help="Put everything back as it was before.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before it is done.")
def trust(dry: bool, undo: bool, yes: bool, **where: Any) -> None:
    """Let every host log in to every other one by ssh without a password.

    \b
    shardwright hosts trust -H a,b,c --dry-run
    shardwright hosts trust -H a,b,c

    A key is made where a host has none; none is overwritten. The hosts' keys that this machine knows are made known to
    all of them. What will be done is shown first. ssh asks for a password where it needs one; it is not kept.
    """
    from shardwright.cluster.trust.command import trust as run
    from shardwright.launch.options.request import NamedHosts

    sys.exit(run(NamedHosts.read(**where), dry, undo, yes))


@hosts.command("check")
@on_hosts
def check_hosts(**where: Any) -> None:
    """Try ssh from every host to every other one; the exit code is 0 where no pair needs a password."""
    from shardwright.cluster.trust.command import check as run
    from shardwright.launch.options.request import NamedHosts

    sys.exit(run(NamedHosts.read(**where)))


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--ranks", metavar="N", help="How many ranks; without it one per slot of the hosts.")
@HOST
@HOSTFILE
@PYTHON
@WDIR
@click.option("--port", type=int, help="The port where the ranks would meet; without it a free one is chosen.")
@click.option("--interface", metavar="NAME", help="The network interface of the first host by which ranks would meet.")
@TIMEOUT
@click.argument("command", metavar="[SCRIPT]...", nargs=-1, type=click.UNPROCESSED)
def check(
    ranks: str | None,
    port: int | None,
    command: tuple[str, ...],
    **where: Any,
) -> None:
    """Make the checks that come before a job on several hosts, without the job.

    \b
    shardwright check -H a:8,b:8
    shardwright check -H a:8,b:8 train.py

    The options are those of `shardwright launch`. The exit code is 0 where the job could start, and 2 where not.
    """
    import os

    from shardwright.launch.check import check as lines_of
    from shardwright.launch.options.request import HostRequest, LaunchRequest

    request = LaunchRequest(
        arguments=command or ("true",), kind="script" if command else "program", ranks=ranks, port=port, log_dir=".",
        where=HostRequest(**where, allocation=os.environ),
    )  # fmt: skip
    for line in lines_of(request):
        click.echo(line)
