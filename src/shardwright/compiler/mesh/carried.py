"""Tensors of dtypes that a backend does not take, as others that it does: bytes are moved, other numbers are summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.distributed.backends.table import Backend
from shardwright.errors import LoweringError


def moved(tensor: Tensor, backend: Backend) -> Tensor:
    """A contiguous tensor, or its memory as bytes where ``backend`` does not take what it holds."""
    return tensor if _takes(backend, tensor.dtype) else tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Numbers:
    """In which numbers tensors of one dtype are summed: how they become these, and how the sum becomes one of theirs.

    What shares memory with the tensor is summed in place.
    """

    made: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]

    def write(self, tensor: Tensor, total: Tensor) -> None:
        """Write a sum of what was made of ``tensor`` into it, unless it stands there already."""
        if total.data_ptr() != tensor.data_ptr():
            tensor.copy_(self.back(total))


# Sums of integers are those of their bits, modulo the number of all, with a sign and without one.
_OTHERS: Mapping[torch.dtype, Numbers] = {
    torch.complex64: Numbers(torch.view_as_real, torch.view_as_complex),
    torch.complex128: Numbers(torch.view_as_real, torch.view_as_complex),
    torch.int16: Numbers(lambda x: x.to(torch.int32), lambda x: x.to(torch.int16)),
    torch.uint16: Numbers(lambda x: x.to(torch.int32), lambda x: x.to(torch.uint16)),
    torch.uint32: Numbers(lambda x: x.view(torch.int32), lambda x: x.view(torch.uint32)),
    torch.uint64: Numbers(lambda x: x.view(torch.int64), lambda x: x.view(torch.uint64)),
}


def summed_as(dtype: torch.dtype, backend: Backend) -> Numbers | None:
    """Return the numbers in which ``backend`` sums tensors of a dtype; None for those that they are.

    Raises:
        LoweringError: where it does not, and no other numbers would do.
    """
    if _takes(backend, dtype):
        return None
    if dtype not in _OTHERS:
        raise LoweringError(
            f"{backend.name} cannot sum tensors of {_name(dtype)} over ranks; compute what is summed in float32 or "
            "bfloat16, with .to(torch.float32) before the operator that sums"
        )
    return _OTHERS[dtype]


def _takes(backend: Backend, dtype: torch.dtype) -> bool:
    return not backend.dtypes or _name(dtype) in backend.dtypes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
