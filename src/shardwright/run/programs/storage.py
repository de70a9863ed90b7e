"""The state of a model that runs by programs: parameters as the plan stores them, buffers, random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.graph.ir import Capture
from shardwright.graph.tracing.trace import LossFunction
from shardwright.mesh.collectives import Communicator, all_gather
from shardwright.mesh.layout import Layout
from shardwright.mesh.redistribute import redistribute
from shardwright.plan.plan import Plan
from shardwright.run.programs.buckets import GradientReduction
from shardwright.run.programs.execute import StepArguments
from shardwright.run.programs.splitting import local_part, note_whole
from shardwright.torch_private import buffers_in
from shardwright.world.control import group_moving
from shardwright.world.ranks import alone


def agree_on_weights(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    if alone():
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not isinstance(tensor, DTensor):  # an earlier `parallelize` has agreed on those
                dist.broadcast(tensor.data, 0, group=group_moving(tensor.device))


def refuse_meta(model: nn.Module) -> None:
    """Raises `UsageError` where a parameter or buffer has no storage, and so no numbers to be verified with."""
    empty = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if empty:
        raise UsageError(
            f"{len(empty)} parameters and buffers are on the meta device ({', '.join(empty[:3])}, ...) and have no "
            "numbers that could be verified; call model.to_empty(device=...) and initialise them first"
        )


def layouts_by_name(plan: Plan) -> dict[str, Layout]:
    """How the plan stores each parameter that its step uses, by every name that it has in the model."""
    storage = {v.label: plan.leaves[v.name] for v in plan.capture.of_kind("parameter")}
    names = {**{name: name for name in storage}, **plan.capture.tied}
    return {name: storage[first] for name, first in names.items() if first in storage}


class ModelState:
    """The tensors of ``module``, whose parameters are stored as ``plan`` says, and what random numbers depend on.

    ``seed`` and ``step``, the training steps so far, fix the random numbers of a step, together with positions.
    """

    def __init__(self, module: nn.Module, plan: Plan, seed: int, device: torch.device) -> None:
        self.seed, self.step = seed, 0
        self.storage = {v.label: plan.leaves[v.name] for v in plan.capture.of_kind("parameter")}
        """How each parameter is stored, by its name in the model, tied ones by the first of their names."""
        self._module, self._plan, self._device = module, plan, device
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}
        note_whole(module, self)

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    @cached_property
    def _places(self) -> dict[str, tuple[dict[str, Tensor | None], nn.Module, str]]:
        """Where each buffer is looked up, by its name in the model."""
        return {
            f"{path}.{name}".lstrip("."): (buffers_in(module), module, name)
            for path, module in self._module.named_modules(remove_duplicate=False)
            for name in buffers_in(module)
        }

    def _buffer(self, name: str) -> Tensor:
        held, module, attribute = self._places[name]
        tensor: Tensor | None = held.get(attribute)
        return tensor if tensor is not None else getattr(module, attribute)

    def arguments(
        self,
        capture: Capture,
        function: LossFunction,
        inputs: Sequence[Tensor],
        step: int,
        reduction: GradientReduction,
    ) -> StepArguments:
        """What the program of ``capture``, which is that of ``function``, is called with in training step ``step``."""
        # Copies, since the backward may need what `store_buffers` overwrites.
        buffers = [
            self._buffer(v.label).clone() if v.name in capture.mutations else self._buffer(v.label)
            for v in capture.of_kind("buffer")
        ]
        parameters = [
            reduction.join(value.name, local_part(self._parameters[value.label]))
            for value in capture.of_kind("parameter")
        ]
        constants = [self._constant(capture, function, value.name) for value in capture.of_kind("constant")]
        return StepArguments(parameters, buffers, inputs, constants, self.seed, step)

    def _constant(self, capture: Capture, function: LossFunction, name: str) -> Tensor:
        """A tensor that the step reads beside its batch: where it still stands, what it holds now.

        Raises:
            UsageError: where something else stands there.
        """
        captured = capture.constants[name]
        place = capture.outside.get(name)
        if place is None:
            return self._on_device(captured)
        now = place.now(self._module, function)
        if not isinstance(now, Tensor) or (now.shape, now.dtype) != (captured.shape, captured.dtype):
            what = f"{now.dtype} {list(now.shape)}" if isinstance(now, Tensor) else f"{type(now).__name__}"
            raise UsageError(
                f"{place} was a tensor {captured.dtype} {list(captured.shape)} when the step was captured and is now "
                f"{what}; change its values in place, or pass it in the batch"
            )
        return now.detach().to(self._device, non_blocking=True)

    def _on_device(self, constant: Tensor) -> Tensor:
        """A tensor that never changes, brought to the device once: at each step it would be waited for."""
        if constant.device == self._device:
            return constant
        known = self._moved.get(id(constant))
        if known is None or known[0] is not constant:
            known = self._moved[id(constant)] = constant, constant.to(self._device)
        return known[1]

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
