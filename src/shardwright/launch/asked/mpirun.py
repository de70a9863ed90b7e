"""mpirun as the one who starts the ranks of this host: where it is, and what it is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright.errors import LaunchError, UsageError

# What `shardwright launch --backend` says to sw.init(), where that is not given a backend.
BACKEND_VARIABLE = "SHARDWRIGHT_BACKEND"
INSTALL = "pip install 'shardwright[mpi]'"


def find_mpirun(environment: Mapping[str, str]) -> str:
    """The mpirun beside this Python, to which the installed mpi4py belongs, or else the one on the PATH.

    Raises `LaunchError` where there is none, or another MPI's, which understands other options.
    """
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which(
        "mpirun", path=environment.get("PATH")
    )
    if found is None:
        raise LaunchError(f"--via mpirun: there is no mpirun beside {sys.executable} or on the PATH; type {INSTALL}")
    try:
        answer = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False)
        version = (answer.stdout or answer.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        version = str(error)
    if "Open MPI" not in version and "OpenRTE" not in version:
        first = version.splitlines()[0] if version else "says nothing"
        raise LaunchError(
            f"--via mpirun understands Open MPI's mpirun, but {found} --version answers: {first}; type {INSTALL}, or "
            "start the ranks yourself with `mpirun -n N python train.py`"
        )
    return found


def mpirun_command(mpirun: str, ranks: int, mca: Sequence[tuple[str, str]], root: bool) -> tuple[str, ...]:
    """Its command line up to the program: as many slots on this host as ranks, and no rank bound to a core.

    Bound ranks would hold the threads of torch to one core each; where ranks outnumber the cores, two that wait for
    each other could be bound to the same one.
    """
    return (
        mpirun,
        *(("--allow-run-as-root",) if root else ()),
        *("--host", f"localhost:{ranks}", "-n", str(ranks), "--bind-to", "none"),
        *(word for name, value in mca for word in ("--mca", name, value)),
    )


def read_mca(words: Sequence[tuple[str, str]], via: str) -> tuple[tuple[str, str], ...]:
    """``--mca NAME VALUE``, which only mpirun takes."""
    for name, value in words:
        if via != "mpirun":
            raise UsageError(f"--mca {name} {value} is a setting of mpirun; type --via mpirun too")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--mca {name} {value} names no setting; type --mca NAME VALUE, as --mca pml ob1")
    return tuple(words)


def read_backend(backend: str | None, via: str) -> dict[str, str]:
    """``--backend`` as the variable that sw.init() reads."""
    if backend == "mpi" and via != "mpirun":
        raise UsageError("--backend mpi needs ranks that mpirun starts; type --via mpirun --backend mpi")
    return {} if backend is None else {BACKEND_VARIABLE: backend}


def runs_as_root() -> bool:
    return os.geteuid() == 0
