"""A batch that knows which part of the global batch it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwright.errors import UsageError


class Batch(tuple[torch.Tensor, ...]):
    """This rank's samples ``start`` to ``stop`` of a global batch of ``global_size`` samples.

    A tuple of tensors, each with the samples along dim 0 (shape ``[stop - start, ...]``), to be unpacked like
    any other: ``x, y = batch``. Every rank knows the global size without talking to the others, also when its
    own part is empty; and, where the batch says with ``ranges`` which samples each rank has, who has what.
    Raises `UsageError` when a range lies outside the global batch, or no rank of ``ranges`` has this one.

    >>> batch = Batch([torch.zeros(2, 3), torch.zeros(2)], global_size=30, start=4, stop=6)
    >>> x, y = batch
    >>> batch
    Batch(samples 4 to 6 of 30: float32[2, 3], float32[2])
    """

    global_size: int
    start: int
    stop: int
    ranges: tuple[tuple[int, int], ...] | None

    def __new__(
        cls,
        tensors: Iterable[torch.Tensor],
        *,
        global_size: int,
        start: int,
        stop: int,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> Batch:
        if not 0 <= start <= stop <= global_size:
            raise UsageError(
                f"a batch of samples {start} to {stop} does not lie within a global batch of {global_size} samples"
            )
        if ranges is not None and (start, stop) not in ranges:
            raise UsageError(f"a batch of samples {start} to {stop} is that of no rank, who have {list(ranges)}")
        batch = super().__new__(cls, tensors)
        batch.global_size, batch.start, batch.stop = global_size, start, stop
        batch.ranges = None if ranges is None else tuple(ranges)
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (tuple(self), self.global_size, self.start, self.stop, self.ranges)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self)
        return f"Batch(samples {self.start} to {self.stop} of {self.global_size}: {tensors})"

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        return self.of([t.to(device, non_blocking=non_blocking) for t in self])

    def of(self, tensors: Iterable[torch.Tensor]) -> Batch:
        return _rebuild(tuple(tensors), self.global_size, self.start, self.stop, self.ranges)


def _rebuild(
    tensors: tuple[torch.Tensor, ...],
    global_size: int,
    start: int,
    stop: int,
    ranges: tuple[tuple[int, int], ...] | None,
) -> Batch:
    return Batch(tensors, global_size=global_size, start=start, stop=stop, ranges=ranges)
