"""The program of every rank: a script, a module or a program, checked before anything starts."""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shardwright.errors import UsageError

ProgramKind = Literal["script", "module", "program"]
_RANK_COMMANDS = ("train",)  # our own commands that ranks run
_LOCAL_RANK = ("--local_rank", "--local-rank")


@dataclass(frozen=True)
class Program:
    """The program: ``arguments[0]`` is a script's path, a module's name or a program; the rest is handed to it.

    With ``tells_local_rank`` a script that takes ``--local_rank`` is given it, as by torch.distributed.launch.
    """

    kind: ProgramKind
    arguments: tuple[str, ...]
    tells_local_rank: bool = True

    def command_line(self) -> list[str]:
        """Return the program as a command of its own, for ranks that are started singly."""
        if self.kind == "program":
            return list(self.arguments)
        return [sys.executable, *(["-m"] if self.kind == "module" else []), *self.arguments]

    def for_rank(self, variables: Mapping[str, str]) -> Program:
        """Return the program of the rank with these variables."""
        name, *rest = self.arguments
        given = any(word.partition("=")[0] in _LOCAL_RANK for word in rest)
        if not self.tells_local_rank or self.kind != "script" or given or (option := _local_rank_option(name)) is None:
            return self
        return replace(self, arguments=(name, f"{option}={variables['LOCAL_RANK']}", *rest))


def _local_rank_option(script: str) -> str | None:
    """Return how a script spells the option for its local rank; argparse tells ``-`` and ``_`` apart. None without."""
    try:
        text = Path(script).read_bytes()
        if b"local" not in text:
            return None
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except (OSError, SyntaxError, ValueError):
        return None  # the rank says what is wrong with it
    names = [
        argument.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("add_argument", "option")
        for argument in call.args
        if isinstance(argument, ast.Constant) and argument.value in _LOCAL_RANK
    ]
    return str(names[0]) if names else None


def unchecked_program(kind: ProgramKind, arguments: Sequence[str]) -> Program:
    """Return the program where only another machine can tell whether it is there.

    >>> unchecked_program("script", ["train", "--config", "net.yaml"]).arguments
    ('shardwright', 'train', '--config', 'net.yaml')
    """
    name = _first(arguments)
    if kind == "script" and name in _RANK_COMMANDS:
        return _own_command(arguments)
    bare = kind == "script" and os.sep not in name and not name.endswith(".py")
    return Program("program" if bare else kind, tuple(arguments))


def _first(arguments: Sequence[str]) -> str:
    if not arguments or not arguments[0]:
        raise UsageError(
            "nothing to launch; type one of\n"
            "  shardwright launch -n 8 train.py ARGS\n"
            "  shardwright launch -n 8 -m package.module ARGS\n"
            "  shardwright launch -n 8 -- PROGRAM ARGS"
        )
    return arguments[0]


def _own_command(arguments: Sequence[str]) -> Program:
    return Program("module", ("shardwright", *arguments))


def check_program(kind: ProgramKind, arguments: Sequence[str], environment: Mapping[str, str]) -> Program:
    """Return the program, if it can be found with ``environment``'s PATH and PYTHONPATH.

    A bare name that is no file here is one of our own commands for ranks (``train``), or else a program on the PATH.

    Raises `UsageError`, which names what was looked for and the nearest names there are.
    """
    name = _first(arguments)
    if kind == "script" and (command := _command(arguments, environment)):
        return command
    {"script": check_script, "module": _check_module, "program": _check_executable}[kind](name, environment)
    return Program(kind, tuple(arguments))


def _command(arguments: Sequence[str], environment: Mapping[str, str]) -> Program | None:
    """Return the program that a bare name stands for, on the PATH or beside this interpreter; None for a file."""
    name = arguments[0]
    if os.sep in name or os.path.isfile(name) or os.path.isfile(os.path.join(name, "__main__.py")):
        return None
    if name in _RANK_COMMANDS:
        return _own_command(arguments)
    path = shutil.which(name, path=environment.get("PATH")) or shutil.which(name, path=os.path.dirname(sys.executable))
    if path is None:
        return None
    return Program("script" if _runs_here(path, environment) else "program", (path, *arguments[1:]))


def _runs_here(path: str, environment: Mapping[str, str]) -> bool:
    """Return whether the first line of the file names the interpreter that runs this, as in installed commands."""
    try:
        with open(path, "rb") as file:
            line = os.fsdecode(file.readline(512))
    except OSError:
        return False
    words = line[2:].split() if line.startswith("#!") else []
    if len(words) == 2 and os.path.basename(words[0]) == "env":
        words = [shutil.which(words[1], path=environment.get("PATH")) or ""]
    # By folder: in a virtual environment python, python3 and python3.11 are one, elsewhere than what they link to.
    return (
        len(words) == 1
        and os.path.basename(words[0]).startswith("python")
        and os.path.dirname(os.path.abspath(words[0])) == os.path.dirname(os.path.abspath(sys.executable))
    )


def check_script(name: str, environment: Mapping[str, str]) -> None:
    """Raise `UsageError` where the file ``name``, a Python script, cannot be run."""
    path = Path(name)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(f"{name} is a directory without __main__.py; expected a Python script")
    if path.exists():
        if not os.access(path, os.R_OK):
            raise UsageError(f"the script {name} may not be read by this user; type `chmod u+r {name}`")
        return
    message = f"the script {name} does not exist (looked in {path.absolute().parent})"
    if os.sep not in name and not path.suffix:
        message += ", and no program of that name is on the PATH"
    if near := _nearest_scripts(path):
        message += f"; near it: {', '.join(near)}"
    if near := difflib.get_close_matches(name, _RANK_COMMANDS, n=1):
        message += f"; did you mean `{near[0]}`, a command of shardwright?"
    raise UsageError(message)


def _nearest_scripts(path: Path) -> list[str]:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return []
    return [str(path.with_name(name)) for name in difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)]


def _check_module(name: str, environment: Mapping[str, str]) -> None:
    """Raise `UsageError` where there is no such top package: to find more would import it, and perhaps torch."""
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
