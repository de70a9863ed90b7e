"""Whether ranks that are to pass the same whole batch do: else they would train on a mixture, or wait for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.data.loading.same_data import checksum
from shardwright.errors import UsageError
from shardwright.world.agreement import from_all_ranks
from shardwright.world.ranks import alone

FIRST = 3
EVERY = 100
"""The first batches are compared, and then one in so many."""


class SameBatch:
    """Compares some of the batches that ranks pass, by their shapes and checksums, in a collective of 16 bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen = 0

    def check(self, tensors: Sequence[Tensor]) -> None:
        """All ranks call it together, with the batch that each was given.

        Raises:
            UsageError: on every rank, where some rank's batch is not that of rank 0.
        """
        if alone():
            return
        self._seen += 1
        if self._seen > FIRST and self._seen % EVERY:
            return
        shown = [
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} with checksum {checksum(t)[:8]}" for t in tensors
        ]
        number = int.from_bytes(hashlib.sha256(str(shown).encode()).digest()[:7])
        bounds = torch.tensor([number, -number], device=self._device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        if bounds[0] == -bounds[1]:
            return
        everyone = from_all_ranks(", ".join(shown))
        other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        raise UsageError(
            f"with batch='global' every rank passes the same whole batch, but rank 0 passed {everyone[0]} and rank "
            f"{other} {everyone[other]}; seed the ranks alike where batches are drawn, or pass parts with batch='local'"
        )
