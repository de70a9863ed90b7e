"""The command line. Each command imports what it needs inside the command, so that none waits for torch in vain."""

from __future__ import annotations

import sys

import click

# Each hangs its commands on the group.
from shardwright.cli import (  # noqa: F401
    beginning,
    checkpoints,
    clusters,
    jobs,
    launching,
    machines,
    planning,
    tables,
    training,
)
from shardwright.cli.group import cli
from shardwright.common.system_errors import in_words, is_explained
from shardwright.errors import ShardwrightError

__all__ = ["cli", "main"]


def main() -> None:
    """The entry point: our own errors, and what the system refuses, are one message and exit code 2, no traceback."""
    try:
        cli()
    except ShardwrightError as error:
        click.echo(f"shardwright: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if not is_explained(error):
            raise
        click.echo(f"shardwright: {in_words(error)}", err=True)
        sys.exit(2)
