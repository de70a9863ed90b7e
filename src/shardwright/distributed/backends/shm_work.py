"""The queue of the collectives of a group in shared memory, and the timeout of those that cannot end.

They run one after the other, in the order of the calls, on the thread that waits first. An asynchronous one is begun at
once, so that other ranks need not wait for this one. One that takes several stages and is not waited for at once, and
one whose future was requested, run on a thread of the group.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from shardwright.common.threads import Thread
from shardwright.distributed.backends.group import CollectiveWork, Task
from shardwright.distributed.backends.segment.collectives import Collectives
from shardwright.distributed.backends.segment.memory import DATA_BYTES, Process
from shardwright.distributed.backends.segment.native import Rendezvous
from shardwright.distributed.backends.segment.notes import Note
from shardwright.distributed.backends.segment.reducing import NativeCollective, RepeatedCollective
from shardwright.errors import WorldError

_LOOK_S = 0.05  # a launcher that has seen one rank fail ends the others soon after, and tells of those that did before
_STOP_TIMEOUT_S = 5.0


class SteppedCollective:
    """A collective as steps, each of which ends with coming to a stage, or gives what is to be awaited from others."""

    one_stage = False

    def __init__(self, task: Task, collectives: Collectives) -> None:
        self._rendezvous = collectives.rendezvous
        self._awaited: Rendezvous | NativeCollective | None = None
        self._steps: Iterator[Any] = iter(())
        self._task: Task | None = task

    def advance(self, timeout_s: float) -> bool:
        """Continue the collective; returns whether it has ended, after waiting for others for at most so long."""
        with torch.no_grad():
            if self._task is not None:
                self._steps, self._task = iter(self._task()), None
            while True:
                if self._awaited is not None and not self._awaited.wait(timeout_s):
                    return False
                self._awaited = None
                step: Any = next(self._steps, self)
                if step is self:
                    return True
                if step is None:
                    self._rendezvous.arrive()
                self._awaited = self._rendezvous if step is None else step


PendingCollective = SteppedCollective | NativeCollective | RepeatedCollective
"""A collective under way."""


class ShmWork(CollectiveWork):
    """The handle of a collective that was called, as torch returns it."""

    def __init__(
        self, what: str, outputs: Sequence[Tensor], collective: PendingCollective, queue: CollectiveQueue
    ) -> None:
        super().__init__(outputs)
        self.what, self.collective, self._queue = what, collective, queue
        self.since_s = 0.0

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises what the collective raised, or `WorldError` after a timeout, which does not end the collective."""
        if not self._done and not self._queue.finish(self, timeout.total_seconds() if timeout else None):
            raise WorldError(f"{self.what} has not ended after {timeout}")
        return self.ended_well()

    def is_completed(self) -> bool:
        return self._done or self._queue.finish(self, 0.0)

    def deliver(self, future: torch.futures.Future[list[Tensor]]) -> None:
        """Queue the future, to be completed when no thread holds the lock: callbacks may call collectives."""
        self._queue.completed.append((self, future))

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future = super().get_future()
        if not self._done:
            self._queue.finish_on_thread(self)
        return future


class CollectiveQueue:
    """The collectives of one group on this rank."""

    def __init__(self, collectives: Collectives, processes: Sequence[Process], timeout_s: float) -> None:
        self.collectives, self._processes, self.timeout_s = collectives, processes, timeout_s
        self.pid = processes[collectives.rank].pid
        self.failed: WorldError | None = None
        self.pending: deque[ShmWork] = deque()
        """The collectives under way, the next one first."""
        self.completed: deque[tuple[ShmWork, torch.futures.Future[list[Tensor]]]] = deque()
        """The collectives that have ended, each with a future that is still to be completed."""
        self.running = threading.Lock()
        """Held by the thread that runs the pending collectives."""
        self._queue: queue.SimpleQueue[ShmWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def forked(self) -> bool:
        """Return whether this process was forked from the rank's process, which still uses the shared memory."""
        return os.getpid() != self.pid

    def check_process(self) -> None:
        """Raise `WorldError` in a forked child: it would write where its parent does, or wait without its threads."""
        if self.forked:
            raise WorldError(
                f"process {os.getpid()} was forked from rank {self.name}, whose groups serve that process alone; call "
                "collectives there, or start this process by the method 'spawn' and let it join a group of its own"
            )

    def begin(
        self, what: str, outputs: Sequence[Tensor], collective: PendingCollective, nbytes: int, asynchronous: bool
    ) -> ShmWork:
        """Return a collective of ``nbytes`` in all, under way; unless ``asynchronous`` its caller waits at once."""
        self.check_process()
        work = ShmWork(what, outputs, collective, self)
        self.pending.append(work)
        if asynchronous:
            is_small = nbytes <= DATA_BYTES  # else its first copy would hold up the caller
            if is_small:
                self.finish(work, 0.0)
            if not work.ended and not (is_small and collective.one_stage):
                self.finish_on_thread(work)
        return work

    def finish(self, work: ShmWork, timeout_s: float | None) -> bool:
        """Return whether it and all collectives called before it have ended, after at most ``timeout_s`` if given."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        if self.running.acquire(timeout=-1 if timeout_s is None else timeout_s):
            try:
                self._drive(work, end_s)
            finally:
                self.running.release()
                self._deliver()
        return work.ended

    def _deliver(self) -> None:
        with suppress(IndexError):  # at its end, or where another thread was quicker
            while self.completed:
                work, future = self.completed.popleft()
                work.complete(future)

    def _drive(self, last: ShmWork, end_s: float | None) -> None:
        while not last.ended:
            work = self.pending[0]
            if not self._advance(work, end_s):
                return
            self.pending.popleft()

    def _advance(self, work: ShmWork, end_s: float | None) -> bool:
        """Return whether it has ended; an error ends it, too, and is raised in `ShmWork.wait`."""
        work.since_s = work.since_s or time.monotonic()
        try:
            if self.failed is not None:
                raise self.failed
            while not work.collective.advance(_LOOK_S if end_s is None else self._slice(end_s)):
                if time.monotonic() - work.since_s > _LOOK_S:
                    self._look(work)
                if end_s is not None and time.monotonic() >= end_s:
                    return False
        except WorldError as error:
            work.end(error)  # which all ranks have; later collectives may succeed
        except BaseException as error:
            self._leave(WorldError(f"rank {self.name} failed in {work.what}: {type(error).__name__}: {error}"))
            work.end(error)
        else:
            work.end()
        return True

    @staticmethod
    def _slice(end_s: float) -> float:
        return max(0.0, min(_LOOK_S, end_s - time.monotonic()))

    @property
    def name(self) -> int:
        return self.collectives.names[self.collectives.rank]

    def _look(self, work: ShmWork) -> None:
        """Raise `WorldError` if a missing rank has ended or left, or has not come within the timeout."""
        missing = self._missing()
        reason = next(filter(None, (self._gone(rank, work) for rank in missing)), "")
        waited_s = time.monotonic() - work.since_s
        if not reason and missing and waited_s > self.timeout_s:
            reason = self._late(missing, work, waited_s)
        if reason and not self.collectives.rendezvous.wait(0.0):
            error = WorldError(reason)
            self._leave(error)
            raise error

    def _missing(self) -> list[int]:
        """Return the ranks that have not reached the stage of this rank."""
        memory, stage = self.collectives.memory, self.collectives.rendezvous.stage
        return [rank for rank in range(memory.size) if (memory.stage(rank) - stage) % (1 << 32) >= 1 << 31]

    def _gone(self, rank: int, work: ShmWork) -> str:
        """Return why a rank will not come; "" where it may."""
        name, reason = self.collectives.names[rank], self.collectives.memory.reason(rank)
        if reason:
            return reason
        if self._processes[rank].has_ended():
            pid = self._processes[rank].pid
            return f"rank {name} (process {pid}) has ended, while rank {self.name} waits for it in {work.what}"
        return ""

    def _late(self, missing: Sequence[int], work: ShmWork, waited_s: float) -> str:
        where = "; ".join(f"rank {self.collectives.names[rank]} {self._last(rank)}" for rank in missing)
        return (
            f"rank {self.name} has waited {waited_s:.0f} s in {work.what} (number {self.collectives.number} of its "
            f"group) for others, longer than the {self.timeout_s:g} s of sw.init(timeout=...): {where}"
        )

    def _last(self, rank: int) -> str:
        note = Note.read(self.collectives.memory.last_head(rank))
        return "has come to nothing yet" if note is None else f"last came to number {note.number}, {note}"

    def _leave(self, reason: WorldError) -> None:
        """Nothing more comes of this group; the others learn why."""
        self.failed = reason
        self.collectives.memory.leave(str(reason))

    def finish_on_thread(self, work: ShmWork) -> None:
        """Finish it on the group's thread; at once if a callback on that thread requests it."""
        if threading.current_thread() is self._thread:
            self.finish(work, None)
            return
        if self._thread is None:
            self._thread = Thread(self._serve, "shm", daemon=True)
            self._thread.start()
        self._queue.put(work)

    def _serve(self) -> None:
        self.collectives.rendezvous.wait_aside()
        while (work := self._queue.get()) is not None:
            self.finish(work, None)
            del work  # nobody else may have its tensors

    def close(self) -> None:
        """Stop the thread after its pending collectives, and mark this rank as gone for the others."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_STOP_TIMEOUT_S)
        if self.failed is None:
            self._leave(WorldError(f"rank {self.name} has left the group of the ranks {self._names}"))

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self.collectives.names))
