"""Global batches, put together again from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def global_batches(loaders: Sequence[Any], limit: int | None = None) -> list[list[int]]:
    """The numbers of each global batch, from one loader per rank, in rank order; all of an epoch without ``limit``.

    A sample is a number and two floats that equal it. The parts of a batch must lie side by side and end together.
    """
    iterators = [iter(loader) for loader in loaders]
    batches: list[list[int]] = []
    while limit is None or len(batches) < limit:
        parts = [next(iterator, None) for iterator in iterators]
        if parts[0] is None:
            assert parts == [None] * len(parts)
            break
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (0, parts[0].global_size)
        assert len({part.global_size for part in parts}) == 1
        for part in parts:
            number, row = part
            assert (number.dtype, row.dtype, row.shape[1:]) == (torch.int64, torch.float32, (2,))
            assert len(number) == len(row) == part.stop - part.start
            assert torch.equal(row, number.float()[:, None].expand(-1, 2))
        batches.append(torch.cat([part[0] for part in parts]).tolist())
    return batches
