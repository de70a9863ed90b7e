"""One connection per host of a job: the orders that go to its supervisor, the events that come from it.

A carrier starts supervisors and returns their connections (`Carrier`). `local.LocalCarrier` has the one of this host;
`ssh.SshCarrier` has one per host, each with an agent between the stream and its supervisor. The launcher's loop
(`launcher.Launcher`) sees connections alone and does not know what lies behind them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from shardwright.launch.host.protocol import End, Event, Kill, Order
from shardwright.launch.host.stream import Message, Writer, encode
from shardwright.launch.hosts.environment import SECRET_VARIABLE
from shardwright.launch.joblog.job import FAILED_VARIABLE, JobFolder
from shardwright.launch.options.request import NO_RESTARTS, RestartOptions
from shardwright.launch.options.variables import RANK_VARIABLES

_CHUNK_BYTES = 1 << 20


class Connection(ABC):
    """The line to the supervisor of one host, on which nothing ever blocks.

    ``process`` is what was started here: a supervisor, or what leads to one.

    ``ranks`` are those of the host, ``name`` is the host's where there are several. ``clock_ahead_s`` is what the
    host's clock has beyond ours. ``lease_s`` is the longest silence before the host counts as lost, None for ever.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str = "", lease_s: float | None = None) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.name, self.lease_s = process, name, lease_s
        self.events = process.stdout.fileno()
        self.ranks: tuple[int, ...] = ()
        self.clock_ahead_s = 0.0
        self.heard_s = time.monotonic()
        self.over = False  # nothing more is to come from it in this run
        # That the other end is gone shows in the events.
        self._writer = Writer(process.stdin.fileno(), gone=lambda: None, more=self._more)
        self._selector: selectors.BaseSelector | None = None
        os.set_blocking(self.events, False)

    def attach(self, selector: selectors.BaseSelector, on_events: Callable[[], None]) -> None:
        """Have the selector watch the line: its keys carry what is to be called."""
        self._selector = selector
        selector.register(self.events, selectors.EVENT_READ, on_events)
        self._writer.attach(selector)

    def send(self, order: Message) -> None:
        """Send an order: now, or as soon as the other end takes it."""
        self._writer.put_now(encode(order))

    def _more(self) -> bytes:
        """Return what follows once the other end has taken all that waited: nothing here."""
        return b""

    def receive(self) -> list[Event] | None:
        """Return the events that have come; None at the end of the stream."""
        try:
            data = os.read(self.events, _CHUNK_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        self.heard_s = time.monotonic()
        return self._decode(data)

    @abstractmethod
    def _decode(self, data: bytes) -> list[Event]:
        """Return the events for the launcher in these bytes."""

    def detach(self) -> None:
        """Take the line out of the selector."""
        if self._selector is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self.events)
        self._selector = None
        self._writer.detach()

    @property
    def attached(self) -> bool:
        return self._selector is not None

    def tick(self) -> float | None:
        """Do what is due by the clock. Returns the seconds until something is due again, None for never."""
        return None

    @property
    def silent_too_long(self) -> bool:
        return self.lease_s is not None and time.monotonic() - self.heard_s > self.lease_s

    @property
    def may_live_s(self) -> float:
        """The seconds for which ranks may still run on the host after it was lost."""
        return 0.0

    @abstractmethod
    def wake(self) -> None:
        """Let a supervisor that somebody stopped continue, so that it can follow an order."""

    @abstractmethod
    def abandon(self) -> None:
        """Kill what there is before any rank has started."""

    @abstractmethod
    def why_lost(self, run_id: str, not_ours: set[int]) -> tuple[int, str]:
        """Return an exit code and the reason in words for which the stream ended without a last word, or fell silent.

        What can be reached of the job there is killed first; ``not_ours`` are processes below us that are not.
        """

    @abstractmethod
    def close(self) -> None:
        """End the orders, so that what still lives at the other end kills what it has and ends, and wait for it."""


class Connections:
    """All lines of one attempt. ``hosts`` names the host of each rank, where there are several."""

    def __init__(self, connections: Sequence[Connection] = ()) -> None:
        self.all = connections
        several = len(connections) > 1
        self.hosts = {rank: connection.name for connection in connections for rank in connection.ranks if several}

    @property
    def living(self) -> list[Connection]:
        """The lines on which more is to come."""
        return [connection for connection in self.all if not connection.over]

    @property
    def gone(self) -> set[int]:
        """The ranks of which nothing more is to come."""
        return {rank for connection in self.all if connection.over for rank in connection.ranks}

    def attach(self, selector: selectors.BaseSelector, on_events: Callable[[Connection], None]) -> None:
        for connection in self.all:
            connection.attach(selector, partial(on_events, connection))

    def detach(self) -> None:
        for connection in self.all:
            connection.detach()

    def order(self, order: Order) -> None:
        for connection in self.living:
            connection.send(order)

    def end(self, order: End | Kill) -> None:
        """Send an order that supervisors follow also where somebody has stopped them."""
        self.order(order)
        for connection in self.living:
            connection.wake()

    def abandon(self) -> None:
        """Kill what there is before any rank has started."""
        for connection in self.living:
            connection.abandon()

    def leases(self) -> dict[str, float | None]:
        """Return the lease of each host that is still heard."""
        return {connection.name: connection.lease_s for connection in self.living}

    def ticks(self) -> list[float | None]:
        """Do what is due by the clock. Also where all ranks have ended: agents serve until the end of the job."""
        return [connection.tick() for connection in self.all if connection.attached]

    def clocks_ahead_s(self) -> dict[str, float]:
        return {connection.name: connection.clock_ahead_s for connection in self.all}


class Carrier(ABC):
    """The means by which the supervisors of a job are started."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """The number of ranks on all hosts together."""

    @abstractmethod
    def start(
        self, run_id: str, folder: JobFolder, begin: str = "", shown: Collection[int] = ()
    ) -> Sequence[Connection]:
        """Start the ranks and return the connections to their supervisors, in the order of ranks.

        Where logs are written on their hosts, ``begin`` is their first line after a restart, and ``shown`` are the
        ranks whose output is to come here all the same. Raises `OSError` or `LaunchError`.
        """

    @abstractmethod
    def describe_hosts(self) -> list[dict[str, Any]]:
        """Return what ``run.json`` says of each host, without anything of an environment."""

    @abstractmethod
    def close(self) -> None:
        """End all connections, and whatever lives at their other ends."""


def rank_variables(
    rank: int, size: int, local_rank: int, local_size: int, group_rank: int, groups: int, address: str, port: int,
    run_id: str, error_file: str | os.PathLike[str], failed_mark: str | os.PathLike[str],
    restarts: RestartOptions = NO_RESTARTS,
) -> dict[str, str]:  # fmt: skip
    """Return torchrun's variables for a rank: the groups are the hosts, and ``address`` is the first host's.

    ``run_id`` is not known to other users: it is in the environment of processes of the job, and in no file of others.
    """
    return {
        "RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(rank), "ROLE_NAME": "default",
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local_size), "ROLE_WORLD_SIZE": str(size),
        "GROUP_RANK": str(group_rank), "GROUP_WORLD_SIZE": str(groups),
        "MASTER_ADDR": address, "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts.count), "TORCHELASTIC_MAX_RESTARTS": str(restarts.limit),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_ERROR_FILE": os.fspath(error_file), FAILED_VARIABLE: os.fspath(failed_mark),
        SECRET_VARIABLE: hashlib.sha256(f"the store of {run_id}".encode()).hexdigest(),
    }  # fmt: skip


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The names of the options of torch's allocator, of which the others are older."""


def default_environment(cpus: int, local_ranks: int) -> dict[str, str]:
    """Return the variables that ranks have where nobody sets them."""
    return {
        "OMP_NUM_THREADS": str(max(1, cpus // local_ranks)),
        "PYTHONUNBUFFERED": "1",  # a line is in the log when it was printed, even if the rank is killed after it
        # Segments of a GPU's memory grow, in place of new ones beside them: what lies idle between tensors is small.
        ALLOCATOR_VARIABLES[0]: "expandable_segments:True",
    }


def where_unset(defaults: Mapping[str, str], chosen: Collection[str]) -> dict[str, str]:
    """Return the defaults of which nobody has chosen another, by whichever of its names."""
    taken = {*chosen, *(ALLOCATOR_VARIABLES if {*chosen} & {*ALLOCATOR_VARIABLES} else ())}
    return {name: value for name, value in defaults.items() if name not in taken}


def inherited_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment but those that tell a rank its place."""
    return {name: value for name, value in environment.items() if name not in RANK_VARIABLES}
