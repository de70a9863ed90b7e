"""What a batch may hold, how it differs from another one in words that name the user's tensors, and whether ranks that
are to pass the same one do: else they would train on a mixture, or wait for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.trees import keys_in, tree_flatten
from shardwright.compiler.capture.tracing.open_sizes import in_batch
from shardwright.compiler.capture.tracing.outside.values import NOT_PLAIN, PLAIN, plain
from shardwright.data.loading.same_data import checksum
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.control import control_group
from shardwright.distributed.lockstep import Lockstep
from shardwright.distributed.ranks import alone
from shardwright.errors import UsageError


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in the order of the inputs of its capture.

    Raises:
        UsageError: where the batch holds something else that a program would keep as it is, or tensors without values.
    """
    leaves, _ = tree_flatten(batch)
    if problem := _problem(batch, leaves, sample=False):
        raise UsageError(problem)
    return [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]


def problem_with_sample(batch: Any) -> str | None:
    """What is wrong with a sample batch, None where nothing is. Its tensors may be without values."""
    return _problem(batch, tree_flatten(batch)[0], sample=True)


def _problem(batch: Any, leaves: list[tuple[str, Any]], *, sample: bool) -> str | None:
    for key in keys_in(batch):
        if plain(key) is NOT_PLAIN:
            return (
                f"the batch has a dict with a {type(key).__name__} as a key, {key!r}, which cannot be looked into; use "
                "words, numbers, or tuples of these as keys"
            )
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_meta and not sample:
                return (
                    f"{in_batch(path or 'batch')} is on the meta device, where tensors have no values; pass real ones"
                )
        elif not isinstance(leaf, PLAIN):
            name, kind = in_batch(path or "batch"), type(leaf).__name__
            if hasattr(leaf, "__array__"):
                return f"{name} is a {kind}, of which a program would keep the numbers; pass torch.as_tensor(...) of it"
            return (
                f"{name} is a {kind}, which cannot be looked into; pass tensors, numbers and words in tuples, lists, "
                "dicts or classes that torch.export.register_dataclass knows"
            )
    return None


def described(batch: Any) -> dict[str, str]:
    """The tensors of a batch and what stands beside them, by where they stand; sizes of the first dim are left out."""
    return {in_batch(path or "batch"): _kind(leaf) for path, leaf in tree_flatten(batch)[0]}


def difference(batch: Any, sample: dict[str, str]) -> str:
    """In what a batch differs from the sample batch, empty where it does not."""
    found = described(batch)
    texts = [f"{name} is {kind}, not {sample[name]}" for name, kind in found.items() if sample.get(name, kind) != kind]
    texts += [f"{name} ({kind}) is new" for name, kind in found.items() if name not in sample]
    texts += [f"{name} ({kind}) is missing" for name, kind in sample.items() if name not in found]
    return f"The batch is not like the sample batch: {'; '.join(texts)}." if texts else ""


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')}{['n', *leaf.shape[1:]] if leaf.ndim else []}".replace("'n'", "n")


FIRST = 3
EVERY = 100
"""The first calls are those in which ranks compare what they have, and then one in so many."""


class Turns:
    """Counts calls, and knows those in which ranks compare what they have."""

    def __init__(self) -> None:
        self.seen = 0

    def next(self) -> bool:
        """Whether one more call is such a one."""
        self.seen += 1
        return self.seen <= FIRST or self.seen % EVERY == 0


class SameBatch:
    """Compares some of the batches that ranks pass, by their shapes and checksums, in a collective of 16 bytes."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._turns = Turns()

    def check(self, tensors: Sequence[Tensor]) -> None:
        """All ranks call it together, with the whole batch that each was given.

        Raises:
            UsageError: on every rank, where some rank's batch is not that of rank 0.
        """
        if not self._is_due():
            return
        shown = _shown(tensors)
        number = int.from_bytes(hashlib.sha256(str(shown).encode()).digest()[:7])
        bounds = torch.tensor([number, -number])
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
        """What is to be the same on all ranks though each passes rows of its own, here so many: tensors that have no
        rows. Nothing where that is not compared for this batch."""
        if not self._is_due():
            return []
        return _shown([tensor for tensor in tensors if not (tensor.ndim and tensor.shape[0] == height)])

    def _is_due(self) -> bool:
        return self._turns.next() and not alone()


def _shown(tensors: Sequence[Tensor]) -> list[str]:
    return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} with checksum {checksum(t)[:8]}" for t in tensors]
