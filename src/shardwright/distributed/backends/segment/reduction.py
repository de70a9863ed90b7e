"""Reducing parts in the order of the ranks, so that the result is the same for any timing and on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import UsageError

_WIDENED = (torch.float16, torch.bfloat16)
# torch has no arithmetic for these.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, *_UNSIGNED)

_SUMS = ("SUM", "AVG", "PRODUCT")
_BITWISE = ("BAND", "BOR", "BXOR")
_KNOWN: Mapping[torch.dtype, tuple[str, ...]] = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), (*_SUMS, "MAX", "MIN")),
    **dict.fromkeys(_INTEGERS, ("SUM", "PRODUCT", "MAX", "MIN", *_BITWISE)),
    # Of two truths the sum and the larger are "or", the product and the smaller are "and", as for NCCL.
    torch.bool: ("SUM", "PRODUCT", "MAX", "MIN", *_BITWISE),
    **dict.fromkeys((torch.complex64, torch.complex128), _SUMS),
}
_TORCH: Mapping[str, Callable[..., Tensor]] = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MAX": torch.maximum, "MIN": torch.minimum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip
_NUMPY: Mapping[str, Callable[..., Any]] = {
    "SUM": np.add, "PRODUCT": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "BAND": np.bitwise_and,
    "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip


@dataclass(frozen=True)
class Reduction:
    """By the operation ``name`` of torch, on numbers of ``dtype``, among ``size`` ranks."""

    name: str
    dtype: torch.dtype
    size: int

    @classmethod
    def of(cls, backend: str, reduce_op: Any, dtype: torch.dtype, size: int) -> Reduction:
        """Raises `UsageError` for a pair of operation and dtype that has no meaning."""
        kind: dist.ReduceOp.RedOpType = getattr(reduce_op, "op", reduce_op)
        known = _KNOWN.get(dtype, ())
        if kind.name not in known:
            what = f"for {dtype} it knows {', '.join(known)}" if known else f"it cannot reduce {dtype}"
            raise UsageError(f"the {backend} backend cannot reduce by {kind.name} on {dtype}; {what}")
        return cls(kind.name, dtype, size)

    def total(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Write what the parts of all ranks give into ``out``, which may be one of the first two of them.

        Numbers of 16 bits are reduced in 32 and rounded once.
        """
        if self.dtype in _UNSIGNED:
            self._by_numpy(parts, out)
            return
        apply = _TORCH[self.name]
        first, *others = parts
        total = first.float() if self.dtype in _WIDENED else out
        if not others:
            total.copy_(first)
        for other in others:
            apply(first if other is others[0] and total is out else total, other, out=total)
        if self.name == "AVG":
            total.div_(self.size)
        if total is not out:
            out.copy_(total)

    def _by_numpy(self, parts: Sequence[Tensor], out: Tensor) -> None:
        total, apply = parts[0].numpy().copy(), _NUMPY[self.name]
        for part in parts[1:]:
            apply(total, part.numpy(), out=total)
        out.copy_(torch.from_numpy(total))
