"""mpirun as the one that starts the ranks of this host: where it is, and its command line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import LaunchError, UsageError

INSTALL = "pip install 'shardwright[mpi]'"


@dataclass(frozen=True)
class StartCommand:
    """A command line, up to the program, that starts all ranks of this host. ``note`` is shown to the person first."""

    words: tuple[str, ...]
    note: str = ""


def mpirun_start(ranks: int, mca: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> StartCommand:
    """The command line of the mpirun that is to be had here. Raises `LaunchError` where there is none."""
    root = os.geteuid() == 0
    note = "mpirun is told that it may run as root; it would rather not" if root else ""
    return StartCommand(mpirun_command(find_mpirun(environment), ranks, mca, root), note)


def find_mpirun(environment: Mapping[str, str]) -> str:
    """The mpirun beside this Python, to which the installed mpi4py belongs, or else the one on the PATH.

    Raises `LaunchError` where there is none, or another MPI's, which understands other options.
    """
    beside, path = str(Path(sys.executable).parent), environment.get("PATH")
    mpirun = shutil.which("mpirun", path=beside) or shutil.which("mpirun", path=path)
    if mpirun is None:
        raise LaunchError(f"--via mpirun: there is no mpirun beside {sys.executable} or on the PATH; type {INSTALL}")
    try:
        answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False)
        version = (answer.stdout or answer.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        version = str(error)
    if "Open MPI" not in version and "OpenRTE" not in version:
        first = version.splitlines()[0] if version else "says nothing"
        raise LaunchError(
            f"--via mpirun understands Open MPI's mpirun, but {mpirun} --version answers: {first}; type {INSTALL}, or "
            "start the ranks yourself with `mpirun -n N python train.py`"
        )
    return mpirun


def mpirun_command(
    mpirun: str, ranks: int, mca: Sequence[tuple[str, str]], root: bool, hosts: str = ""
) -> tuple[str, ...]:  # fmt: skip
    """The command line of mpirun up to the program, and no rank bound to a core.

    Without ``hosts``, as ``a:2,b:2``, there are as many slots on this host as ranks.

    Bound ranks would hold the threads of torch to one core each; where ranks outnumber the cores, two that wait for
    each other could be bound to the same one.
    """
    return (
        mpirun,
        *(("--allow-run-as-root",) if root else ()),
        *("--host", hosts or f"localhost:{ranks}", "-n", str(ranks), "--bind-to", "none"),
        *(word for name, value in mca for word in ("--mca", name, value)),
    )


def check_mca(words: Sequence[tuple[str, str]]) -> None:
    """Raise `UsageError` where a word of ``--mca NAME VALUE`` names no setting."""
    for name, value in words:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--mca {name} {value} names no setting; type --mca NAME VALUE, as --mca pml ob1")
