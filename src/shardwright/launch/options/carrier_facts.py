"""The carriers, which start the ranks of a job, as one table: what each can do, and which options it does not admit.

A person chooses one with ``--via``. The functions that make each one's connections stand in
`shardwright.launch.start.STARTS`, since these rows are read before anything of the carriers is imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.errors import LaunchError, UsageError

INSTALL = "pip install 'shardwright[mpi]'"


@dataclass(frozen=True)
class StartCommand:
    """A command line, up to the program, that starts all ranks of this host. ``note`` is shown to the person first."""

    words: tuple[str, ...]
    note: str = ""


def mpirun_start(ranks: int, mca: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> StartCommand:
    """Return the command line of the mpirun that is to be had here. Raises `LaunchError` where there is none."""
    root = os.geteuid() == 0
    note = "mpirun is told that it may run as root; it would rather not" if root else ""
    return StartCommand(mpirun_command(find_mpirun(environment), ranks, mca, root), note)


def find_mpirun(environment: Mapping[str, str]) -> str:
    """Return the mpirun beside this Python, to which the installed mpi4py belongs, or else the one on the PATH.

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
    """Return the command line of mpirun up to the program, with no rank bound to a core.

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


@dataclass(frozen=True, kw_only=True)
class CarrierFacts:
    """The abilities of a carrier; one that is not set is lacking.

    Attributes:
        name: what is typed after ``--via``.
        here: whether it starts ranks on this host without an agent.
        on_hosts: whether it starts ranks on the hosts that are named, be this one among them or not.
        in_allocation: whether it starts ranks in an allocation of Slurm alone, where it takes all hosts of it unless
            some are named; ``--print slurm`` writes a script that uses it.
        backends: those whose ranks no other carrier can start.
        takes_mca: whether ``--mca`` is for it.
        start_command: makes, from the number of ranks, the settings of ``--mca`` and the environment, the command line
            that starts all ranks of this host, where our supervisor does not start them itself.
        refusals: what is said where an option is typed that it does not admit.
    """

    name: str
    here: bool = False
    on_hosts: bool = False
    in_allocation: bool = False
    backends: frozenset[str] = frozenset()
    takes_mca: bool = False
    start_command: Callable[[int, Sequence[tuple[str, str]], Mapping[str, str]], StartCommand] | None = None
    refusals: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, option: str) -> None:
        """Raise `UsageError` where the option, which was typed, is not admitted."""
        if option in self.refusals:
            raise UsageError(self.refusals[option])

    def settled(self, on_hosts: bool) -> CarrierFacts:
        """Return the carrier of a job that is on hosts or on this one, where none was named."""
        return (SSH if on_hosts else LOCAL) if self is UNSAID else self


LOCAL = CarrierFacts(name="local", here=True)
SSH = CarrierFacts(name="ssh", on_hosts=True)
SRUN = CarrierFacts(name="srun", on_hosts=True, in_allocation=True)
MPIRUN = CarrierFacts(
    name="mpirun", here=True, backends=frozenset({"mpi"}), takes_mca=True, start_command=mpirun_start
)  # fmt: skip
TORCHRUN = CarrierFacts(
    name="torchrun",
    here=True,
    on_hosts=True,
    refusals={
        "--elastic": "--elastic counts ranks, and --via torchrun starts one torchrun for each host; leave one of them "
        "out",
        # On this host alone a table says no more than how many ranks there are.
        "--rank-table on hosts": "--via torchrun numbers ranks by host, not as a rank table does; type -H or "
        "--hostfile",
        "--stall-timeout without --run": "torchrun looks for no hangs; --stall-timeout needs --run, or another --via",
    },
)
CARRIERS: Mapping[str, CarrierFacts] = {row.name: row for row in (LOCAL, SSH, MPIRUN, SRUN, TORCHRUN)}

UNSAID = CarrierFacts(name="ssh where there are other hosts, else local", here=True, on_hosts=True)
"""Without ``--via`` the hosts decide which of two carriers it is."""


def carrier_facts(via: str | None) -> CarrierFacts:
    """Return the row of ``--via``, `UNSAID` without it. Raises `UsageError` for a name that no row has."""
    if via is not None and via not in CARRIERS:
        raise UsageError(f"--via {via} is no carrier; choose one of {', '.join(CARRIERS)}")
    return UNSAID if via is None else CARRIERS[via]


def carrier_of_backend(backend: str | None) -> CarrierFacts:
    """Return the carrier that starts ranks of a backend on this host."""
    return next((row for row in CARRIERS.values() if backend in row.backends), LOCAL)
