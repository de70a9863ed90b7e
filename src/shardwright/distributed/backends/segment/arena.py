"""Memory in which a rank makes tensors for collectives, and to which the other ranks of its group write as well.

What lies there is reduced in place by all, without a copy in and out. Each rank has a file of its own, without a name
as that of the slots. It takes memory when a tensor needs it, and that of a tensor that has ended serves the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.common.torch_private import holders_of_memory
from shardwright.distributed.backends.segment.memory import make_file, open_file, take

_MOST_BYTES = 1 << 34  # of addresses, not of memory
_DIGITS = 3  # binary ones, to which sizes are rounded up, so that blocks serve again


def arena_bytes() -> int:
    """As much as this host has memory, within limits."""
    return min(_MOST_BYTES, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)


class Arena:
    """That of this rank; raises `OSError` where it cannot be."""

    def __init__(self, token: bytes) -> None:
        self.file = make_file(arena_bytes(), token, mmap.PAGESIZE)
        try:
            self.memory = _mapped(self.file)
        except BaseException:
            os.close(self.file)
            raise
        self._end = mmap.PAGESIZE  # of what was ever given away; the file begins with its token
        self._free: dict[int, list[int]] = {}  # by size, where blocks begin
        self._backed: set[int] = set()  # those of them that have memory
        self._ended: deque[tuple[int, int]] = deque()  # blocks whose tensors have ended, on whatever thread
        # Tensors that serve again, and how many have the memory of one that nobody uses: to make one from its block
        # takes a tenth of a millisecond where other operators have filled the caches of the core.
        self._made: dict[tuple[int, torch.dtype], list[tuple[Tensor, int]]] = {}
        self._taking = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A flat tensor; None where there is no more memory."""
        with self._taking:
            for tensor, holders in self._made.get((numel, dtype), ()):
                if holders_of_memory(tensor) == holders:
                    return tensor.data
            nbytes = numel * dtype.itemsize
            size = _rounded(nbytes)
            start = self._take(size)
            if start is None:
                return None
            block = (ctypes.c_char * nbytes).from_buffer(self.memory, start)
            weakref.finalize(block, self._ended.append, (size, start)).atexit = False
            with torch.inference_mode(False):  # in which it may serve later
                made = torch.frombuffer(block, dtype=dtype)
            self._made.setdefault((numel, dtype), []).append((made, holders_of_memory(made)))
            return made.data

    def _take(self, size: int) -> int | None:
        """Return where a block of that size begins."""
        self._collect()
        if not self._free.get(size):
            self._forget()
        free = self._free.get(size) or [self._end]
        start = free.pop()
        if start not in self._backed and not self._back(start, size):
            free.append(start)
            return None
        self._backed.discard(start)
        self._end = max(self._end, start + size)
        return start

    def _forget(self) -> None:
        """Have the blocks of all tensors that would serve again, and are not used."""
        self._made.clear()
        self._collect()

    def _collect(self) -> None:
        while self._ended:
            size, start = self._ended.popleft()
            self._free.setdefault(size, []).append(start)
            self._backed.add(start)

    def _back(self, start: int, size: int) -> bool:
        """Return whether there is memory for a block, in place of what nobody uses."""
        self._forget()
        self.give_back()
        if start + size > len(self.memory):
            return False
        try:
            take(self.file, start, size)
        except OSError:
            self._give_back(start, size)  # the part that there was
            return False
        return True

    def give_back(self) -> None:
        """The memory of all blocks that nobody uses; they keep what the kernel does not take back."""
        for size, starts in self._free.items():
            for start in self._backed.intersection(starts):
                if self._give_back(start, size):
                    self._backed.discard(start)

    def _give_back(self, start: int, size: int) -> bool:
        """Return whether the kernel takes it."""
        with contextlib.suppress(OSError):
            self.memory.madvise(mmap.MADV_REMOVE, start, size)
            return True
        return False

    def close(self) -> None:
        """No more tensors are made; those that there are keep their memory."""
        with self._taking:
            self._forget()
            self.give_back()
            os.close(self.file)
            self.file = -1


class Arenas:
    """Those of all ranks of a group, ``own`` among them; raises `OSError` where one cannot be opened.

    ``files`` are the processes of the ranks and the numbers that the files have there.
    """

    def __init__(self, own: Arena, rank: int, files: Sequence[tuple[int, int]], token: bytes) -> None:
        self.own = own
        memories = [own.memory if r == rank else _opened(*files[r], token) for r in range(len(files))]
        self._starts = [ctypes.c_char.from_buffer(memory) for memory in memories]  # which keep them

    def addresses(self) -> list[int]:
        return [ctypes.addressof(start) for start in self._starts]


def _opened(pid: int, number: int, token: bytes) -> mmap.mmap:
    file = open_file(pid, number, arena_bytes(), token)
    try:
        return _mapped(file)
    finally:
        os.close(file)


def _mapped(file: int) -> mmap.mmap:
    """All of an arena; a core dump of this process leaves it out, since it may be as large as the host's memory."""
    memory = mmap.mmap(file, arena_bytes())
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTDUMP)
    return memory


def _rounded(nbytes: int) -> int:
    unit = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - _DIGITS))
    return -(-nbytes // unit) * unit
