"""The memory that the ranks of a group share: a file without a name, in which every rank has a place and two slots.

One rank makes the file, the others open it as ``/proc/<pid>/fd/<number>``. Nothing of it stands in /dev/shm, so that
nothing is left there however the ranks end, and containers that have little of /dev/shm need no more. The kernel frees
the memory with the last rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardwright.launch.host.processes import start_ticks

TOKEN_BYTES = 16
HEAD_BYTES = 32  # of a note
DATA_BYTES = 1 << 19  # of a slot, behind its note: what two ranks write and read stays in their caches
WIDE_BYTES = 3 << 20  # of a wide slot; with smaller ones ranks would meet more often, and wait for who has no core
# All parts of a tensor together, up to which each rank reads them all whatever their number.
SMALL_BYTES = 1 << 17
_PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
PLACE_BYTES = 1024
_PIECE_BYTES = 1 << 23  # of memory that is taken at once
_MARK = struct.Struct("<I")
_REASON = struct.Struct("<I")
HEAD_AT = 64
_REASON_AT = 128


@dataclass(frozen=True)
class Layout:
    """The layout of the memory of ``size`` ranks; native.c knows it, too."""

    size: int

    @cached_property
    def note_bytes(self) -> int:
        """Return the bytes before the data of a slot: a head, and two numbers for each rank."""
        return _up(HEAD_BYTES + 16 * self.size, 64)

    @property
    def slot_bytes(self) -> int:
        return self.note_bytes + DATA_BYTES

    @cached_property
    def slots_at(self) -> int:
        return _up(_PAGE_BYTES + self.size * PLACE_BYTES, _PAGE_BYTES)

    @cached_property
    def wide_at(self) -> int:
        """Return where the wide slots begin, which take memory when they are first used."""
        return _up(self.slots_at + 2 * self.size * self.slot_bytes, _PAGE_BYTES)

    @property
    def total_bytes(self) -> int:
        return self.wide_at + 2 * self.size * WIDE_BYTES

    def place_at(self, rank: int) -> int:
        return _PAGE_BYTES + rank * PLACE_BYTES

    def slot_at(self, rank: int, parity: int) -> int:
        return self.slots_at + (2 * rank + parity) * self.slot_bytes


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class Memory:
    """The memory, mapped by the rank ``rank`` of a group."""

    def __init__(self, file: int, layout: Layout, rank: int) -> None:
        self.layout, self.rank, self.size = layout, rank, layout.size
        self.bytes = mmap.mmap(file, layout.wide_at, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.wide = mmap.mmap(file, layout.total_bytes - layout.wide_at, offset=layout.wide_at)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.wide_address = ctypes.addressof(ctypes.c_char.from_buffer(self.wide))
        whole = torch.frombuffer(self.bytes, dtype=torch.uint8)
        self._data = [[self._data_of(whole, rank, parity) for parity in (0, 1)] for rank in range(self.size)]

    def _data_of(self, whole: Tensor, rank: int, parity: int) -> Tensor:
        return whole.narrow(0, self.layout.slot_at(rank, parity) + self.layout.note_bytes, DATA_BYTES)

    def data(self, rank: int, parity: int) -> Tensor:
        """The bytes of a slot behind its note."""
        return self._data[rank][parity]

    def write_note(self, parity: int, note: bytes) -> None:
        """Write the note of this rank's collective, for other ranks to compare; its head stays readable later."""
        place, slot = self.layout.place_at(self.rank) + HEAD_AT, self.layout.slot_at(self.rank, parity)
        self.bytes[place : place + HEAD_BYTES] = note[:HEAD_BYTES]
        self.bytes[slot : slot + len(note)] = note

    def note(self, rank: int, parity: int, length: int) -> bytes:
        start = self.layout.slot_at(rank, parity)
        return self.bytes[start : start + length]

    def last_head(self, rank: int) -> bytes:
        """The head of the last note that a rank wrote."""
        start = self.layout.place_at(rank) + HEAD_AT
        return self.bytes[start : start + HEAD_BYTES]

    def stage(self, rank: int) -> int:
        """The last stage to which a rank has come."""
        stage: int = _MARK.unpack_from(self.bytes, self.layout.place_at(rank))[0]
        return stage

    def leave(self, reason: str) -> None:
        """Publish why this rank takes part in nothing more."""
        start = self.layout.place_at(self.rank) + _REASON_AT
        text = reason.encode()[: PLACE_BYTES - _REASON_AT - _REASON.size]
        self.bytes[start + _REASON.size : start + _REASON.size + len(text)] = text
        _REASON.pack_into(self.bytes, start, len(text))

    def reason(self, rank: int) -> str:
        """Return why a rank takes part in nothing more; "" while it does."""
        start = self.layout.place_at(rank) + _REASON_AT
        length = _REASON.unpack_from(self.bytes, start)[0]
        start += _REASON.size
        return self.bytes[start : start + length].decode(errors="replace")


def make_file(nbytes: int, token: bytes, taken_bytes: int) -> int:
    """A file, the first part of which has its memory already; raises `OSError` where there is not as much.

    Piece by piece: a signal makes the kernel begin a piece again, and one that takes longer than signals are apart
    would never end.
    """
    file = os.memfd_create("shardwright", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, nbytes)
        for at in range(0, taken_bytes, _PIECE_BYTES):
            os.posix_fallocate(file, at, min(_PIECE_BYTES, taken_bytes - at))
        os.pwrite(file, token, 0)
    except OSError:
        os.close(file)
        raise
    return file


def open_file(pid: int, number: int, nbytes: int, token: bytes) -> int:
    """The file that process ``pid`` has made; raises `OSError` where this process may not open it, or it is another."""
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(file).st_size != nbytes or os.pread(file, TOKEN_BYTES, 0) != token:
        os.close(file)
        raise OSError(f"/proc/{pid}/fd/{number} is another file than the one that was made")
    return file


@dataclass(frozen=True)
class Process:
    """A process, identified by its number and its start time, since numbers are reused."""

    pid: int
    started: int | None

    @classmethod
    def this(cls) -> Process:
        return cls(os.getpid(), start_ticks(os.getpid()))

    def has_ended(self) -> bool:
        """Return whether it has ended, also as a zombie."""
        return start_ticks(self.pid) != self.started
