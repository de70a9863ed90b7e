"""Changes of DTensors by hand, which mean the tensor that a DTensor stands for and not the part that this rank holds.

Torch loses some of them without a word: what is put in place of ``x.data`` never reaches the part, and what is written
by an index into a gathered copy is gone with that. Others it draws anew for each part on CPUs, so that parts hold equal
noise. Here each of them does to the whole what plain PyTorch does, of which every rank then keeps its part. All ranks
come to them together, with equal numbers and generators. What is written into a view of several ranks' parts, which is
a copy, cannot be brought back, and is refused at the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwright import torch_private
from shardwright.errors import UsageError
from shardwright.mesh.dtensor import gathered, layout_of, part_like


@cache
def change_wholes() -> None:
    """Let changes of DTensors change the whole; once per process."""
    torch_private.change_dtensors(_set_data, _set_items, _drawn, _looked_into)


def _set_data(tensor: DTensor, new: Tensor) -> None:
    """What ``tensor.data = new`` does.

    Raises:
        UsageError: where ``new`` is of another shape, dtype or device.
    """
    if (new.shape, new.dtype, new.device) != (tensor.shape, tensor.dtype, tensor.device):
        raise UsageError(
            f"a split tensor of {_kind(tensor)} is given data of {_kind(new)}; programs were made for it as it is, so "
            "that new numbers must be of the same shape, dtype and device"
        )
    torch_private.put_part(tensor, part_like(new, tensor))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _set_items(tensor: DTensor, index: Any, value: Any) -> None:
    """What ``tensor[index] = value`` does, without gradients.

    Raises:
        RuntimeError: in the words of torch, where autograd would have to know of it.
    """
    if any(isinstance(placed, Partial) for placed in tensor.placements):
        Tensor.__setitem__(tensor, index, value)
        return
    taught = isinstance(value, Tensor) and value.requires_grad
    if torch.is_grad_enabled() and (tensor.requires_grad or taught):
        raise RuntimeError(
            "a view of a leaf Variable that requires grad is being used in an in-place operation: write to a split "
            "parameter under torch.no_grad()"
        )
    with torch.no_grad():
        whole, part = gathered(tensor), tensor.to_local()
        whole[_wholes(index)] = _wholes(value)
        _keep(part, whole, tensor)
    _copies[:] = [copy for copy in _copies if copy.given is not value]  # ``x[i] += 1`` brings back what it was given


def _keep(part: Tensor, whole: Tensor, of: DTensor) -> None:
    """Put into ``part``, what this rank holds of a tensor, the numbers of the ``whole``, which may be the same."""
    layout, mesh = layout_of(of)
    new = whole[layout.local_slice(of.shape, mesh, dist.get_rank())]
    if new.data_ptr() != part.data_ptr():
        part.copy_(new)


def _wholes(given: Any) -> Any:
    return torch_private.tree_map(lambda leaf: gathered(leaf) if isinstance(leaf, DTensor) else leaf, given)


@dataclass(frozen=True)
class _Copy:
    """What was given of a tensor in place of a view, with this rank's part as it was then.

    How often that was written to, torch notes for a view and what it looks into together.
    """

    given: DTensor
    before: Tensor
    of: tuple[int, ...]
    how: str


_copies: list[_Copy] = []
_MOST = 64


def _looked_into(tensor: DTensor, how: str, found: Any) -> None:
    """Note what a view of a tensor gave that is none: what is written to it would be lost."""
    if tensor.requires_grad and torch.is_grad_enabled():  # torch refuses to write to a view
        return
    memory = _memory(tensor)
    for given in torch_private.tree_leaves(found):
        if isinstance(given, DTensor) and given.numel() and _memory(given) != memory:
            _copies.append(_Copy(given, torch_private.part_of(given).clone(), tuple(tensor.shape), how))
    if len(_copies) > _MOST:
        refuse_lost_changes()


def _memory(tensor: DTensor) -> int:
    return torch_private.part_of(tensor).untyped_storage().data_ptr()


def refuse_lost_changes() -> None:
    """Asked before each step of a model that is split.

    Raises:
        UsageError: where a copy was written to in place of a parameter.
    """
    if not _copies:
        return
    lost = next((copy for copy in _copies if _differs(copy.before, torch_private.part_of(copy.given))), None)
    _copies.clear()
    if lost is not None:
        raise UsageError(
            f"what {lost.how} of a split tensor of shape {list(lost.of)} gave was changed in place; it needs the parts "
            "of several ranks and is a copy, so that the change is lost; write by an index, under torch.no_grad(): "
            "parameter[index] = value"
        )


def _differs(before: Tensor, now: Tensor) -> bool:
    return bool(((before != now) & (before == before)).any())  # NaN differs from itself


def _drawn(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a random operator gives on a DTensor: this rank's part of what it gives on the whole."""
    tensor = next(leaf for leaf in args if isinstance(leaf, DTensor))
    if torch_private.changes_operands(operator):  # whatever numbers it had
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        _keep(tensor.to_local(), operator(whole, *_wholes(args[1:]), **kwargs), tensor)
        return tensor
    placements = [Replicate() if isinstance(placed, Partial) else placed for placed in tensor.placements]

    def part(whole: Any) -> Any:
        if not isinstance(whole, Tensor) or whole.shape != tensor.shape:
            return whole
        like = DTensor.from_local(whole, tensor.device_mesh, [Replicate()] * len(placements), run_check=False)
        return like.redistribute(placements=placements)

    return torch_private.tree_map(part, operator(*_wholes(args), **_wholes(kwargs)))
