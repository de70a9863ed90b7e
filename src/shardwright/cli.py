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


@cli.group()
def data() -> None:
    """Data sets to try things with."""


@data.command()
@click.option("--format", default="mnist", show_default=True, help="The data set whose files are written: mnist.")
@click.option("--out", type=click.Path(file_okay=False), required=True, metavar="DIR", help="The folder to write to.")
@click.option("--force", is_flag=True, help="Replace another data set that is there already.")
def digits(format: str, out: str, force: bool) -> None:
    """Write scikit-learn's 1,797 handwritten digits, 1,437 to train and 360 to test, as the files of a data set."""
    from shardwright.data.digits import write_digits

    for path in write_digits(out, format, force):
        click.echo(path)


def main() -> None:
    """The entry point: our own errors are one readable message and exit code 2, not a traceback."""
    try:
        cli()
    except ShardwrightError as error:
        click.echo(f"shardwright: {error}", err=True)
        sys.exit(2)
