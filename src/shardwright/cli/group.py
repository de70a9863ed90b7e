"""The group that all commands hang on, `shardwright` itself."""

from __future__ import annotations

import click

from shardwright import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shardwright")
def cli() -> None:
    """Train a PyTorch model on many devices as if it were on one."""
