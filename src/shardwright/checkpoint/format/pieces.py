"""The shards of a state that each rank holds, and those that it writes.

Every rank derives the same answer from the layouts alone, without talking.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.format.manifest import Box
from shardwright.compiler.mesh.dtensor import layout_of
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh

LARGEST_CHUNK_BYTES = 64 << 20
"""Larger boxes are written as several chunks, which spread over the ranks that hold them."""

State = Mapping[tuple[str, ...], Any]
"""A flat state: path -> tensor, DTensor or any other value that torch.save and a weights-only load agree on."""


@dataclass(frozen=True, eq=False)
class TensorShard:
    """A tensor as this rank holds it: ``local`` is its part of the whole of ``shape``, as ``layout`` cuts it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    mesh: Mesh
    local: Tensor

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @staticmethod
    def of(path: tuple[str, ...], tensor: Tensor | TensorShard) -> TensorShard:
        """The piece of a DTensor over the whole world, or of a plain tensor that every rank holds whole."""
        if isinstance(tensor, TensorShard):
            return tensor
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return TensorShard(path, shape, tensor.dtype, Layout.replicated(tensor.ndim), Mesh(()), tensor.detach())
        layout, mesh = layout_of(tensor)
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            local = tensor.to_local()  # without a node of autograd
        return TensorShard(path, shape, tensor.dtype, layout, mesh, local.detach())

    def box(self, rank: int) -> Box:
        """Return what ``rank`` holds."""
        return _box(self.shape, self.layout, self.mesh, rank)

    def holders(self, world_size: int) -> Mapping[Box, Sequence[int]]:
        """Every different box that has elements, with the ranks that hold it.

        A tensor without elements is one box, held by all.
        """
        return _holders(self.shape, self.layout, self.mesh, world_size)


# The tensors of a state are many and alike: every layer has the same ones, and an optimizer more of each.


@lru_cache(maxsize=1024)
def _box(shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int) -> Box:
    """Return what a rank holds of a tensor. Cached by frozen values, of which it is a function."""
    if not mesh.axes:
        return Box.whole(shape)
    return Box.of(layout.local_slice(shape, mesh, rank))


@lru_cache(maxsize=64)
def _holders(shape: tuple[int, ...], layout: Layout, mesh: Mesh, world_size: int) -> Mapping[Box, Sequence[int]]:
    """Return who holds which box of a tensor.

    Cached by frozen values, of which it is a function; nobody can change what all are given.
    """
    held: dict[Box, list[int]] = {}
    for rank in range(world_size):
        box = _box(shape, layout, mesh, rank)
        if box.numel or not math.prod(shape):
            held.setdefault(box, []).append(rank)
    return MappingProxyType({box: tuple(ranks) for box, ranks in held.items()})


def cut(box: Box, item_bytes: int, largest_bytes: int = LARGEST_CHUNK_BYTES) -> list[Box]:
    """The box as boxes of at most ``largest_bytes``, cut along its first dim, where that has rows enough.

    >>> [b.sizes for b in cut(Box((0, 0), (5, 4)), 4, largest_bytes=32)]
    [(2, 4), (2, 4), (1, 4)]
    """
    if not box.sizes or box.numel * item_bytes <= largest_bytes:
        return [box]
    row_bytes = math.prod(box.sizes[1:]) * item_bytes
    rows = max(largest_bytes // row_bytes, 1)
    first, count = box.offsets[0], box.sizes[0]
    return [
        Box((first + start, *box.offsets[1:]), (min(rows, count - start), *box.sizes[1:]))
        for start in range(0, count, rows)
    ]


def shares(pieces: Sequence[TensorShard], world_size: int, rank: int) -> list[tuple[str, Box]]:
    """Return the chunks that a rank writes: they are spread over who holds them, so that all write about as many bytes.

    What fewest ranks hold is given away first, then the largest: the freely movable chunks even out the rest.
    """
    todo = [
        (len(ranks), -part.numel * piece.dtype.itemsize, piece.name, part, ranks)
        for piece in pieces
        for box, ranks in piece.holders(world_size).items()
        for part in cut(box, piece.dtype.itemsize)
    ]
    load = [0] * world_size
    given: list[tuple[str, Box]] = []
    for _, negative_bytes, name, part, ranks in sorted(todo, key=lambda t: (*t[:3], t[3].offsets)):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] -= negative_bytes
        given += [(name, part)] if writer == rank else []
    return given
