"""What a rank says of the collective to which it has come, so that others see whether they came to the same."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

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
        """The same for all ranks that come to the same."""
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
