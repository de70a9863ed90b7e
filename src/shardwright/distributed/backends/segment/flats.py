"""Flattens tensors of any shapes and strides to rows of elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WITH_ADDRESSES = (Tensor, torch.nn.Parameter)  # of their numbers; a subclass may keep its numbers in other tensors


def is_plain(tensor: Tensor) -> bool:
    """Return whether its numbers lie in their order at its address."""
    return type(tensor) in _WITH_ADDRESSES and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def flat_of(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """The elements of a tensor in their order, its own memory or a copy; and what writes them back from there.

    Autograd, which counts what is written to a tensor, learns nothing of it, as with other backends.
    """
    memory = tensor.data
    if is_plain(memory):
        # Where there is one element, its stride may be any.
        return memory.as_strided((memory.numel(),), (1,)), _nothing
    copy = torch.empty(memory.numel(), dtype=memory.dtype, device="cpu")
    copy.view(memory.shape).copy_(memory)
    return copy, lambda: memory.copy_(copy.view(memory.shape))


def flats_of(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], object]]:
    """Return the elements of each tensor as `flat_of` does, and a function that writes all of them back."""
    found = [flat_of(tensor) for tensor in tensors]

    def finish() -> None:
        for _, write_back in found:
            write_back()

    return [flat for flat, _ in found], finish


def _nothing() -> None:
    """Write nothing back: the results lie where they belong."""
