"""Collectives on large tensors where each rank reads what it needs from the memory of the other ranks' processes.

The kernel copies once from process to process, where the shared memory takes a copy into it and one out of it; and
ranks meet two or three times, however large the tensors are. Smaller tensors go through the shared memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator, Sequence
from functools import cache

import torch
from torch import Tensor

from shardwright.distributed.backends.segment.collectives import Collectives, Steps
from shardwright.distributed.backends.segment.flats import cut, flat_of, gathering
from shardwright.distributed.backends.segment.memory import HEAD_BYTES, SLOTS_BYTES, Memory
from shardwright.distributed.backends.segment.native import reduces
from shardwright.distributed.backends.segment.notes import Note
from shardwright.distributed.backends.segment.reduction import Reduction
from shardwright.distributed.backends.segment.waiting import Rendezvous

DIRECT_BYTES = 1 << 18  # more than that of a tensor is read where it lies
_CHUNK_BYTES = 1 << 18  # so much is reduced at a time, while it is in the caches


class Direct(Collectives):
    """Those of ranks whose processes, ``pids``, may read and write each other's memory.

    ``native``: ranks may meet here that gather and scatter by native code, which takes other sizes through the slots.
    """

    def __init__(
        self,
        memory: Memory,
        rendezvous: Rendezvous,
        names: Sequence[int],
        backend: str,
        pids: Sequence[int],
        native: bool = False,
    ) -> None:
        super().__init__(memory, rendezvous, names, backend)
        self._pids, self._slots_bytes = tuple(pids), SLOTS_BYTES if native else DIRECT_BYTES
        self._scratch = torch.empty(self.size, _CHUNK_BYTES, dtype=torch.uint8, device="cpu")

    def _read(self, rank: int, address: int, into: Tensor) -> None:
        self._reach(read, rank, address, into)
        if reason := self.memory.reason(rank):  # it waits no more, so that other things may have stood there
            raise OSError(reason)

    def write_there(self, rank: int, address: int, tensor: Tensor) -> None:
        """Copy a tensor to where that rank awaits it, which keeps that memory also where it gives up."""
        if reason := self.memory.reason(rank):
            raise OSError(reason)
        self._reach(write, rank, address, tensor)

    def _reach(self, copy: Callable[[int, int, Tensor], None], rank: int, address: int, tensor: Tensor) -> None:
        try:
            copy(self._pids[rank], address, tensor)
        except OSError as error:
            raise OSError(
                f"the memory of rank {self.names[rank]} (process {self._pids[rank]}) cannot be reached: "
                f"{error}; see the log of that rank, which may have ended"
            ) from error

    def _addresses(
        self, note: Note, own: Sequence[Tensor], sizes: Sequence[int] = ()
    ) -> Generator[None, None, list[tuple[int, ...]]]:
        """Return where the tensors that each rank gives lie, when all have come; all must agree on the sizes."""
        end = len(self._write(note, [*sizes, *(tensor.data_ptr() for tensor in own)]))
        yield
        parity, length = self.rendezvous.stage & 1, HEAD_BYTES + 8 * len(sizes)
        notes = [self.memory.note(rank, parity, end) for rank in range(self.size)]
        self.compare(notes[self.rank][:length])
        return [tuple(memoryview(note[length:]).cast("q")) for note in notes]

    def come_showing(
        self, note: Note, tensor: Tensor, sizes: Sequence[int] = ()
    ) -> Generator[None, None, Sequence[int]]:
        found = yield from self._addresses(note, [tensor], sizes)
        return [address for (address,) in found]

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps:
        """Each rank reduces a slice where it lies, and reads those of the others."""
        if tensor.nbytes <= DIRECT_BYTES:
            yield from super().all_reduce(tensor, reduction)
            return
        flat, finish = flat_of(tensor)
        places = yield from self.come_showing(self.note("all_reduce", flat, reduction.name), flat)
        slices = cut(flat, self.size)
        starts = [part.data_ptr() - flat.data_ptr() for part in slices]
        mine = slices[self.rank]
        self.reduce_there(mine, mine, [place + starts[self.rank] for place in places], reduction)
        yield
        for rank, part in enumerate(slices):
            if rank != self.rank:
                self._read(rank, places[rank] + starts[rank], part)
        yield
        finish()

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        if tensor.nbytes <= DIRECT_BYTES:
            yield from super().broadcast(tensor, root)
            return
        flat, finish = flat_of(tensor)
        places = yield from self.come_showing(self.note("broadcast", flat, root=root), flat)
        if self.rank != root:
            self._read(root, places[root], flat)
            finish()
        yield

    def _all_gather(self, rows: Sequence[Tensor], tensor: Tensor) -> Steps:
        if max(row.nbytes for row in rows) <= self._slots_bytes:
            yield from super()._all_gather(rows, tensor)
            return
        flat, _ = flat_of(tensor)
        kind, like, sizes = gathering(rows, flat)
        places = yield from self.come_showing(self.note(kind, like), flat, sizes)
        for rank, row in enumerate(rows):
            if rank == self.rank:
                row.copy_(flat)
            else:
                self._read(rank, places[rank], row)
        yield

    def _reduce_scatter(self, output: Tensor, rows: Sequence[Tensor], reduction: Reduction) -> Steps:
        known = reduces(output.dtype, reduction.name)
        if max(row.nbytes for row in rows) <= (self._slots_bytes if known else DIRECT_BYTES):
            yield from super()._reduce_scatter(output, rows, reduction)
            return
        flat, finish = flat_of(output)
        note = self.note("reduce_scatter", flat[:0], reduction.name)
        found = yield from self._addresses(note, rows, [row.numel() for row in rows])
        self.reduce_there(flat, rows[self.rank], [addresses[self.rank] for addresses in found], reduction)
        yield
        finish()

    def reduce_there(self, out: Tensor, own: Tensor, addresses: Sequence[int], reduction: Reduction) -> None:
        """Into ``out``, which may be ``own``, of what lies there in the ranks' processes, where nobody writes."""
        width = _CHUNK_BYTES // own.element_size()
        # The third part is read when the first two have been reduced to where the result goes.
        overwritten = self.rank > 1 and own.data_ptr() == out.data_ptr()
        for start in range(0, own.numel(), width):
            chunk = own[start : start + width]
            parts = []
            for rank, address in enumerate(addresses):
                part = self._scratch[rank, : chunk.nbytes].view(chunk.dtype)
                if rank != self.rank:
                    self._read(rank, address + start * own.element_size(), part)
                elif overwritten:
                    part.copy_(chunk)
                else:
                    part = chunk
                parts.append(part)
            reduction.total(parts, out[start : start + width])


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def _library() -> ctypes.CDLL:
    """Return libc with the types of what is called. Cached once: a process has one libc."""
    library = ctypes.CDLL(None, use_errno=True)
    span = ctypes.POINTER(_Span)
    for copy in (library.process_vm_readv, library.process_vm_writev):
        copy.argtypes = (ctypes.c_int, span, ctypes.c_ulong, span, ctypes.c_ulong, ctypes.c_ulong)
        copy.restype = ctypes.c_ssize_t
    return library


def read(pid: int, address: int, into: Tensor) -> None:
    """Copy what lies there in a process into a contiguous tensor; raises `OSError` where that is not allowed."""
    _copy(_library().process_vm_readv, pid, address, into)


def write(pid: int, address: int, tensor: Tensor) -> None:
    """Copy a contiguous tensor to there in a process; raises `OSError` where that is not allowed."""
    _copy(_library().process_vm_writev, pid, address, tensor)


def _copy(copy: Callable[..., int], pid: int, address: int, tensor: Tensor) -> None:
    done, mine, nbytes = 0, tensor.data_ptr(), tensor.nbytes
    while done < nbytes:
        here, there = _Span(mine + done, nbytes - done), _Span(address + done, nbytes - done)
        got = copy(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += got


def can_reach(pid: int, address: int, expected: bytes) -> bool:
    """Return whether this process may read and write the memory of that one, and finds there what is ``expected``."""
    found = torch.zeros(len(expected), dtype=torch.uint8, device="cpu")
    try:
        read(pid, address, found)
        if bytes(found.tolist()) != expected:
            return False
        write(pid, address, found)  # the same again
    except (OSError, AttributeError):  # the kernel forbids it, or the C library has no such functions
        return False
    return True
