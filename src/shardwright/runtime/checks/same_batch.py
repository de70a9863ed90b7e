"""Checks that ranks that are to pass the same batch do: else they would train on a mixture, or wait for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.data.loading.same_data import checksum
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.control import control_group
from shardwright.distributed.lockstep import Lockstep
from shardwright.distributed.ranks import alone
from shardwright.errors import UsageError
from shardwright.runtime.checks.check import Checks, Turns


class SameBatch:
    """Compares some of the whole batches that ranks pass, by their shapes and checksums.

    Costs nothing in most calls; in those of `Turns` a checksum of the batch and a collective of 16 bytes.
    """

    def __init__(self, lockstep: Lockstep, checks: Checks = "usual") -> None:
        self._lockstep, self._turns = lockstep, Turns(checks)

    def before(self, tensors: Sequence[Tensor]) -> None:
        """Compare the whole batch that each rank was given; all call it together.

        Raises:
            UsageError: on every rank, where some rank's batch is not that of rank 0.
        """
        if not self._turns.next() or alone():
            return
        shown = _shown(tensors)
        number = int.from_bytes(hashlib.sha256(str(shown).encode()).digest()[:7])
        bounds = torch.tensor([number, -number], device="cpu")
        self._lockstep.run(partial(dist.all_reduce, op=dist.ReduceOp.MAX), bounds, group=control_group())
        if bounds[0] == -bounds[1]:
            return
        everyone = from_all_ranks(", ".join(shown))
        other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        raise UsageError(
            f"with batch='global' every rank passes the same whole batch, but rank 0 passed {everyone[0]} and rank "
            f"{other} {everyone[other]}; seed the ranks alike where batches are drawn, or pass parts with batch='local'"
        )

    def beside_rows(self, tensors: Sequence[Tensor], height: int) -> list[str]:
        """Return what is to be the same on all ranks though each passes rows of its own, here so many: tensors that
        have no rows. Nothing where that is not compared for this batch."""
        if not self._turns.next() or alone():
            return []
        return _shown([tensor for tensor in tensors if not (tensor.ndim and tensor.shape[0] == height)])


def _shown(tensors: Sequence[Tensor]) -> list[str]:
    return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} with checksum {checksum(t)[:8]}" for t in tensors]
