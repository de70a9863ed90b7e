"""The arguments of native.c, its functions, and the barrier of a group by them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch

from shardwright.common.native_code import compiled
from shardwright.distributed.backends.segment.memory import (
    HEAD_AT,
    HEAD_BYTES,
    PLACE_BYTES,
    SMALL_BYTES,
    WIDE_BYTES,
    Memory,
)

_SOURCE = Path(__file__).with_name("native.c")
# As native.c numbers them.
TYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}
OPERATIONS: Mapping[str, int] = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
GATHERED = 5, 4  # the operation and the type of an all-gather, which moves bytes


def reduces(dtype: torch.dtype, operation: str) -> bool:
    """Return whether native code does, by the operation of that name."""
    return dtype in TYPES and operation in OPERATIONS and (operation != "AVG" or dtype.is_floating_point)


class Group(ctypes.Structure):
    """The arguments of native.c for a group."""

    _fields_ = (
        ("places", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("wide", ctypes.c_void_p),
        ("place_bytes", ctypes.c_int64), ("slot_bytes", ctypes.c_int64), ("note_bytes", ctypes.c_int64),
        ("wide_bytes", ctypes.c_int64), ("head_at", ctypes.c_int64), ("head_bytes", ctypes.c_int64),
        ("small_bytes", ctypes.c_int64), ("size", ctypes.c_int32), ("rank", ctypes.c_int32), ("spins", ctypes.c_int32),
    )  # fmt: skip

    @classmethod
    def of(cls, memory: Memory, crowded: bool) -> Group:
        """Return the arguments for a group, which live no longer than its memory.

        ``crowded``: there are more ranks than cores, and who spins keeps another one from coming.
        """
        layout = memory.layout
        return cls(
            memory.address + layout.place_at(0), memory.address + layout.slots_at, memory.wide_address,
            PLACE_BYTES, layout.slot_bytes, layout.note_bytes, WIDE_BYTES, HEAD_AT, HEAD_BYTES,
            SMALL_BYTES, memory.size, memory.rank, not crowded,
        )  # fmt: skip


class CollectiveCall(ctypes.Structure):
    """The arguments of native.c for a collective, and its progress."""

    _fields_ = (
        ("head", ctypes.c_char_p), ("note_bytes", ctypes.c_int64), ("own", ctypes.c_void_p), ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64), ("type", ctypes.c_int32), ("operation", ctypes.c_int32), ("step", ctypes.c_int64),
        ("stage", ctypes.c_uint32), ("way", ctypes.c_int32), ("waits", ctypes.c_int32), ("scatters", ctypes.c_int32),
    )  # fmt: skip


class Native:
    """The functions of native.c."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        group = ctypes.POINTER(Group)
        self.arrive = library.shardwright_arrive
        self.arrive.argtypes, self.arrive.restype = (group, ctypes.c_uint32), None
        self.wait_aside = library.shardwright_wait_aside
        self.wait_aside.argtypes, self.wait_aside.restype = (), None
        self.wait = library.shardwright_wait
        self.wait.argtypes = (group, ctypes.c_uint32, ctypes.c_int64)
        self.collective = library.shardwright_collective
        self.collective.argtypes = (group, ctypes.POINTER(CollectiveCall), ctypes.c_int64)
        self.again = library.shardwright_again
        self.again.argtypes = (
            group, ctypes.POINTER(CollectiveCall), ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32,
            ctypes.c_int64,
        )  # fmt: skip


def built() -> Path | None:
    """The compiled code; None where it cannot be compiled here."""
    return compiled(_SOURCE, opens=Native)


_STAGES = 1 << 32  # stages are numbers of 32 bits


class Rendezvous:
    """The barrier of a group, which is reached again and again; ``stage`` is the one to which this rank has come."""

    def __init__(self, native: Native, group: Group) -> None:
        self._native, self._group, self.stage = native, group, 0

    def arrive(self) -> None:
        """Enter the next stage: ranks that have waited for it may read what this rank wrote before."""
        self.stage = (self.stage + 1) % _STAGES
        self._native.arrive(self._group, self.stage)

    def wait(self, timeout_s: float) -> bool:
        """Return whether all ranks have reached the stage of this one; may be called again."""
        return bool(self._native.wait(self._group, self.stage, int(timeout_s * 1e9)))

    def wait_aside(self) -> None:
        """Have this thread wait beside one that computes, whose core it must not keep."""
        self._native.wait_aside()
