"""The first commands: `shardwright init` writes a project, `completion` a shell's completion script."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from shardwright.cli.group import cli
from shardwright.errors import UsageError

_STARTER = Path(__file__).with_name("starter")
_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(file_okay=False))
def init(folder: str) -> None:
    """Write a small project to begin with: a model, its configuration and what trains it.

    It is written into DIR, or here; nothing that is there already is written over.
    """
    target = Path(folder)
    for path in write_starter(target):
        click.echo(path)
    enter = "" if target == Path() else f"cd {shlex.quote(folder)} && "
    click.echo(f"\nTrain it on two ranks: {enter}shardwright launch -n 2 train.py")


def write_starter(target: Path) -> list[Path]:
    """Write the project and return its files; all or none. Raises `UsageError` where one is there or cannot be."""
    sources = {target / path.name.removesuffix(".txt"): path for path in sorted(_STARTER.iterdir())}
    if there := [path.name for path in sources if path.exists()]:
        raise UsageError(
            f"{target.resolve()} has {', '.join(there)} already, and nothing was written; name another folder: "
            "shardwright init DIR"
        )
    begun: list[Path] = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, source in sources.items():
            with path.open("x") as file:
                begun.append(path)
                file.write(source.read_text())
    except OSError as error:
        for path in begun:
            path.unlink(missing_ok=True)
        raise UsageError(f"the project cannot be written to {target}: {error.strerror}") from error
    return list(sources)


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print what has a shell complete commands, options and the files that they take.

    \b
    bash  eval "$(shardwright completion bash)"      in ~/.bashrc
    zsh   eval "$(shardwright completion zsh)"       in ~/.zshrc
    fish  shardwright completion fish | source       in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    written = get_completion_class(shell)
    assert written is not None
    click.echo(written(cli, {}, "shardwright", "_SHARDWRIGHT_COMPLETE").source())
