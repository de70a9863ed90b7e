"""The note in which each rank describes its next collective, so that mismatched calls are found."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwright.distributed.backends.segment.memory import HEAD_BYTES

_HEAD = struct.Struct("<IBBBBQQQ")  # 32 bytes

KINDS = (
    "barrier", "all_reduce", "broadcast", "all_gather", "all_gather of several sizes", "reduce", "reduce_scatter",
    "gather", "scatter", "all_to_all",
)  # fmt: skip
_OPERATIONS = ("", "SUM", "AVG", "PRODUCT", "MAX", "MIN", "BAND", "BOR", "BXOR")
_DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
_NUMBERS = {
    table: {name: number for number, name in enumerate(names)} for table, names in
    (("kinds", KINDS), ("operations", _OPERATIONS), ("dtypes", _DTYPES))
}  # fmt: skip


class Note(NamedTuple):
    """A collective: the ``number``-th of its group, on ``numel`` elements of ``dtype``."""

    number: int
    kind: str
    dtype: torch.dtype | None = None
    numel: int = 0
    operation: str = ""
    root: int = 0

    def head(self) -> bytes:
        """Return bytes that are equal on all ranks that call the same collective."""
        return _HEAD.pack(
            self.number % (1 << 32), _NUMBERS["kinds"][self.kind], _NUMBERS["operations"][self.operation],
            0 if self.dtype is None else 1 + _NUMBERS["dtypes"][self.dtype], 0, self.numel, self.root, 0,
        )  # fmt: skip

    @classmethod
    def read(cls, head: bytes) -> Note | None:
        """None where nobody has written yet."""
        number, kind, operation, dtype, _, count, root, _ = _HEAD.unpack(head)
        if number == 0:
            return None
        return cls(number, KINDS[kind], _DTYPES[dtype - 1] if dtype else None, count, _OPERATIONS[operation], root)

    def __str__(self) -> str:
        parts = [self.kind]
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            parts.append(f"of {self.numel} elements of {name}" if self.numel else f"of {name}")
        if self.operation:
            parts.append(f"by {self.operation}")
        if self.root and self.kind in ("broadcast", "reduce", "gather", "scatter"):
            parts.append(f"with root {self.root}")
        return " ".join(parts)


def unlike(notes: Sequence[bytes], names: Sequence[int], number: int, group: Sequence[int]) -> str:
    """Return the message for ranks, ``names``, that have written several notes for collective ``number`` of a group.

    Behind the head of a note may be sizes.
    """
    said = [str(Note.read(note[:HEAD_BYTES])) for note in notes]
    if len(set(said)) == 1:
        said = [f"{said[0]} with {np.frombuffer(note[HEAD_BYTES:], np.int64).tolist()}" for note in notes]
    by_what: dict[str, list[int]] = {}
    for name, what in zip(names, said, strict=True):
        by_what.setdefault(what, []).append(name)
    parts = [f"{_ranks(ranks)} called {what}" for what, ranks in by_what.items()]
    return (
        f"the ranks do not call the same: {', '.join(parts)} (number {number} of the group of the ranks "
        f"{', '.join(map(str, group))}); all must make the same calls, in one order, on tensors that fit"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
