"""The state of a model that runs by programs: parameters as the plan stores them, buffers, random numbers.

Either all parameters are plain tensors (none is split) or all are DTensors on the mesh of the plan: torch's foreach
and fused optimizers, `clip_grad_norm_` and `GradScaler` refuse a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.errors import UsageError
from shardwright.graph.ir import Capture
from shardwright.mesh.collectives import Communicator, all_gather
from shardwright.mesh.dtensor import device_mesh, to_placements
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import redistribute
from shardwright.plan.plan import Plan
from shardwright.run.programs.buckets import GradientReduction
from shardwright.run.programs.execute import StepArguments
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


class ModelState:
    """The tensors of ``module``, whose parameters it splits as ``plan`` says, and what random numbers depend on.

    ``seed`` and ``step``, the training steps so far, fix the random numbers of a step, together with positions.
    """

    def __init__(self, module: nn.Module, plan: Plan, seed: int, device: torch.device) -> None:
        self.seed, self.step = seed, 0
        self.storage = {v.label: plan.leaves[v.name] for v in plan.capture.of_kind("parameter")}
        """How each parameter is stored, by its name in the model, tied ones by the first of their names."""
        self._module, self._plan, self._device = module, plan, device
        names = {**{name: name for name in self.storage}, **plan.capture.tied}
        layouts = {name: self.storage[first] for name, first in names.items() if first in self.storage}
        split_parameters(module, layouts, plan.mesh, device)

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    def _buffer(self, name: str) -> Tensor:
        owner, _, attribute = name.rpartition(".")
        tensor: Tensor = getattr(self._module.get_submodule(owner), attribute)
        return tensor

    def arguments(
        self, capture: Capture, inputs: Sequence[Tensor], step: int, reduction: GradientReduction
    ) -> StepArguments:
        """What the program of ``capture`` is called with in training step ``step``."""
        # Copies, since the backward may need what `store_buffers` overwrites.
        buffers = [
            self._buffer(v.label).clone() if v.name in capture.mutations else self._buffer(v.label)
            for v in capture.of_kind("buffer")
        ]
        parameters = [
            reduction.join(value.name, local_part(self._parameters[value.label]))
            for value in capture.of_kind("parameter")
        ]
        constants = [capture.constants[value.name].to(self._device) for value in capture.of_kind("constant")]
        return StepArguments(parameters, buffers, inputs, constants, self.seed, step)

    def store_buffers(self, capture: Capture, new: Sequence[Tensor]) -> None:
        """Keep the buffers that a training step has made."""
        with torch.no_grad():
            for name, value in zip(capture.mutations, new, strict=True):
                self._buffer(capture.values[name].label).copy_(value)

    def whole(self, communicator: Communicator) -> dict[str, Tensor]:
        """The state of the model, every tensor whole on every rank; all ranks call it together."""
        return {name: self._gathered(name, tensor, communicator) for name, tensor in self._module.state_dict().items()}

    def _gathered(self, name: str, tensor: Tensor, communicator: Communicator) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        shape, replicated = tuple(tensor.shape), Layout.replicated(tensor.ndim)
        layout = self.storage.get(self._plan.capture.tied.get(name, name), replicated)
        steps = redistribute(layout, replicated, (), shape, self._plan.mesh)
        communicator.prepare(step.axes for step in steps)
        with torch.no_grad():
            whole = tensor.to_local()
            for step in steps:
                whole = all_gather(whole, communicator, **step.arguments(shape))
        return whole
