"""Tensors of dtypes that a backend does not take, as others that it does: to be moved as bytes, or summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.distributed.backends.table import Backend
from shardwright.errors import LoweringError


def movable(tensor: Tensor, backend: Backend) -> Tensor:
    """Return a contiguous tensor, or its memory as bytes where ``backend`` does not take its dtype."""
    return tensor if _takes(backend, tensor.dtype) else tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True)
class SumDtype:
    """A dtype in which tensors of another one are summed: the cast to it, and the cast of the sum back.

    What shares memory with the tensor is summed in place.
    """

    cast: Callable[[Tensor], Tensor]
    cast_back: Callable[[Tensor], Tensor]

    def write(self, tensor: Tensor, total: Tensor) -> None:
        """Write a sum of what ``tensor`` was cast to into it, unless it stands there already."""
        if total.data_ptr() != tensor.data_ptr():
            tensor.copy_(self.cast_back(total))


# Sums of integers are those of their bits, modulo the number of all, with a sign and without one.
_OTHERS: Mapping[torch.dtype, SumDtype] = {
    torch.complex64: SumDtype(torch.view_as_real, torch.view_as_complex),
    torch.complex128: SumDtype(torch.view_as_real, torch.view_as_complex),
    torch.int16: SumDtype(lambda x: x.to(torch.int32), lambda x: x.to(torch.int16)),
    torch.uint16: SumDtype(lambda x: x.to(torch.int32), lambda x: x.to(torch.uint16)),
    torch.uint32: SumDtype(lambda x: x.view(torch.int32), lambda x: x.view(torch.uint32)),
    torch.uint64: SumDtype(lambda x: x.view(torch.int64), lambda x: x.view(torch.uint64)),
}


def summed_as(dtype: torch.dtype, backend: Backend) -> SumDtype | None:
    """Return the dtype in which ``backend`` sums tensors of a dtype; None for their own.

    Raises:
        LoweringError: where it does not, and no other dtype would do.
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
