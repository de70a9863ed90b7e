"""The command line. Each command imports its modules when it runs, so that only those that need torch load it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from shardwright.cli.group import cli
from shardwright.common.system_errors import in_words, is_explained
from shardwright.errors import ShardwrightError

__all__ = ["cli", "main"]


def main() -> None:
    """Run the command that was typed."""
    run(cli)


def run(command: Callable[[], object]) -> None:
    """Run a command; our own errors, and what the system refuses, are one message and exit code 2."""
    try:
        command()
    except ShardwrightError as error:
        click.echo(f"shardwright: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if not is_explained(error):
            raise
        click.echo(f"shardwright: {in_words(error)}", err=True)
        sys.exit(2)
