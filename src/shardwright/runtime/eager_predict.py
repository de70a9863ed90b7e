"""Predictions of a model that was not captured: each rank makes those of its own part of the batch, which are joined.

Which tensors of the outputs have a row for each sample is tried with one sample less. What has none must be the same on
all ranks, since nobody knows how to join it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.trees import tree_map
from shardwright.compiler.capture.convert import OutputTree
from shardwright.compiler.rules.notation import Operand
from shardwright.data.loading.samples import count_samples, part_of_batch
from shardwright.distributed.agreement import from_all_ranks
from shardwright.errors import UsageError


@dataclass(frozen=True)
class _Part:
    """The form of one rank's outputs. ``rows``: which tensors have one for each sample.

    ``outputs`` is None for an empty part, ``rows`` where there was no sample to leave out.
    """

    count: int
    outputs: OutputTree | None
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    rows: tuple[bool, ...] | None


class Prediction:
    """``function(part)`` on every rank, joined; ``device`` is where ranks talk about tensors."""

    def __init__(self, function: Callable[[Any], Any], device: torch.device) -> None:
        self._function, self._device = function, device

    def __call__(self, part: Any, count: int) -> Any:
        """The outputs for the global batch, of which ``part`` has ``count`` samples; all ranks call it together.

        Raises:
            UsageError: on all ranks, where outputs cannot be joined.
        """
        tensors, tree = _taken_apart(self._function(part)) if count else ([], None)
        kinds = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        everyone = from_all_ranks(_Part(count, tree, kinds, self._tried(part, count, tensors)))
        filled = [each for each in everyone if each.count]
        if not filled:
            raise UsageError("the batch is empty; expected at least one sample")
        first = filled[0]
        rows = next((each.rows for each in filled if each.rows is not None), None)
        rows = rows or tuple(shape[:1] == (1,) for shape, _ in first.kinds)
        _refuse_unlike(filled, rows)
        counts = [each.count for each in everyone]
        others = iter(_same_on_all([t for t, is_rows in zip(tensors, rows, strict=False) if not is_rows] or None))
        joined = []
        for at, (is_rows, (shape, dtype)) in enumerate(zip(rows, first.kinds, strict=True)):
            if is_rows:
                mine = tensors[at] if count else torch.empty(0, *shape[1:], dtype=dtype, device=self._device)
                joined.append(_rows_of_all(mine.to(self._device), counts))
            else:
                joined.append(next(others).to(self._device))
        assert first.outputs is not None
        return first.outputs.unflatten(joined)

    def _tried(self, part: Any, count: int, tensors: Sequence[Tensor]) -> tuple[bool, ...] | None:
        """Return which of the tensors lose a row with a sample; None where there is none to leave out.

        It is tried for each batch: what the function returns may depend on anything, and a tensor that is taken for
        rows would be joined with itself.
        """
        if count <= 1:
            return None
        fewer, _ = _taken_apart(self._function(part_of_batch(part, 1, count_samples(part))))
        return tuple(len(b.shape) > 0 and len(a) > len(b) for a, b in zip(tensors, fewer, strict=True))


def _taken_apart(outputs: Any) -> tuple[list[Tensor], OutputTree]:
    """The tensors of some outputs, and what they stand in."""
    tensors: list[Tensor] = []

    def operand(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return Operand(len(tensors) - 1)

    return tensors, OutputTree(tree_map(operand, outputs))


def _refuse_unlike(parts: Sequence[_Part], rows: Sequence[bool]) -> None:
    """Raise where two ranks have outputs of different forms, or other values beside tensors."""

    def form(part: _Part) -> Any:
        pairs = zip(rows, part.kinds, strict=True)
        return part.outputs, [(shape[1:] if is_rows else shape, dtype) for is_rows, (shape, dtype) in pairs]

    for part in parts:
        if len(part.kinds) != len(rows) or form(part) != form(parts[0]):
            raise UsageError(
                f"ranks predict {parts[0].outputs} of {parts[0].kinds} and {part.outputs} of {part.kinds}, which "
                "cannot be joined; return tensors with a row for each sample, or predict with gather=False"
            )


def _rows_of_all(mine: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all ranks, in rank order; as bytes, since backends move not every dtype."""
    widest = max(counts)
    padded = mine.new_zeros(widest, *mine.shape[1:])
    padded[: len(mine)] = mine
    data = padded.reshape(-1).view(torch.uint8)
    pieces = [torch.empty_like(data) for _ in counts]
    dist.all_gather(pieces, data)
    whole = [piece.view(mine.dtype).reshape(padded.shape)[:count] for piece, count in zip(pieces, counts, strict=True)]
    return torch.cat(whole)


def _same_on_all(mine: list[Tensor] | None) -> list[Tensor]:
    """The tensors without rows, which must be the same on all ranks; None where this rank has no samples."""
    everyone = [theirs for theirs in from_all_ranks(mine and [tensor.cpu() for tensor in mine]) if theirs is not None]
    for theirs in everyone[1:]:
        for at, (a, b) in enumerate(zip(everyone[0], theirs, strict=True)):
            if not torch.equal(a, b):
                raise UsageError(
                    f"ranks predict different tensors of shape {list(a.shape)}, which have no row for each sample "
                    f"(number {at} of these), so that they cannot be joined; return rows, or predict with gather=False"
                )
    return everyone[0] if everyone else []
