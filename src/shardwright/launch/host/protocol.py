"""The messages between a launcher and a supervisor, over pipes (`stream`).

The launcher's first message is what to start (`Start`), then come orders (`Order`). The end of its stream is an order
to kill, and so is its silence for the time of the lease. The supervisor answers with events (`Event`), of which the
last one is `Ended`; all that a rank wrote before it ended comes before its `Exited`.

Both ends are pipes: standard input and output of the supervisor. On other hosts the same stream passes through ssh and
an agent, which adds to it (`agent_protocol`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from shardwright.launch.host.program import Program

STREAMS = ("stdout", "stderr")


class LogRetention(NamedTuple):
    """The place where an agent is to write the logs of its ranks, if they stay on its host.

    ``shown`` are the ranks whose output goes to the launcher all the same, ``begin`` is the first line of a restart.
    """

    folder: str
    shown: tuple[int, ...]
    begin: str


class Start(NamedTuple):
    """The order to start one process per entry of ``ranks``, each with its own variables beside the common ones.

    ``preload``: import torch once and fork the ranks. ``held``: file descriptors that ranks must not inherit.
    ``carrier``: the command, of mpirun, that is to start the ranks, in place of the supervisor itself. ``bind``: each
    rank has cores of its own. ``stall_s``: after how long a silence of all ranks somebody will ask where they are; None
    for never. Under an agent on another host: ``packed``, this package came with the agent and is not what ranks
    import; ``lease_s``, how long the orders may be silent; ``scratch``, the job's folder on the host. For the agent
    alone: ``environment``, what is common to the ranks beside what `Check` said; ``kept``, set where logs stay on the
    host.
    """

    program: Program
    preload: bool
    ranks: dict[int, dict[str, str]]
    held: tuple[int, ...] = ()
    carrier: tuple[str, ...] = ()
    packed: bool = False
    lease_s: float | None = None
    scratch: str | None = None
    bind: bool = False
    stall_s: float | None = None
    environment: Mapping[str, str] = {}
    kept: LogRetention | None = None

    @classmethod
    def from_json(
        cls, *, program: Any, ranks: dict[str, dict[str, str]], kept: tuple[Any, ...] | None, **fields: Any
    ) -> Start:
        return cls(
            program=read_program(program),
            ranks={int(rank): variables for rank, variables in ranks.items()},
            kept=None if kept is None else LogRetention(*kept),
            **fields,
        )


def read_program(entry: Mapping[str, Any]) -> Program:
    """A program that came in a message."""
    return Program(entry["kind"], tuple(entry["arguments"]), entry["tells_local_rank"])


# --- orders


class Signal(NamedTuple):
    """Pass a signal on to the ranks, and do nothing else."""

    signal: int


class End(NamedTuple):
    """Signal the ranks, then what they have left behind, and kill what still lives after the grace.

    ``failure`` is what the mark of a failed job says (`JobFolder.write_failure`), None where the job has not failed.
    """

    signal: int
    grace_s: float
    failure: Mapping[str, Any] | None = None


class Kill(NamedTuple):
    """Kill everything now."""


class RequestErrors(NamedTuple):
    """A request for the errors that ranks which still live have written down (`Errors`)."""


class RequestStacks(NamedTuple):
    """A request for the observations of the ranks (`Stacks`), if `Start.stall_s` was set."""


class Heartbeat(NamedTuple):
    """A sign of life, where there is a lease; ``sent_s`` by the launcher's clock."""

    sent_s: float


Order = Signal | End | Kill | RequestErrors | RequestStacks | Heartbeat
ORDERS: tuple[type[Order], ...] = get_args(Order)


# --- events


class Started(NamedTuple):
    """A rank runs, as process ``pid``."""

    rank: int
    pid: int


class Output(NamedTuple):
    """A rank has written ``data``."""

    rank: int
    stream: str
    data: bytes = b""


class OutputLost(NamedTuple):
    """An agent has left out what a rank wrote, since the line to the launcher did not take it."""

    rank: int
    stream: str
    lost_bytes: int
    reason: str


class OutputTail(NamedTuple):
    """The end of what a rank wrote, where its logs stay on its host; comes before its `Exited`."""

    rank: int
    stream: str
    data: bytes = b""


class LogLost(NamedTuple):
    """A log that stays on its host lacks bytes."""

    rank: int
    stream: str
    lost_bytes: int
    reason: str | None


class StepsReported(NamedTuple):
    """The report of a rank on its steps: ``data`` are lines of JSON (`shardwright.common.step_lines`)."""

    rank: int
    data: bytes = b""


class Stopped(NamedTuple):
    """A signal has stopped a rank."""

    rank: int
    signal: int
    pid: int


class Continued(NamedTuple):
    """A rank that was stopped goes on."""

    rank: int


class Exited(NamedTuple):
    """A rank has ended: ``code`` is its exit code, or minus the signal. Times are by the clock of its host.

    ``signalled``: it had been told to end. ``error`` is what the rank has written down, and when it happened.
    """

    rank: int
    code: int
    time_s: float
    signalled: bool = False
    out_of_memory: bool = False
    error: tuple[str, float] | None = None


class Errors(NamedTuple):
    """The answer to `RequestErrors`: the ranks that have written an error down, the error and the moment."""

    errors: tuple[tuple[int, str, float], ...]


class Progressed(NamedTuple):
    """A rank has done a step, or a collective, since the last time."""


class Stacks(NamedTuple):
    """The answer to `RequestStacks`: ``data`` are the observations of the ranks (`stacks.Observation`) as JSON.

    ``quiet_s`` is for how long no rank had done or written anything when the order came.
    """

    quiet_s: float
    data: bytes = b""


class LeftoverProcesses(NamedTuple):
    """Processes that the ranks have left behind, by pid, which are about to be ended."""

    names: Mapping[str, str]


class CarrierOutput(NamedTuple):
    """The output of mpirun itself, which matters where it failed."""

    text: str
    matters: bool


class NotStarted(NamedTuple):
    """Torch could not be imported, a process not be forked, or a log not be made."""

    reason: str


class EndRequested(NamedTuple):
    """A request of somebody on that host to end the job, ``now`` or after the grace (`shardwright stop -H`)."""

    now: bool


class SupervisorGone(NamedTuple):
    """The end of a supervisor without its last word; its agent has killed what was left."""

    code: int


class Ended(NamedTuple):
    """The last event: the ranks that had to be killed, and processes that do not end even so."""

    killed: tuple[int, ...]
    unkillable: tuple[int, ...]


Event = (
    Started | Output | OutputLost | OutputTail | LogLost | StepsReported | Stopped | Continued | Exited | Errors
    | Progressed | Stacks | LeftoverProcesses | CarrierOutput | NotStarted | EndRequested | SupervisorGone | Ended
)  # fmt: skip
EVENTS: tuple[type[Event], ...] = get_args(Event)
