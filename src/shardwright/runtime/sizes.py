"""The sizes of the parts that ranks pass with ``batch="local"``: one all-gather of a few numbers in each step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.pulse import own_pulse
from shardwright.compiler.mesh.processes import all_gather_single
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.control import control_group
from shardwright.distributed.lockstep import Lockstep
from shardwright.errors import UsageError, WorldError
from shardwright.runtime.programs.inputs import Rows, global_shapes, in_turn, shown

_TOLD = 4  # numbers of each rank


class SizeExchange:
    """Tells all ranks how many rows each of them passes, and compares what else is to be the same.

    In the memory of the CPU, so that a step need not wait for what a GPU still has to do.
    """

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep, self._pulse = lockstep, own_pulse()

    def told(self, tensors: Sequence[Tensor], height: int, key: str, alike: Sequence[str]) -> list[list[int]]:
        """Return what each rank tells of its part; all ranks call it together.

        Args:
            tensors: what this rank passes, of ``height`` rows.
            key: what the program depends on beside sizes.
            alike: what all ranks are to have passed alike, in words.

        Raises:
            UsageError, WorldError: as `Lockstep.wait`.
        """
        program = _number(f"{key} {global_shapes(tensors, Rows((0, height), -1, None))}")
        beside = _number(str([*alike])) if alike else 0
        mine = torch.tensor([height, program, beside, self._lockstep.number], device="cpu")
        everyone = mine.new_empty(dist.get_world_size() * _TOLD)
        with self._pulse.inside(b"all_gather"):
            self._lockstep.run(all_gather_single, everyone, mine, group=control_group())
        found: list[list[int]] = everyone.view(-1, _TOLD).tolist()
        return found

    def rows(self, told: Sequence[Sequence[int]], tensors: Sequence[Tensor], alike: Sequence[str]) -> Rows:
        """Return which rows each rank has, of what all have told; all ranks call it together.

        Raises:
            UsageError: on every rank, where parts differ in more than their number of rows, or what is beside rows.
            WorldError: where others tell of an earlier call, in which this rank failed.
        """
        heights, programs, beside, calls = zip(*told, strict=True)
        if len(set(calls)) != 1:
            raise WorldError(
                f"ranks answer for different calls of the model ({', '.join(map(str, calls))}, rank by rank), since an "
                "earlier one failed on some of them while others waited; let such an error end the job"
            )
        if len(set(programs)) != 1:
            passed = from_all_ranks(shown(tensors))
            other = next(rank for rank, theirs in enumerate(programs) if theirs != programs[0])
            raise UsageError(
                f"the parts of the batch do not fit together: rank 0 passed {passed[0]}, rank {other} passed "
                f"{passed[other]}; parts may differ in their number of rows alone: pad all to one length, and have the "
                "same values beside tensors, and model.train() or eval(), on all ranks"
            )
        if len(set(beside)) != 1:
            passed = from_all_ranks(", ".join(alike) or "none")
            other = next(rank for rank, theirs in enumerate(passed) if theirs != passed[0])
            raise UsageError(
                "with batch='local' ranks pass rows of their own in tensors whose dim 0 is as long as the first one's, "
                f"and all others alike, but rank 0 passed {passed[0]} and rank {other} passed {passed[other]}; let dim "
                "0 count the samples in what is cut, or pass the whole batch on all ranks with batch='global'"
            )
        return replace(in_turn(heights), agreed=True)


def _number(text: str) -> int:
    """Return a number of 7 bytes that other texts would nearly never give."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
