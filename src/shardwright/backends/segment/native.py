"""The native code, compiled once for this user and kept in a folder of caches, by what stands in it."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from shardwright.backends.segment.arena import arena_bytes
from shardwright.backends.segment.memory import HEAD_BYTES, SMALL_BYTES, WIDE_BYTES, Memory

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-O3", "-fPIC", "-shared", "-std=gnu11")  # for every processor of this kind: hosts may share the folder
_COMPILE_TIMEOUT_S = 60.0
# As native.c numbers them.
TYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}
OPERATIONS: Mapping[str, int] = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
GATHERED = 5, 4  # the operation and the type of an all-gather, which moves bytes


def reduces(dtype: torch.dtype, operation: str) -> bool:
    """Whether native code does, by the operation of that name."""
    return dtype in TYPES and operation in OPERATIONS and (operation != "AVG" or dtype.is_floating_point)


class Group(ctypes.Structure):
    """What native.c is told of a group."""

    _fields_ = (
        ("places", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("wide", ctypes.c_void_p),
        ("arenas", ctypes.POINTER(ctypes.c_void_p)), ("place_bytes", ctypes.c_int64), ("slot_bytes", ctypes.c_int64),
        ("note_bytes", ctypes.c_int64), ("wide_bytes", ctypes.c_int64), ("head_at", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64), ("small_bytes", ctypes.c_int64), ("arena_bytes", ctypes.c_int64),
        ("size", ctypes.c_int32), ("rank", ctypes.c_int32), ("spins", ctypes.c_int32),
    )  # fmt: skip

    @classmethod
    def of(cls, memory: Memory, arenas: Sequence[int], crowded: bool) -> Group:
        """Lives no longer than the memory and the arenas, whose addresses are given.

        ``crowded``: there are more ranks than cores, and who spins keeps another one from coming.
        """
        layout = memory.layout
        return cls(
            memory.address + layout.places_at, memory.address + layout.slots_at, memory.wide_address,
            (ctypes.c_void_p * len(arenas))(*arenas) if arenas else None, layout.place_bytes, layout.slot_bytes,
            layout.note_bytes, WIDE_BYTES, layout.head_at, HEAD_BYTES, SMALL_BYTES, arena_bytes(), memory.size,
            memory.rank, not crowded,
        )  # fmt: skip


class Piece(ctypes.Structure):
    """A tensor of which each rank gives, or gets, a part of so many bytes."""

    _fields_ = (("own", ctypes.c_void_p), ("data", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class Told(ctypes.Structure):
    """What native.c is told of a collective, and how far it has come."""

    _fields_ = (
        ("head", ctypes.c_char_p), ("note_bytes", ctypes.c_int64), ("own", ctypes.c_void_p), ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64), ("type", ctypes.c_int32), ("operation", ctypes.c_int32), ("step", ctypes.c_int64),
        ("stage", ctypes.c_uint32), ("way", ctypes.c_int32), ("waits", ctypes.c_int32), ("scatters", ctypes.c_int32),
        ("pieces", ctypes.POINTER(Piece)), ("piece_count", ctypes.c_int64),
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
        self.collective.argtypes = (group, ctypes.POINTER(Told), ctypes.c_int64)


def built() -> Path | None:
    """The compiled code, which is made where it is not there yet; None where that cannot be done here."""
    with contextlib.suppress(OSError, RuntimeError):  # the latter where nobody knows the home of this user
        path = _folder() / f"{_key()}.so"
        if path.exists():
            return path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for compiler in _compilers():
            if _compile(compiler, path):
                return path
    return None


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright" / "native"


def _key() -> str:
    told = f"{platform.machine()} {' '.join(_FLAGS)}\n".encode() + _SOURCE.read_bytes()
    return hashlib.sha256(told).hexdigest()[:16]


def _compilers() -> Iterator[tuple[str, ...]]:
    for name in (*os.environ.get("CC", "").split()[:1], "cc", "gcc", "clang"):
        if found := shutil.which(name):
            yield (found,)
    if find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "cc")


def _compile(compiler: tuple[str, ...], path: Path) -> bool:
    """Whether ``path`` is there whole, by this process or another that did the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        try:
            done = subprocess.run(
                [*compiler, *_FLAGS, str(_SOURCE), "-o", str(draft)], capture_output=True, timeout=_COMPILE_TIMEOUT_S
            )
            if done.returncode == 0:
                Native(draft)
                draft.replace(path)
        except (OSError, AttributeError, subprocess.TimeoutExpired):  # a compiler for another machine, or none at all
            return False
        return path.exists()
