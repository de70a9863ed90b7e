"""Sizes of a batch that change from step to step, as users say them and as messages show them.

``dynamic`` of `parallelize` is True, for all dims in which batches turn out to differ, or names dims by the label of
the tensor in the batch: ``{"ids": 1, "mask": (0, 1)}`` for a dict, ``{"0": 1}`` for a tuple, ``{"batch": 1}`` for a
tensor alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.common.trees import tree_flatten
from shardwright.compiler.capture.tracing.sizes.open_sizes import in_batch

Dynamic = bool | Mapping[str, int | Sequence[int]]
Shapes = tuple[tuple[int, ...], ...]


def dynamic_problem(dynamic: object, labels: Sequence[str], shapes: Shapes) -> str | None:
    """Return why this cannot be `dynamic` for batches with tensors of these labels; None where it can."""
    if isinstance(dynamic, bool):
        return None
    form = "dynamic is True, or the dims that change by tensor of the batch, as {'ids': 1, 'mask': (0, 1)}"
    if not isinstance(dynamic, Mapping):
        return f"{form}; got {dynamic!r}"
    there = dict(zip(labels, shapes, strict=True))
    for label, dims in dynamic.items():
        if label not in there:
            return f"dynamic names {label!r}, the batch has {', '.join(map(repr, labels))}"
        for dim in _dims(dims):
            if not isinstance(dim, int) or isinstance(dim, bool):
                return f"{form}; got {dims!r} for {label!r}"
            if not -len(there[label]) <= dim < len(there[label]):
                return f"dynamic names dim {dim} of {label!r}, which has the shape {list(there[label])}"
    return None


def open_dims(dynamic: Dynamic, labels: Sequence[str], seen: Sequence[Shapes]) -> list[list[int]]:
    """The dims of each tensor whose sizes are left open in a capture for the last of the shapes that were seen.

    Sizes of 0 and 1 are never open: broadcasting decides by them.
    """
    asked = changed_dims(seen)
    if isinstance(dynamic, Mapping):
        asked = [
            [dim % len(shape) for dim in _dims(dynamic.get(label, ()))]
            for label, shape in zip(labels, seen[-1], strict=True)
        ]
    return [[dim for dim in dims if shape[dim] > 1] for dims, shape in zip(asked, seen[-1], strict=True)]


def labels_and_shapes(batch: Any) -> tuple[list[str], Shapes]:
    """Return what the tensors of a batch are called, and their shapes."""
    leaves = tree_flatten(batch)[0]
    tensors = [(path or "batch", leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [label for label, _ in tensors], tuple(tuple(tensor.shape) for _, tensor in tensors)


def changed_dims(seen: Sequence[Shapes]) -> list[list[int]]:
    """The dims of each tensor that are not of one size in all shapes."""
    return [
        [dim for dim in range(len(shape)) if any(other[i][dim] != shape[dim] for other in seen)]
        for i, shape in enumerate(seen[-1])
    ]


def written(labels: Sequence[str], dims: Sequence[Sequence[int]]) -> str:
    """Dims as a user writes them."""
    found = {label: of[0] if len(of) == 1 else tuple(of) for label, of in zip(labels, dims, strict=True) if of}
    return repr(found)


def changes(labels: Sequence[str], before: Shapes, after: Shapes) -> str:
    """In which shapes two batches differ, ``batch['ids'] 8x37 -> 8x41``."""
    both = zip(labels, before, after, strict=True)
    return ", ".join(f"{in_batch(label)} {_short(old)} -> {_short(new)}" for label, old, new in both if old != new)


def _short(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _dims(dims: Any) -> Sequence[Any]:
    return dims if isinstance(dims, (list, tuple)) else (dims,)
