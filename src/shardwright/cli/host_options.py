"""The options of commands that look at hosts: which, by which interpreter, and how long ssh may take."""

from __future__ import annotations

import click

HOST = click.option("-H", "--host", "hosts", metavar="a,b", help="The hosts; without any this one alone.")
HOSTFILE = click.option("--hostfile", metavar="FILE", help="The same as lines `a slots=8`.")
PYTHON = click.option(
    "--python",
    multiple=True,
    metavar="[HOST=]PATH",
    help="The interpreter on the hosts; without it the path of this one.",
)
TIMEOUT = click.option(
    "--connect-timeout", "connect_timeout_s", default=10.0, show_default=True, metavar="SECONDS", help="For ssh."
)
