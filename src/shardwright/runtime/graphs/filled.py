"""Finds tensors of a batch that hold one number in every entry, as masks do where nothing is padded.

Such batches have a program of their own, in which attention takes no mask. Only tensors on the CPU are looked at: to
read one on a GPU would wait for all that was enqueued before it came there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.torch_private import is_fake
from shardwright.compiler.capture.ir import Filled
from shardwright.distributed.control import control_group
from shardwright.distributed.lockstep import Lockstep
from shardwright.distributed.ranks import alone

_NUMBERS = (0, 1)


def filled_of(tensors: Sequence[Tensor], conditions: Collection[Filled] | None = None) -> frozenset[Filled]:
    """Return which tensors hold 0 or 1 in every entry.

    Args:
        conditions: all that is asked for; by default of every tensor of whole numbers or truths.
    """
    asked = {(place, number) for place in range(len(tensors)) for number in _NUMBERS}
    return frozenset(each for each in (asked if conditions is None else conditions) if _holds(tensors, each))


def _holds(tensors: Sequence[Tensor], condition: Filled) -> bool:
    place, number = condition
    tensor = tensors[place]
    if tensor.device.type != "cpu" or tensor.is_floating_point() or tensor.is_complex() or is_fake(tensor):
        return False
    if not tensor.ndim or not tensor.numel():
        return bool(tensor.ndim)
    return bool(tensor[(0,) * tensor.ndim] == number) and bool((tensor == number).all())


def agreed(filled: frozenset[Filled], conditions: Collection[Filled], lockstep: Lockstep) -> frozenset[Filled]:
    """Return which of the conditions hold on all ranks, which call this together: one collective of a few numbers."""
    order = sorted(conditions)
    if alone() or not order:
        return filled
    bits = torch.tensor([condition in filled for condition in order], dtype=torch.int64, device="cpu")
    lockstep.run(partial(dist.all_reduce, op=dist.ReduceOp.MIN), bits, group=control_group())
    return frozenset(condition for condition, bit in zip(order, bits.tolist(), strict=True) if bit)
