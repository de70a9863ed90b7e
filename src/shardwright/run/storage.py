"""The parameters of a model, stored on every rank as the plan says.

Either all parameters are plain tensors (none is split) or all are DTensors on the mesh of the plan: torch's foreach
and fused optimizers, `clip_grad_norm_` and `GradScaler` refuse a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.errors import UsageError
from shardwright.mesh.dtensor import device_mesh, to_placements
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh
from shardwright.world.ranks import alone


def agree_on_weights(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    if alone():
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0)


def refuse_meta(model: nn.Module) -> None:
    """Raises `UsageError` where a parameter or buffer has no storage yet."""
    empty = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if empty:
        raise UsageError(
            f"{len(empty)} parameters and buffers are on the meta device ({', '.join(empty[:3])}, ...): they can be "
            "planned but not trained; call model.to_empty(device=...) and initialise them first"
        )


def split_parameters(model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, device: torch.device) -> None:
    """Replace every parameter of the model by a DTensor that holds this rank's part of it.

    ``layouts`` maps the names of `Module.named_parameters` to layouts. Nothing happens where none splits: the
    parameters then stay the plain tensors that they are. Other ranks' parts are freed.
    """
    if not any(layout.split_axes for layout in layouts.values()):
        return
    _watch_optimizers()
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
        owner, _, attribute = name.rpartition(".")
        setattr(owners[owner], attribute, replaced[id(parameter)])


def local_part(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, differentiably."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# Optimizers whose fused kernels torch cannot run on DTensors (no sharding rule in 2.13).
_UNFUSABLE = (torch.optim.SGD, torch.optim.Adagrad)


@cache
def _watch_optimizers() -> None:
    """Let `_refuse_unfusable` look at every optimizer before its step; once per process."""
    register_optimizer_step_pre_hook(_refuse_unfusable)


def _refuse_unfusable(optimizer: torch.optim.Optimizer, *_: object) -> None:
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
