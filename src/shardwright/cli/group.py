"""The group of all commands, `shardwright` itself, and the options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from shardwright import __version__

COMMANDS: Mapping[str, str] = {
    "bench": "machines",
    "check": "clusters",
    "checkpoint": "checkpoints",
    "completion": "beginning",
    "data": "training",
    "doctor": "clusters",
    "hosts": "clusters",
    "init": "beginning",
    "launch": "launching",
    "logs": "jobs",
    "plan": "planning",
    "ps": "jobs",
    "ranktable": "tables",
    "report": "jobs",
    "stop": "jobs",
    "traffic": "machines",
    "train": "training",
    "verify": "planning",
    "watch": "jobs",
}
"""Every command, which is a function of its own name, and the module of this package that has it."""


class LazyGroup(click.Group):
    """A group that imports the module of a command when that is typed; ``--help`` and completion import them all."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"shardwright.cli.{COMMANDS[cmd_name]}"), cmd_name)
        return command


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
    """Complete a file name, as the shell itself does."""
    return [CompletionItem(begun, type="file")]


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="shardwright")
def cli() -> None:
    """Train a PyTorch model on many devices as if it were on one."""


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
TIMEOUT = click.option("--connect-timeout", "connect_timeout_s", default=10.0, metavar="SECONDS", help="For ssh.")


def on_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that `NamedHosts.read` takes."""
    return HOST(HOSTFILE(PYTHON(TIMEOUT(command))))


LOG_DIR = click.option("--log-dir", default="log_output", metavar="DIR", help="Where the jobs' folders are.")
