"""Run every rank of a mesh in one process, deterministically.

Each rank is a thread, and one thread runs at a time: rank 0 until its first collective, then rank 1, and so on. A
collective is computed by the last of its members to come to it. Every run of a function is thus the same run, sums have
one order, a deadlock is seen at once instead of after a timeout, and each rank has its own stream of the default
random generator, which starts where the caller's stands, as in processes that are seeded alike.

A collective that is begun gives its numbers where it is waited for, and finds out what would go wrong with one that
runs beside the program: numbers that are read before, tensors that are written before, and waits that are left out.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shardwright.common.threads import Thread
from shardwright.compiler.mesh.collectives import Axes
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective, CollectiveKind
from shardwright.errors import WorldError

T = TypeVar("T")


class _Abandoned(BaseException):
    """Ends the thread of a rank because another rank failed; no ``except Exception`` of a rank stops it."""


@dataclass(frozen=True)
class _Call:
    """A rank's part in a collective: one tensor, or one for each member."""

    kind: CollectiveKind
    axes: Axes
    group: tuple[int, ...]
    tensors: list[Tensor]
    received: tuple[int, ...] | None = None  # how many rows come from each member, where all may have others

    @property
    def signature(self) -> tuple[object, ...]:
        """Return what the members of the group have to agree about."""
        rows = 0 if self.received is None else 1
        return self.kind, rows, *((tensor.dtype, tensor.shape[rows:]) for tensor in self.tensors)

    def __str__(self) -> str:
        tensors = " ".join(map(_described, self.tensors))
        return f"{self.kind} over {', '.join(self.axes)} among ranks {list(self.group)} of {tensors}"


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _checksum(tensor: Tensor) -> int:
    """Return a number that other numbers in a tensor would nearly never give; no memory is taken for it."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


class _Begun:
    """A collective that was begun, until it is waited for: nobody writes ``tensor`` before."""

    def __init__(self, call: str, tensor: Tensor) -> None:
        self.call, self._tensor, self._checksum = call, tensor.detach(), _checksum(tensor)

    def check(self) -> None:
        """Check that nobody has; raise `WorldError` if somebody has."""
        if _checksum(self._tensor) != self._checksum:
            raise WorldError(f"a tensor was written while {self.call} was under way, before it was waited for")


def nobodys_numbers(tensor: Tensor) -> Tensor:
    """Return other numbers for a tensor than it has, by which whoever reads them is found out: NaN where it can be."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, torch.nan)
    return tensor.bitwise_not()


class _Messages(Protocol):
    """The messages of the ranks of a simulation."""

    def send(self, rank: int, to: int, backward: bool, tensor: Tensor) -> None: ...

    def receive(self, rank: int, source: int, backward: bool) -> Tensor: ...


class SimulatedCommunicator:
    """The `Communicator` of one simulated rank. ``collectives`` are those that it took part in, in order.

    ``begun`` are those that were begun, and not waited for.
    """

    def __init__(
        self, mesh: Mesh, rank: int, wait: Callable[[int, _Call], list[Tensor]], messages: _Messages | None = None
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self._messages = messages
        self.collectives: list[Collective] = []
        self.begun: list[_Begun] = []
        self._wait = wait

    def prepare(self, axes_sets: Iterable[Axes]) -> None:
        """Do nothing: simulated ranks are ready for all sets of axes."""

    def close(self) -> None:
        """Do nothing: simulated ranks hold nothing."""

    def all_reduce(self, tensor: Tensor, axes: Axes) -> Tensor:
        return tensor.copy_(self._call("all_reduce", [tensor], axes)[0])

    def start_all_reduce(self, tensor: Tensor, axes: Axes) -> Callable[[], None]:
        """Until it is waited for, the tensor holds other numbers."""
        summed = self.all_reduce(tensor, axes).clone()
        with torch.no_grad():
            tensor.copy_(nobodys_numbers(tensor))
        wait = self._start("all_reduce", tensor, axes)

        def finish() -> None:
            wait()
            with torch.no_grad():
                tensor.copy_(summed)

        return finish

    def all_gather(self, tensor: Tensor, axes: Axes) -> Tensor:
        return torch.stack(self._call("all_gather", [tensor], axes))

    def start_all_gather(self, tensor: Tensor, axes: Axes) -> Callable[[], Tensor]:
        gathered, wait = self.all_gather(tensor, axes), self._start("all_gather", tensor, axes)
        return lambda: (wait(), gathered)[1]

    def reduce_scatter(self, rows: Tensor, axes: Axes) -> Tensor:
        return self._call("reduce_scatter", list(rows.unbind()), axes)[0]

    def start_reduce_scatter(self, rows: Tensor, axes: Axes) -> Callable[[], Tensor]:
        scattered, wait = self.reduce_scatter(rows, axes), self._start("reduce_scatter", rows, axes)
        return lambda: (wait(), scattered)[1]

    def _start(self, kind: CollectiveKind, tensor: Tensor, axes: Axes) -> Callable[[], None]:
        return self._begin(f"{kind} over {', '.join(axes)} of {_described(tensor)}", tensor)

    def _begin(self, call: str, tensor: Tensor) -> Callable[[], None]:
        """Note that a call was begun; what is returned checks that it is waited for once, and notes it."""
        begun = _Begun(call, tensor)
        self.begun.append(begun)

        def finish() -> None:
            if begun not in self.begun:
                raise WorldError(f"{begun.call} is waited for twice")
            self.begun.remove(begun)
            begun.check()

        return finish

    def all_to_all(self, tensors: list[Tensor], axes: Axes) -> list[Tensor]:
        return self._call("all_to_all", tensors, axes)

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], axes: Axes) -> Tensor:
        """Raises `WorldError` where other numbers of rows come than are said to."""
        return torch.cat(self._call("all_to_all", list(torch.split(rows, list(sent))), axes, tuple(received)))

    def send(self, tensor: Tensor, axis: str, to: int, backward: bool = False) -> Callable[[], None]:
        """Until it is waited for, nobody writes the tensor."""
        assert self._messages is not None
        self._messages.send(self.rank, self._member(axis, to), backward, tensor.detach().clone())
        return self._begin(f"send to rank {self._member(axis, to)}", tensor)

    def start_receive(self, tensor: Tensor, axis: str, source: int, backward: bool = False) -> Callable[[], Tensor]:
        """To wait for it raises `WorldError` where what comes is another tensor than this one."""
        assert self._messages is not None
        messages, sender = self._messages, self._member(axis, source)

        def finish() -> Tensor:
            sent = messages.receive(self.rank, sender, backward)
            if (sent.dtype, sent.shape) != (tensor.dtype, tensor.shape):
                wanted, came = _described(tensor), _described(sent)
                raise WorldError(f"rank {self.rank} receives {wanted}, and {came} was sent")
            return tensor.copy_(sent)

        return finish

    def _member(self, axis: str, coordinate: int) -> int:
        return self.mesh.rank_at({**self.mesh.coordinates(self.rank), axis: coordinate})

    def start_shift(self, tensor: Tensor, axes: Axes) -> Callable[[], Tensor]:
        shifted, wait = self._call("shift", [tensor], axes)[0], self._start("shift", tensor, axes)
        return lambda: (wait(), shifted)[1]

    def _call(
        self, kind: CollectiveKind, tensors: list[Tensor], axes: Axes, received: tuple[int, ...] | None = None
    ) -> list[Tensor]:
        group = self.mesh.group(self.rank, axes)
        if len(group) == 1:
            return tensors
        parts = len(group) if kind == "all_gather" else 1
        self.collectives.append(Collective(kind, axes, parts * sum(tensor.nbytes for tensor in tensors)))
        detached = [tensor.detach() for tensor in tensors]
        found = self._wait(self.rank, _Call(kind, axes, group, detached, received))
        if received is not None and [len(part) for part in found] != list(received):
            came = ", ".join(str(len(part)) for part in found)
            raise WorldError(f"rank {self.rank} was to receive {list(received)} rows of the members, and {came} came")
        return found


def _taken() -> threading.Lock:
    """A lock that one thread waits for and another releases: half the time of a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass
class _Rank:
    """One rank: its thread, what it waits in, and what came of it."""

    thread: threading.Thread
    random_state: Tensor
    go: threading.Lock = field(default_factory=_taken)
    call: _Call | None = None  # the collective that it waits in
    answer: list[Tensor] = field(default_factory=list)  # what the collective gave it
    waits_for: tuple[int, bool] | None = None  # the rank from which it waits for a message, and whether of the backward
    finished: bool = False
    result: Any = None


def simulate(mesh: Mesh, fn: Callable[[SimulatedCommunicator], T], *, timeout_s: float = 60) -> list[T]:
    """Call ``fn(comm)`` for every rank of ``mesh`` and return the results in rank order.

    The ranks run in the grad mode of the caller, whose random generator is left as it was. A backward that
    communicates has to run inside ``fn``.

    Raises:
        WorldError: where ranks wait for each other for ever or call different collectives (the message says who
            waits where), or where a rank neither ends nor comes to a collective within ``timeout_s`` seconds.
        BaseException: whatever ``fn`` raised first, with a note that names the rank.
    """
    return _Simulation(mesh, fn, timeout_s).run()


class _Simulation:
    """Passes one turn from rank to rank. Only the thread that has the turn touches what is here.

    The last rank to come to a collective computes it and goes on; the others become ready and follow in order.
    """

    def __init__(self, mesh: Mesh, fn: Callable[[SimulatedCommunicator], Any], timeout_s: float) -> None:
        self.mesh = mesh
        self.fn = fn
        self.timeout_s = timeout_s
        self.grad_enabled = torch.is_grad_enabled()
        self.ranks = [
            # Daemons: a rank that never comes back must not keep the process alive.
            _Rank(Thread(partial(self._rank_main, index), daemon=True), torch.get_rng_state())
            for index in range(mesh.size)
        ]
        # By who sends and who receives, and whether it is one of the backward.
        self.messages: dict[tuple[int, int, bool], deque[Tensor]] = defaultdict(deque)
        self.ready = deque(range(mesh.size))
        self.ended = _taken()  # released when a rank failed or no rank can go on
        self.running = 0
        self.turns = 0
        self.error: BaseException | None = None
        self.over = False

    def run(self) -> list[Any]:
        before = torch.get_rng_state()
        try:
            self._pass_turn()
            self._wait_for_end()
        finally:
            self.over = True
            for index, rank in enumerate(self.ranks):
                waits = rank.call is not None or rank.waits_for is not None
                stuck = index == self.running and not waits and not rank.finished
                if rank.thread.ident is not None and not stuck:
                    rank.go.release()
                    rank.thread.join()
            torch.set_rng_state(before)
        return [rank.result for rank in self.ranks]

    def _wait_for_end(self) -> None:
        turns = -1
        while not self.ended.acquire(timeout=self.timeout_s):
            if turns == self.turns:
                raise WorldError(
                    f"rank {self.running} neither ended nor came to a collective within {self.timeout_s} s:"
                    f"{self._whereabouts()}"
                )
            turns = self.turns
        if self.error is not None:
            raise self.error
        if not all(rank.finished for rank in self.ranks):
            raise WorldError(f"the ranks wait for each other for ever:{self._whereabouts()}")

    def _rank_main(self, index: int) -> None:
        rank = self.ranks[index]
        try:
            with torch.set_grad_enabled(self.grad_enabled):
                rank.result = self.fn(comm := SimulatedCommunicator(self.mesh, index, self._call, self))
            if comm.begun:
                raise WorldError(f"{comm.begun[0].call} was begun, and not waited for")
        except _Abandoned:
            return
        except BaseException as error:
            error.add_note(f"raised on simulated rank {index} of the mesh {self.mesh}")
            self.error = error
            self.ready.clear()
        rank.finished = True
        self._pass_turn()

    def _pass_turn(self) -> None:
        """Let the next rank go on that can. The caller touches nothing afterwards until it has the turn again."""
        if self.over:
            return
        if not self.ready:
            self.ended.release()
            return
        self.turns += 1
        self.running = self.ready.popleft()
        rank = self.ranks[self.running]
        torch.set_rng_state(rank.random_state)
        if rank.thread.ident is None:
            rank.thread.start()
        else:
            rank.go.release()

    def _call(self, index: int, call: _Call) -> list[Tensor]:
        """In the thread of a rank: take part in a collective, and wait until it is done."""
        rank = self._own(index)
        rank.call = call
        if not self._complete(call):
            self._let_others(rank)
        return rank.answer

    def send(self, rank: int, to: int, backward: bool, tensor: Tensor) -> None:
        """In the thread of a rank: leave a message for another, which may be waiting for it."""
        self._own(rank)
        self.messages[rank, to, backward].append(tensor)
        if self.ranks[to].waits_for == (rank, backward):
            self.ranks[to].waits_for = None
            self.ready.append(to)

    def receive(self, rank: int, source: int, backward: bool) -> Tensor:
        """In the thread of a rank: wait for a message of another."""
        own = self._own(rank)
        if not self.messages[source, rank, backward]:
            own.waits_for = source, backward
            self._let_others(own)
        return self.messages[source, rank, backward].popleft()

    def _own(self, index: int) -> _Rank:
        """The rank whose thread this is."""
        rank = self.ranks[index]
        if self.over or threading.current_thread() is not rank.thread:
            raise WorldError(f"the communicator of simulated rank {index} works only inside the function that got it")
        return rank

    def _let_others(self, rank: _Rank) -> None:
        """Let others go on until the rank is ready again."""
        rank.random_state = torch.get_rng_state()
        self._pass_turn()
        rank.go.acquire()
        if self.over:
            raise _Abandoned

    def _complete(self, call: _Call) -> bool:
        """Compute the collective if all its members have come to it."""
        calls = [
            waiting for member in call.group if (waiting := self.ranks[member].call) and waiting.group == call.group
        ]
        if len(calls) < len(call.group):
            return False
        if len({waiting.signature for waiting in calls}) > 1:
            raise WorldError(f"the ranks of one group call different collectives:{self._whereabouts()}")
        with torch.no_grad():
            answers = _ANSWERS[call.kind]([waiting.tensors for waiting in calls])
        for member, answer in zip(call.group, answers, strict=True):
            self.ranks[member].call, self.ranks[member].answer = None, answer
        self.ready.extend(member for member in call.group if member != self.running)
        return True

    def _whereabouts(self) -> str:
        def of(index: int, rank: _Rank) -> str:
            if rank.finished:
                return "has ended"
            if rank.call is not None:
                return f"waits in {rank.call}"
            if rank.waits_for is not None:
                return f"waits for a message of rank {rank.waits_for[0]}"
            return "is running" if index == self.running else "is ready to go on"

        return "".join(f"\n  rank {index} {of(index, rank)}" for index, rank in enumerate(self.ranks))


# What each collective gives to its members, from what each brought. Nobody gets a tensor that another one holds and
# may write to.

Brought = list[list[Tensor]]


def _all_reduced(brought: Brought) -> list[list[Tensor]]:
    total = reduce(torch.add, [tensor for (tensor,) in brought])
    return [[total] for _ in brought]  # every member copies it into its own tensor


def _all_gathered(brought: Brought) -> list[list[Tensor]]:
    return [[tensor.clone() for (tensor,) in brought] for _ in brought]


def _reduce_scattered(brought: Brought) -> list[list[Tensor]]:
    return [[reduce(torch.add, tensors)] for tensors in zip(*brought, strict=True)]


def _exchanged(brought: Brought) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in zip(*brought, strict=True)]


def _shifted(brought: Brought) -> list[list[Tensor]]:
    return [[tensor.clone()] for (tensor,) in [brought[-1], *brought[:-1]]]


_ANSWERS: dict[CollectiveKind, Callable[[Brought], list[list[Tensor]]]] = {
    "all_reduce": _all_reduced,
    "all_gather": _all_gathered,
    "reduce_scatter": _reduce_scattered,
    "all_to_all": _exchanged,
    "shift": _shifted,
}
