"""Run every rank of a mesh in one process, deterministically.

Each rank is a thread, and one thread runs at a time: rank 0 until its first collective, then rank 1, and so on. A
collective is computed when its last member has come to it. Every run of a function is thus the same run, sums have
one order, a deadlock is seen at once instead of after a timeout, and each rank has its own stream of the default
random generator, which starts where the caller's stands, as in processes that are seeded alike.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwright.errors import WorldError
from shardwright.mesh.collectives import Axes
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import Collective, CollectiveKind

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

    def __str__(self) -> str:
        shape = "x".join(map(str, self.tensors[0].shape)) or "scalar"
        return (
            f"{self.kind} over {', '.join(self.axes)} among ranks {list(self.group)} of {self.tensors[0].dtype} {shape}"
        )


class SimulatedCommunicator:
    """The `Communicator` of one simulated rank. ``collectives`` are those that it took part in, in order."""

    def __init__(self, mesh: Mesh, rank: int, wait: Callable[[int, _Call], list[Tensor]]) -> None:
        self.mesh = mesh
        self.rank = rank
        self.collectives: list[Collective] = []
        self._wait = wait

    def all_reduce(self, tensor: Tensor, axes: Axes) -> Tensor:
        return tensor.copy_(self._call("all_reduce", [tensor], axes)[0])

    def all_gather(self, tensor: Tensor, axes: Axes) -> list[Tensor]:
        return self._call("all_gather", [tensor], axes)

    def reduce_scatter(self, tensors: list[Tensor], axes: Axes) -> Tensor:
        return self._call("reduce_scatter", tensors, axes)[0]

    def all_to_all(self, tensors: list[Tensor], axes: Axes) -> list[Tensor]:
        return self._call("all_to_all", tensors, axes)

    def _call(self, kind: CollectiveKind, tensors: list[Tensor], axes: Axes) -> list[Tensor]:
        group = self.mesh.group(self.rank, axes)
        if len(group) == 1:
            return tensors
        parts = len(group) if kind == "all_gather" else 1
        self.collectives.append(Collective(kind, axes, parts * sum(tensor.nbytes for tensor in tensors)))
        return self._wait(self.rank, _Call(kind, axes, group, [tensor.detach() for tensor in tensors]))


def _taken() -> threading.Lock:
    """A lock that one thread waits for and another releases: half the time of a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass
class _Rank:
    """One rank, as the scheduler sees it."""

    random_state: Tensor
    thread: threading.Thread | None = None
    go: threading.Lock = field(default_factory=_taken)
    call: _Call | None = None  # the collective that it waits in
    answer: list[Tensor] = field(default_factory=list)  # what the collective gave it
    finished: bool = False
    result: Any = None
    error: BaseException | None = None


def simulate(mesh: Mesh, fn: Callable[[SimulatedCommunicator], T], *, timeout_s: float = 60) -> list[T]:
    """Call ``fn(comm)`` for every rank of ``mesh`` and return the results in rank order.

    The ranks run in the grad mode of the caller, whose random generator is left as it was. A backward that
    communicates has to run inside ``fn``.

    Raises:
        WorldError: where ranks wait for each other for ever or call different collectives (the message says who
            waits where), or where a rank neither ends nor comes to a collective within ``timeout_s`` seconds.
        BaseException: whatever ``fn`` raised first, with a note that names the rank.
    """
    return _Simulation(mesh, timeout_s).run(fn)


class _Simulation:
    """Passes the turn from rank to rank: a rank runs between ``go`` and ``back``, the scheduler otherwise."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self.mesh = mesh
        self.timeout_s = timeout_s
        self.ranks = [_Rank(torch.get_rng_state()) for _ in range(mesh.size)]
        self.back = _taken()
        self.running: int | None = None
        self.over = False

    def run(self, fn: Callable[[SimulatedCommunicator], T]) -> list[T]:
        before = torch.get_rng_state()
        arguments = (fn, torch.is_grad_enabled())
        for index, rank in enumerate(self.ranks):
            # A daemon: a rank that never comes back must not keep the process alive.
            rank.thread = threading.Thread(target=self._rank_main, args=(index, *arguments), daemon=True)
            rank.thread.start()
        try:
            self._schedule()
        finally:
            self.over = True
            for index, rank in enumerate(self.ranks):
                rank.go.release()
                if index != self.running and rank.thread is not None:
                    rank.thread.join()
            torch.set_rng_state(before)
        return [rank.result for rank in self.ranks]

    def _rank_main(self, index: int, fn: Callable[[SimulatedCommunicator], Any], grad_enabled: bool) -> None:
        rank = self.ranks[index]
        rank.go.acquire()
        if self.over:
            return
        try:
            with torch.set_grad_enabled(grad_enabled):
                rank.result = fn(SimulatedCommunicator(self.mesh, index, self._wait))
        except BaseException as error:
            rank.error = error
        rank.finished = True
        self.back.release()

    def _wait(self, index: int, call: _Call) -> list[Tensor]:
        """In the thread of a rank: give the turn back until the collective is done."""
        rank = self.ranks[index]
        if threading.current_thread() is not rank.thread:
            raise WorldError(f"the communicator of simulated rank {index} works only inside the function that got it")
        rank.call = call
        self.back.release()
        rank.go.acquire()
        if self.over:
            raise _Abandoned
        return rank.answer

    def _schedule(self) -> None:
        ready = deque(range(self.mesh.size))
        while ready:
            index = ready.popleft()
            self._resume(index)
            rank = self.ranks[index]
            if rank.error is not None:
                rank.error.add_note(f"raised on simulated rank {index} of the mesh {self.mesh}")
                raise rank.error
            if rank.call is not None:
                ready.extend(self._complete(rank.call))
        if not all(rank.finished for rank in self.ranks):
            raise WorldError(f"the ranks wait for each other for ever:{self._whereabouts()}")

    def _resume(self, index: int) -> None:
        """Let one rank run until its next collective or its end."""
        rank = self.ranks[index]
        torch.set_rng_state(rank.random_state)
        self.running = index
        rank.go.release()
        if not self.back.acquire(timeout=self.timeout_s):
            raise WorldError(
                f"rank {index} neither ended nor came to a collective within {self.timeout_s} s:{self._whereabouts()}"
            )
        self.running = None
        rank.random_state = torch.get_rng_state()

    def _complete(self, call: _Call) -> tuple[int, ...]:
        """Compute the collective if all its members have come to it, and name them: they can go on."""
        calls = [
            waiting for member in call.group if (waiting := self.ranks[member].call) and waiting.group == call.group
        ]
        if len(calls) < len(call.group):
            return ()
        if len({str(waiting) for waiting in calls}) > 1:
            raise WorldError(f"the ranks of one group call different collectives:{self._whereabouts()}")
        with torch.no_grad():
            answers = _ANSWERS[call.kind]([waiting.tensors for waiting in calls])
        for member, answer in zip(call.group, answers, strict=True):
            self.ranks[member].call, self.ranks[member].answer = None, answer
        return call.group

    def _whereabouts(self) -> str:
        def of(index: int, rank: _Rank) -> str:
            if rank.finished:
                return "has ended"
            if rank.call is not None:
                return f"waits in {rank.call}"
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


_ANSWERS: dict[CollectiveKind, Callable[[Brought], list[list[Tensor]]]] = {
    "all_reduce": _all_reduced,
    "all_gather": _all_gathered,
    "reduce_scatter": _reduce_scattered,
    "all_to_all": _exchanged,
}
