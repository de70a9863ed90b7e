"""The carriers, which start the ranks of a job, as one table: what each can do, and which options it does not admit.

A person chooses one with ``--via``. The functions that make each one's connections stand in
`shardwright.launch.start.STARTS`, since these rows are read before anything of the carriers is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.errors import UsageError
from shardwright.launch.options.mpirun import StartCommand, mpirun_start


@dataclass(frozen=True, kw_only=True)
class CarrierFacts:
    """What a carrier can do; one that is not said to can not.

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
        """The carrier of a job that is on hosts or on this one, where none was named."""
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
    """The row of ``--via``, `UNSAID` without it. Raises `UsageError` for a name that no row has."""
    if via is not None and via not in CARRIERS:
        raise UsageError(f"--via {via} is no carrier; choose one of {', '.join(CARRIERS)}")
    return UNSAID if via is None else CARRIERS[via]


def carrier_of_backend(backend: str | None) -> CarrierFacts:
    """The carrier that starts ranks of a backend on this host."""
    return next((row for row in CARRIERS.values() if backend in row.backends), LOCAL)
