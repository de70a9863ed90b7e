"""The command line. Each command imports what it needs inside the command, so that none waits for torch in vain."""

from __future__ import annotations

import sys

import click

from shardwright import __version__
from shardwright.errors import ShardwrightError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shardwright")
def cli() -> None:
    """Train a PyTorch model on many devices as if it were on one."""


def main() -> None:
    """The entry point: our own errors are one readable message and exit code 2, not a traceback."""
    try:
        cli()
    except ShardwrightError as error:
        click.echo(f"shardwright: {error}", err=True)
        sys.exit(2)
