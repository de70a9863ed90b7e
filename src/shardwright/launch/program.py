"""What every rank runs: a script, a module or a program, checked before anything starts."""

from __future__ import annotations

import difflib
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwright.errors import UsageError

Kind = Literal["script", "module", "program"]


@dataclass(frozen=True)
class Program:
    """``arguments[0]`` is the script's path, the module's name or the program; the rest is handed to it."""

    kind: Kind
    arguments: tuple[str, ...]

    def command_line(self) -> list[str]:
        """The program as a command of its own, for ranks that are started singly."""
        if self.kind == "program":
            return list(self.arguments)
        return [sys.executable, *(["-m"] if self.kind == "module" else []), *self.arguments]


def check_program(kind: Kind, arguments: Sequence[str], environment: Mapping[str, str]) -> Program:
    """The program, if it can be found with ``environment``'s PATH and PYTHONPATH.

    Raises `UsageError`, which names what was looked for and the nearest names there are.
    """
    if not arguments or not arguments[0]:
        raise UsageError(
            "nothing to launch; type one of\n"
            "  shardwright launch -n 8 train.py ARGS\n"
            "  shardwright launch -n 8 -m package.module ARGS\n"
            "  shardwright launch -n 8 -- PROGRAM ARGS"
        )
    {"script": _check_script, "module": _check_module, "program": _check_executable}[kind](arguments[0], environment)
    return Program(kind, tuple(arguments))


def _check_script(name: str, environment: Mapping[str, str]) -> None:
    path = Path(name)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(f"{name} is a directory without __main__.py; expected a Python script")
    if path.exists():
        if not os.access(path, os.R_OK):
            raise UsageError(f"the script {name} may not be read by this user; type `chmod u+r {name}`")
        return
    message = f"the script {name} does not exist (looked in {path.absolute().parent})"
    if near := _nearest_scripts(path):
        message += f"; near it: {', '.join(near)}"
    if shutil.which(name, path=environment.get("PATH")):
        message += f"; to run the program of that name type `-- {name}`"
    raise UsageError(message)


def _nearest_scripts(path: Path) -> list[str]:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return []
    return [str(path.with_name(name)) for name in difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)]


def _check_module(name: str, environment: Mapping[str, str]) -> None:
    """Only the top package is looked up: finding more would import it, and with it perhaps torch."""
    if name.endswith(".py"):
        raise UsageError(f"-m takes a module's name, not a file; type {name} without -m, or -m {name[:-3]}")
    top = name.partition(".")[0]
    folders = [os.getcwd(), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    if top not in sys.builtin_module_names and not importlib.machinery.PathFinder.find_spec(top, folders):
        raise UsageError(f"no module named {top} in this directory, PYTHONPATH or {sys.prefix}")


def _check_executable(name: str, environment: Mapping[str, str]) -> None:
    if shutil.which(name, path=environment.get("PATH")):
        return
    if Path(name).is_file():
        raise UsageError(f"{name} is not a program that may be run; type `chmod +x {name}`, or `-- sh {name}`")
    raise UsageError(f"no program {name} on the PATH; to run a Python script type it without `--`")
