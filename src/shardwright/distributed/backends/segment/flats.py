"""Flattens tensors of any strides to rows of elements, and derives list collectives from those on rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwright.distributed.backends.segment.reduction import Reduction

_WITH_ADDRESSES = (Tensor, torch.nn.Parameter)  # of their numbers; a subclass may keep its numbers in other tensors


class ByRows(ABC):
    """Gathers and scatters tensors as rows, one for each of ``size`` ranks, which may differ in length."""

    size: int

    @abstractmethod
    def _all_gather(self, rows: Sequence[Tensor], tensor: Tensor) -> Iterator[Any]:
        """The elements of the ranks' tensors into the rows."""

    @abstractmethod
    def _reduce_scatter(self, output: Tensor, rows: Sequence[Tensor], reduction: Reduction) -> Iterator[Any]:
        """This rank's row, reduced over the ranks, into ``output``."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> Iterator[Any]:
        """``output`` has the elements of ``tensor`` from every rank, in the order of the ranks."""
        flat, finish = flat_of(output)
        yield from self._all_gather(flat.view(self.size, tensor.numel()).unbind(), tensor)
        finish()

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> Iterator[Any]:
        """The tensors of all ranks, which may differ in size."""
        rows, finish = flats_of(outputs)
        yield from self._all_gather(rows, tensor)
        finish()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Iterator[Any]:
        """``tensor`` has one part for every rank; this rank's, reduced over the ranks, goes to ``output``."""
        flat, _ = flat_of(tensor)
        return self._reduce_scatter(output, flat.view(self.size, output.numel()).unbind(), reduction)

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], reduction: Reduction) -> Iterator[Any]:
        """One tensor for every rank; they may differ in size."""
        return self._reduce_scatter(output, flats_of(tensors)[0], reduction)


def gathering(rows: Sequence[Tensor], flat: Tensor) -> tuple[str, Tensor, list[int]]:
    """Return the kind of an all-gather, a tensor with what is equal on all ranks, and the sizes to agree on, if any."""
    sizes = [row.numel() for row in rows]
    if len(set(sizes)) == 1:
        return "all_gather", flat, []
    return "all_gather of several sizes", flat[:0], sizes


def cut(flat: Tensor, parts: int) -> list[Tensor]:
    """As even as can be."""
    bounds = [flat.numel() * part // parts for part in range(parts + 1)]
    return [flat[start:end] for start, end in pairwise(bounds)]


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
