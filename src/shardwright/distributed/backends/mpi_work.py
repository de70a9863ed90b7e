"""The queue of the collectives of an MPI group, and the end of a job in which one of them cannot end.

A synchronous collective runs on its caller's thread. An asynchronous one (``async_op=True``), and every collective
queued behind it, runs on the group's own thread, so that it proceeds while its caller computes: MPI makes no progress
between two calls. Both use blocking calls, since MPI does not match a blocking call of one rank with a nonblocking call
of another.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.common.threads import Thread
from shardwright.distributed.backends.group import CollectiveWork, Steps, Task

_LOOK_S = 1.0
_STOP_TIMEOUT_S = 5.0


class MpiWork(CollectiveWork):
    """A collective by MPI, or a message."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__(outputs)
        self._ended = threading.Event()

    def run(self, task: Task) -> None:
        error: BaseException | None = None
        try:
            with torch.no_grad():
                for _ in task():
                    pass
        except BaseException as raised:
            error = raised
        self.end(error)
        self._ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises what the collective raised, or `TimeoutError` after a timeout that is not 0."""
        if not self._ended.wait(timeout.total_seconds() if timeout else None):
            raise TimeoutError(f"the collective has not ended after {timeout}")
        return self.ended_well()


class Message(MpiWork):
    """A pending send or receive. It progresses in every call of MPI; requesting its future waits for it."""

    def __init__(
        self, tensor: Tensor, requests: Sequence[MPI.Request], finish: Task, watched: Callable[[], Any]
    ) -> None:
        super().__init__([tensor])
        self.requests, self.finish, self.watched = list(requests), finish, watched
        self.statuses = [MPI.Status() for _ in self.requests]
        self._once = threading.Lock()

    def _last(self) -> Steps:
        MPI.Request.Waitall(self.requests, self.statuses)
        return self.finish()

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._once:
            if not self._done:
                with self.watched():
                    self.run(self._last)
        return super().wait(timeout)

    def is_completed(self) -> bool:
        with self._once:
            if not self._done and MPI.Request.Testall(self.requests, self.statuses):
                self.run(self.finish)
        return super().is_completed()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        return super().get_future()

    def _source_rank(self) -> int:
        self.wait()
        return self.statuses[0].Get_source()

    source_rank = _source_rank


class _Wait(NamedTuple):
    what: str
    group: str
    number: int | None  # of a collective among those of its group, from 1; None for a message
    members: tuple[int, ...]  # ranks of the world
    timeout_s: float
    since_s: float

    def __str__(self) -> str:
        number = "" if self.number is None else f" number {self.number}"
        return f"{self.what}{number} among the ranks {', '.join(map(str, self.members))}"


class Watch:
    """Ends the job where a collective can never end: a member has left without it, or the group's time is over.

    MPI itself waits for ever, and what has begun to wait cannot be called back.
    """

    def __init__(self, rank: int, store: Store) -> None:
        self.rank, self.store = rank, store
        self.counts: dict[str, int] = {}
        self._waits: dict[int, _Wait] = {}
        self._keys = iter(range(sys.maxsize))
        self._stop = threading.Event()
        self._thread = Thread(self._look, "mpi-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def over(
        self, what: str, group: str, number: int | None, members: tuple[int, ...], timeout_s: float
    ) -> Iterator[None]:
        key = next(self._keys)
        self._waits[key] = _Wait(what, group, number, members, timeout_s, time.monotonic())
        try:
            yield
        finally:
            del self._waits[key]

    def leave(self) -> None:
        """Say that this rank takes part in nothing any more."""
        self._stop.set()
        self._thread.join(_STOP_TIMEOUT_S)
        with contextlib.suppress(RuntimeError):  # the store has gone before us
            self.store.set(f"left/{self.rank}", json.dumps(self.counts))

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_S):
            for wait in list(self._waits.values()):
                if time.monotonic() > wait.since_s + _LOOK_S and (reason := self._hopeless(wait)):
                    self.end_job(reason)

    def _hopeless(self, wait: _Wait) -> str | None:
        waited_s = time.monotonic() - wait.since_s
        if waited_s > wait.timeout_s:
            return (
                f"rank {self.rank} has waited {waited_s:.0f} s in {wait}, longer than the {wait.timeout_s:g} s of "
                "sw.init(timeout=...): some rank did not come, or called something else"
            )
        with contextlib.suppress(RuntimeError):
            for member in wait.members:
                left = f"left/{member}"
                if wait.number is None or member == self.rank or not self.store.check([left]):
                    continue
                if json.loads(self.store.get(left)).get(wait.group, 0) < wait.number:
                    return f"rank {member} has ended, while rank {self.rank} waits for it in {wait}"
        return None

    def end_job(self, reason: str) -> None:
        os.write(2, f"shardwright: {reason}; ending the job\n".encode())
        MPI.COMM_WORLD.Abort(1)


class CollectiveQueue:
    """The collectives of one group: one at a time, in the order in which they were called."""

    def __init__(self, group: str, members: tuple[int, ...], timeout_s: float, watch: Watch) -> None:
        self.group, self.members, self.timeout_s, self.watch = group, members, timeout_s, watch
        self._running = threading.Lock()
        self._counting = threading.Lock()
        self._waiting = 0  # on the thread, the one that runs included
        self._queue: queue.SimpleQueue[tuple[MpiWork, Task, str, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, what: str, outputs: Sequence[Tensor], task: Task, asynchronous: bool) -> MpiWork:
        """``task`` writes ``outputs``; unless ``asynchronous`` it has ended when this returns, or has raised."""
        with self._counting:
            number = self.watch.counts[self.group] = self.watch.counts.get(self.group, 0) + 1
            behind = asynchronous or self._waiting > 0
            work = MpiWork(outputs)
            if behind:
                self._waiting += 1
                self._queue.put((work, task, what, number))
                if self._thread is None:
                    self._thread = Thread(self._serve, f"mpi-{self.group}", daemon=True)
                    self._thread.start()
        if not behind:
            self._do(work, task, what, number)
        if not asynchronous:
            work.wait()
        return work

    def message(
        self, what: str, tensor: Tensor, requests: Sequence[MPI.Request], finish: Task, peer: int | None
    ) -> Message:
        """With the member ``peer``, or with whichever of them sends first."""
        members = self.members if peer is None else (self.members[peer],)
        return Message(
            tensor, requests, finish, lambda: self.watch.over(what, self.group, None, members, self.timeout_s)
        )

    def _do(self, work: MpiWork, task: Task, what: str, number: int) -> None:
        with self._running, self.watch.over(what, self.group, number, self.members, self.timeout_s):
            work.run(task)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            self._do(*item)
            with self._counting:
                self._waiting -= 1

    def close(self) -> None:
        """Stop the thread after the pending collectives."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_STOP_TIMEOUT_S)
