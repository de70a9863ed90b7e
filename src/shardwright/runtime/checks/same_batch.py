"""Checks that ranks that are to pass the same batch do: else they would train on a mixture, or wait for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.control import control_group
from shardwright.distributed.lockstep import Lockstep, Turns
from shardwright.distributed.pending_numbers import PendingNumbers
from shardwright.distributed.ranks import alone
from shardwright.errors import UsageError
from shardwright.runtime.checks.digests import sum_of_words


class SameBatch:
    """Compares some of the whole batches that ranks pass, by their shapes and checksums.

    Costs nothing in most calls; in those of `Turns` a checksum of the batch and a collective of 16 bytes. A GPU is not
    waited for: what it is asked for in one call, but for the first ones, is compared in the next.

    Args:
        turns: the calls in which it compares; asked in those that are `Turns.due_or_after`.
        device: of the ranks; a batch need not be there.
    """

    def __init__(self, lockstep: Lockstep, device: torch.device, turns: Turns) -> None:
        self._lockstep, self._turns = lockstep, turns
        self._later = device.type != "cpu"  # the same on all ranks, wherever their batches are
        self._begun: list[_Shown] | None = None

    def before(self, tensors: Sequence[Tensor]) -> None:
        """Compare the whole batch that each rank was given; all call it together.

        Raises:
            UsageError: on every rank, where some rank's batch is not that of rank 0.
        """
        due = self._due(tensors)
        if due is None:
            return
        shown = list(map(str, due))
        number = int.from_bytes(hashlib.sha256(str(shown).encode()).digest()[:7])
        bounds = torch.tensor([number, -number], device="cpu")
        self._lockstep.run(partial(dist.all_reduce, op=dist.ReduceOp.MAX), bounds, group=control_group())
        if bounds[0] == -bounds[1]:
            return
        everyone = from_all_ranks(", ".join(shown))
        other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        before = "in the call before this one, " if self._later and self._turns.steady else ""
        raise UsageError(
            f"with batch='global' every rank passes the same whole batch, but {before}rank 0 passed {everyone[0]} and "
            f"rank {other} {everyone[other]}; seed the ranks alike where batches are drawn, or pass parts with "
            "batch='local'"
        )

    def beside_rows(self, tensors: Sequence[Tensor], count: int) -> list[str]:
        """Return the tensors to compare in this call, in words: those without rows, which must be equal on all ranks.

        Each rank passes ``count`` rows of its own. The list is empty where nothing is compared.
        """
        due = self._due([tensor for tensor in tensors if not (tensor.ndim and tensor.shape[0] == count)])
        return list(map(str, due or ()))

    def _due(self, tensors: Sequence[Tensor]) -> list[_Shown] | None:
        """Return what is to be compared in this call, in which these are passed; None for nothing."""
        if alone():
            return None
        begun, self._begun = self._begun, None
        if not self._turns.due:
            return begun
        shown = [_Shown(tensor) for tensor in tensors]
        if self._later and self._turns.steady:
            self._begun = shown
            return None
        return shown


class _Shown:
    """A tensor in words, of which the last, a number for all its bits, is on its way from where the tensor is."""

    def __init__(self, tensor: Tensor) -> None:
        self._what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        with torch.no_grad():
            self._sum = PendingNumbers(sum_of_words(tensor.contiguous(), tensor.device))

    def __str__(self) -> str:
        digest = hashlib.sha256(str(self._sum.value()).encode()).hexdigest()
        return f"{self._what} with checksum {digest[:8]}"
