"""The options of commands that go to hosts: which, by which interpreter, where, and how long ssh may take."""

from __future__ import annotations

import click

from shardwright.cli.group import file_names

HOST = click.option("-H", "--host", "hosts", metavar="a,b", help="The hosts; without any this one alone.")
HOST_SLOTS = click.option("-H", "--host", "hosts", metavar="a:8,b:8", help="The hosts and how many ranks each takes.")
HOSTFILE = click.option("--hostfile", metavar="FILE", shell_complete=file_names, help="The same as lines `a slots=8`.")
PYTHON = click.option(
    "--python",
    multiple=True,
    metavar="[HOST=]PATH",
    help="The interpreter on the hosts; without it the path of this one.",
)
WDIR = click.option(
    "--wdir", multiple=True, metavar="[HOST=]DIR", help="The working directory on the hosts; without it this one."
)
TIMEOUT = click.option(
    "--connect-timeout", "connect_timeout_s", default=10.0, show_default=True, metavar="SECONDS", help="For ssh."
)
