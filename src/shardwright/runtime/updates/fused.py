"""Steps by torch's fused kernels, on CPUs and on GPUs.

Torch's optimizers go through memory a dozen times unless they are asked for ``fused=True``, which goes through it
once: AdamW then takes a fifth of the time on a CPU, with the same numbers up to rounding. The kernels take for granted
that all of a parameter has one memory format, and compute something else or raise where it has not; so that is looked
at before each step. On a GPU they read the number of the step there, to which it is moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from shardwright.common.torch_private import part_of
from shardwright.distributed.backends.segment.flats import is_plain

# Those with kernels that round as the loops do; Adagrad's differ from its loop by more.
_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_ALREADY_SAID = ("fused", "foreach")  # how steps are to be made, by who made the optimizer
_OTHERWISE = ("differentiable", "capturable")
_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.float64)  # of narrower ones the kernels round less often than the loops


# The groups that take fused kernels in the step that runs.
_taking: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


def take_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Let the step that begins take fused kernels for each group where that gives the same.

    The group must leave open how its steps are made. First steps, in which the states are made, are left as they are.
    """
    leave_fused_kernels(optimizer)
    _taking[optimizer] = [group for group in optimizer.param_groups if _is_to_fuse(optimizer, group)]
    for group in _taking[optimizer]:
        group["fused"] = True
        for parameter in group["params"]:
            _move_step(optimizer.state.get(parameter, {}), parameter.device)


def _move_step(state: dict[str, Any], device: torch.device) -> None:
    """Put the number of a step where its parameter is, as the kernels want it; without waiting for a GPU."""
    step = state.get("step")
    if isinstance(step, Tensor) and step.device != device:
        state["step"] = step.to(device, non_blocking=True)


def leave_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Leave the settings of an optimizer as they were before its step.

    The kernels do not tell autograd that they write to parameters, as the loops do: without that a backward after the
    step would be taken for right that reads the parameters of its forward.
    """
    for group in _taking.pop(optimizer, ()):
        group["fused"] = None
        updated = [parameter for parameter in group["params"] if parameter.grad is not None]
        increment_version([*updated, *(part_of(each) for each in updated if isinstance(each, DTensor))])


def _is_to_fuse(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    if not isinstance(optimizer, _KINDS) or torch.compiler.is_compiling():
        return False
    if any(group.get(name) is not None for name in _ALREADY_SAID) or any(group.get(name) for name in _OTHERWISE):
        return False
    numbers = [group["lr"], *group.get("betas", ())]
    if any(isinstance(number, Tensor) for number in numbers):  # which the loops round otherwise
        return False
    keeps = not isinstance(optimizer, torch.optim.SGD) or group["momentum"] != 0
    updated = [parameter for parameter in group["params"] if parameter.grad is not None]
    return all(_lie_alike(parameter, optimizer.state.get(parameter, {}), keeps) for parameter in updated)


def _lie_alike(parameter: Tensor, state: Mapping[str, Any], keeps: bool) -> bool:
    """Return whether a parameter, its gradient and its states have their numbers in one order.

    With ``keeps``, there must be states.
    """
    if parameter.device.type not in _DEVICES or parameter.dtype not in _DTYPES:
        return False
    kept = [value for name, value in state.items() if name != "step" and value is not None]
    if keeps and not kept:
        return False
    step = state.get("step")
    if step is not None:
        is_there = isinstance(step, Tensor) and (step.is_cpu or step.device == parameter.device)
        if not is_there or step.dtype != torch.float32:
            return False
    return _lies_plain(parameter) and all(_lies_as(parameter, value) for value in (parameter.grad, *kept))


def _lies_plain(tensor: Tensor) -> bool:
    return is_plain(part_of(tensor) if isinstance(tensor, DTensor) else tensor)


def _lies_as(parameter: Tensor, value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device == parameter.device
        and value.dtype == parameter.dtype
        and value.shape == parameter.shape
        and _placements(value) == _placements(parameter)
        and _lies_plain(value)
    )


def _placements(tensor: Tensor) -> Any:
    return tensor.placements if isinstance(tensor, DTensor) else None
