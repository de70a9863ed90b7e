"""Parameters as DTensors: how a model comes to hold this rank's parts, and what optimizers must know of it.

Either all parameters are plain tensors (none is split) or all are DTensors on the mesh of the plan: torch's foreach
and fused optimizers, `clip_grad_norm_` and `GradScaler` refuse a mixture. A DTensor cannot take the place of a plain
parameter inside the same Python object (`torch.utils.swap_tensors` refuses objects of different slots), so optimizers
that were made before are given the new parameters before their first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwright import torch_private
from shardwright.errors import UsageError
from shardwright.mesh.dtensor import device_mesh, to_placements
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh

# Parameters that were replaced -> what they were replaced by.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()


def split_parameters(model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, device: torch.device) -> None:
    """Replace every parameter of the model by a DTensor that holds this rank's part of it.

    ``layouts`` maps the names of `Module.named_parameters` to layouts. Nothing happens where none splits: the
    parameters then stay the plain tensors that they are. Other ranks' parts are freed.

    Raises:
        UsageError: where a parameter has hooks, which its successor would not have.
    """
    if not any(layout.split_axes for layout in layouts.values()):
        return
    _refuse_hooks(model)
    _watch_optimizers()
    torch_private.read_whole_numbers()
    torch_mesh = device_mesh(mesh, device.type)
    rank = dist.get_rank()
    replaced: dict[int, nn.Parameter] = {}
    owners = dict(model.named_modules(remove_duplicate=False))
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in replaced:
            layout = layouts.get(name, Layout.replicated(parameter.ndim))
            part = parameter.detach()[layout.local_slice(parameter.shape, mesh, rank)].clone()
            stored = DTensor.from_local(
                part, torch_mesh, to_placements(layout, mesh), shape=parameter.shape, stride=parameter.stride()
            )
            replaced[id(parameter)] = nn.Parameter(stored, requires_grad=parameter.requires_grad)
            _replaced[parameter] = replaced[id(parameter)]
        owner, _, attribute = name.rpartition(".")
        setattr(owners[owner], attribute, replaced[id(parameter)])


def local_part(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, differentiably."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _refuse_hooks(model: nn.Module) -> None:
    hooked = [n for n, p in model.named_parameters() if p._backward_hooks or torch_private.has_post_hooks(p)]
    if hooked:
        raise UsageError(
            f"{hooked[0]} has a hook (register_hook), and the plan splits parameters, which makes new ones; register "
            "hooks after sw.parallelize, on the parameters of what it returns"
        )


# Optimizers whose fused kernels torch cannot run on DTensors (no sharding rule in 2.13).
_UNFUSABLE = (torch.optim.SGD, torch.optim.Adagrad)


@cache
def _watch_optimizers() -> None:
    """Look at every optimizer before its step; once per process."""
    register_optimizer_step_pre_hook(_before_step)


_known: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # how many parameters were looked at


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    _give_successors(optimizer)
    _refuse_unfusable(optimizer)


def _give_successors(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was made before its parameters were split update those that took their place.

    Raises:
        UsageError: where it has state already, which belongs to whole parameters.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _known.get(optimizer) == count:
        return
    for group in optimizer.param_groups:
        for at, parameter in enumerate(group["params"]):
            successor = _replaced.get(parameter)  # type: ignore[no-untyped-call]
            if successor is None:
                continue
            if optimizer.state.get(parameter):
                raise UsageError(
                    f"this {type(optimizer).__name__} has made steps with parameters that sw.parallelize has split "
                    "since; make it after sw.parallelize, from the parameters of what that returns, and load its state "
                    "with sw.checkpoint"
                )
            group["params"][at] = successor
    _known[optimizer] = count


def _refuse_unfusable(optimizer: torch.optim.Optimizer) -> None:
    """Say before the step what torch's own error would not.

    Raises:
        UsageError: where a fused optimizer without a rule for DTensors is to update some.
    """
    if isinstance(optimizer, _UNFUSABLE):
        for group in optimizer.param_groups:
            if group.get("fused") and any(isinstance(parameter, DTensor) for parameter in group["params"]):
                name = type(optimizer).__name__
                raise UsageError(
                    f"{name}(fused=True) cannot update parameters that are split between ranks: torch has no fused "
                    f"{name} for DTensors; use {name}(..., foreach=True)"
                )
