"""The group that all commands hang on, `shardwright` itself."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from shardwright import __version__


class RowOf(click.Choice):  # type: ignore[type-arg]  # generic from click 8.4 on
    """The name of a row of ``table`` in ``module``, imported only where the option is typed or its help is shown."""

    def __init__(self, module: str, table: str) -> None:
        self._module, self._table = module, table
        self.case_sensitive = True

    @cached_property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]  # read when it is first asked for
        """Return the names of the rows. Cached: a table of the package is a constant of its module."""
        return tuple(getattr(import_module(self._module), self._table))


def file_names(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """What a shell completes by itself: the files that begin like this."""
    return [CompletionItem(begun, type="file")]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shardwright")
def cli() -> None:
    """Train a PyTorch model on many devices as if it were on one."""
