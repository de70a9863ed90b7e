"""Coming to a stage, and waiting for the others to come to it.

By native code where all ranks have it. Else by semaphores, which the C library brings: they keep the order of memory on
every processor, which Python by itself does not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from functools import cache
from typing import Protocol

from shardwright.distributed.backends.segment.memory import Memory
from shardwright.distributed.backends.segment.native import Group, Native

_STAGES = 1 << 32
_TRIES = 20  # before a rank sleeps on a semaphore, giving way to others each time
_CLOCK_SLICE_S = 1.0  # semaphores wait by the wall clock, which somebody may set


class Rendezvous(Protocol):
    """The barrier of a group, which is reached again and again."""

    stage: int  # to which this rank has come

    def next_stage(self) -> int:
        """The stage to which it comes next; stages are numbers of 32 bits."""
        return (self.stage + 1) % _STAGES

    def arrive(self) -> None:
        """Come to the next stage: what this rank has written before can be read by who has waited."""

    def wait(self, timeout_s: float) -> bool:
        """Return whether all have come to the stage of this rank; may be asked again."""

    def wait_aside(self) -> None:
        """This thread is to wait beside one that computes, whose core it must not keep."""


class ByNative(Rendezvous):
    """By futexes, in native code."""

    def __init__(self, native: Native, group: Group) -> None:
        self._native, self._group, self.stage = native, group, 0

    def arrive(self) -> None:
        self.stage = self.next_stage()
        self._native.arrive(self._group, self.stage)

    def wait(self, timeout_s: float) -> bool:
        return bool(self._native.wait(self._group, self.stage, int(timeout_s * 1e9)))

    def wait_aside(self) -> None:
        self._native.wait_aside()


class BySemaphores(Rendezvous):
    """By a semaphore for each pair of ranks and each direction."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.stage = memory, 0
        layout, rank = memory.layout, memory.rank
        peers = [peer for peer in range(memory.size) if peer != rank]
        self._posted = [memory.address + layout.semaphore_at(peer, rank) for peer in peers]
        self._awaited = [memory.address + layout.semaphore_at(rank, peer) for peer in peers]
        self._left: list[int] = []

    def arrive(self) -> None:
        self.stage = self.next_stage()
        self._memory.set_stage(self.stage)
        post = _library().sem_post
        for semaphore in self._posted:
            post(semaphore)
        self._left = list(self._awaited)

    def wait(self, timeout_s: float) -> bool:
        left, end_s = self._left, 0.0
        while left:
            if not _taken(left[-1]):
                end_s = end_s or time.monotonic() + timeout_s
                if not _slept(left[-1], end_s - time.monotonic()):
                    return False
            left.pop()
        return True

    def wait_aside(self) -> None:
        """Never keeps it for long."""


def _taken(semaphore: int) -> bool:
    take = _library().sem_trywait
    for _ in range(_TRIES):
        if take(semaphore) == 0:
            return True
        os.sched_yield()
    return False


def _slept(semaphore: int, timeout_s: float) -> bool:
    library, end_s = _library(), time.monotonic() + timeout_s
    while True:
        left_s = min(end_s - time.monotonic(), _CLOCK_SLICE_S)
        if left_s <= 0:
            return False
        until_s = time.time() + left_s
        if library.sem_timedwait(semaphore, ctypes.byref(_Time(int(until_s), int(until_s % 1 * 1e9)))) == 0:
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _library() -> ctypes.CDLL:
    """Return libc with the types of what is called. Cached once: a process has one libc."""
    library = ctypes.CDLL(None, use_errno=True)
    library.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    library.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Time))
    for name in ("sem_post", "sem_trywait"):
        getattr(library, name).argtypes = (ctypes.c_void_p,)
    return library


def make_semaphores(memory: Memory) -> None:
    """By the rank that makes the memory, before another one opens it."""
    for rank in range(memory.size):
        for peer in range(memory.size):
            if _library().sem_init(memory.address + memory.layout.semaphore_at(rank, peer), 1, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
