"""The state of a model that runs by programs: parameters as the plan stores them, buffers, random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.common import torch_private
from shardwright.compiler.capture.capture import StepKind
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.capture.tracing.trace import LossFunction
from shardwright.compiler.mesh.collectives import Communicator, all_gather
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.redistribute import redistribute
from shardwright.compiler.plan.plan import Plan
from shardwright.distributed.control import group_moving
from shardwright.distributed.ranks import alone
from shardwright.errors import UsageError
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.execute import StepArguments
from shardwright.runtime.programs.splitting import local_part, note_whole

_EVALUATIONS = 2**63  # the number of the first one, where no training comes


def agree_on_weights(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not isinstance(tensor, DTensor):  # an earlier `parallelize` has agreed on those
            of_rank_zero(tensor)


def of_rank_zero(tensor: Tensor) -> Tensor:
    """Return the tensor with the values of rank 0."""
    if not alone():
        dist.broadcast(tensor.data, 0, group=group_moving(tensor.device))
    return tensor


def refuse_meta(model: nn.Module) -> None:
    """Raises `UsageError` where a parameter or buffer has no storage, and so no numbers to be verified with."""
    empty = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if empty:
        raise UsageError(
            f"{len(empty)} parameters and buffers are on the meta device ({', '.join(empty[:3])}, ...) and have no "
            "numbers that could be verified; call model.to_empty(device=...) and initialise them first"
        )


def layouts_by_name(plan: Plan) -> dict[str, Layout]:
    """Return how the plan stores each parameter that its step uses, by every name that it has in the model."""
    storage = {v.label: plan.stored[v.name] for v in plan.capture.of_kind("parameter")}
    names = {**{name: name for name in storage}, **plan.capture.tied}
    return {name: storage[first] for name, first in names.items() if first in storage}


_Place = tuple[dict[str, Tensor | None], nn.Module, str]
"""The place where a buffer is looked up: in the dictionary of its module, or as an attribute of that."""


def _standing(places: Sequence[_Place]) -> list[Tensor]:
    """Return what stands at each place now."""
    return [x if (x := held.get(name)) is not None else getattr(module, name) for held, module, name in places]


@dataclass(frozen=True, eq=False)
class _Leaves:
    """The parameters of a graph with their names there, and its buffers.

    ``untrained`` are the numbers of the parameters to which no gradient comes, though they require one, ``changed``
    those of the buffers that a step changes; ``mutated`` are these in the order of its mutations.
    """

    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    untrained: frozenset[int]
    buffers: Sequence[_Place]
    changed: Sequence[int]
    mutated: Sequence[_Place]
    constants: Sequence[str]

    @cached_property
    def split(self) -> bool:
        """Return whether parameters are DTensors."""
        return any(isinstance(parameter, DTensor) for parameter in self.parameters)


class ModelState:
    """The tensors of ``module``, whose parameters are stored as ``plan`` says, and what random numbers depend on.

    ``seed`` and ``step``, the training steps so far, fix the random numbers of a step, together with positions;
    ``seed`` and ``evaluations``, the evaluations and predictions so far that drew some, those of an evaluation.
    """

    def __init__(self, module: nn.Module, plan: Plan, seed: int, device: torch.device) -> None:
        self.seed, self.step, self.evaluations = seed, 0, 0
        self.storage = {v.label: plan.stored[v.name] for v in plan.capture.of_kind("parameter")}
        """The layout in which each parameter is stored, by its name in the model, or by the first of its names."""
        self._module, self._plan, self._device = module, plan, device
        # Cached by the constant, which is held, so that no other has its identity: it never changes. Those that may are
        # looked up by their places.
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}
        # Cached by the id of a capture, for as long as that lives.
        self._leaves: dict[int, _Leaves] = {}
        note_whole(module, self)

    def number(self, kind: StepKind) -> int:
        """Return what the random numbers of the next call depend on beside the seed: other numbers for evaluations."""
        return self.step if kind in ("training", "fine-tuning") else _EVALUATIONS + self.evaluations

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by all of their names.

        Cached: `Structure` refuses parameters that were replaced after sw.parallelize.
        """
        return dict(self._module.named_parameters(remove_duplicate=False))

    @cached_property
    def _places(self) -> dict[str, _Place]:
        """Return where each buffer is looked up, by its name in the model.

        Cached: `Structure` refuses modules that were replaced, and what stands at each place is looked up in each step.
        """
        return {
            f"{path}.{name}".lstrip("."): (torch_private.buffers_in(module), module, name)
            for path, module in self._module.named_modules(remove_duplicate=False)
            for name in torch_private.buffers_in(module)
        }

    def _leaves_of(self, capture: Capture) -> _Leaves:
        """Return where the leaves of a graph stand, looked up once: the parameters of a model stay the same objects."""
        known = self._leaves.get(id(capture))
        if known is None:
            buffers, values = capture.of_kind("buffer"), capture.of_kind("parameter")
            parameters = [self._parameters[value.label] for value in values]
            pairs = enumerate(zip(values, parameters, strict=True))
            known = self._leaves[id(capture)] = _Leaves(
                [value.name for value in values],
                parameters,
                frozenset(i for i, (value, each) in pairs if each.requires_grad and not value.needs_gradient),
                [self._places[value.label] for value in buffers],
                [number for number, value in enumerate(buffers) if value.name in capture.mutations],
                [self._places[capture.values[name].label] for name in capture.mutations],
                [value.name for value in capture.of_kind("constant")],
            )
            finalize(capture, _forget_leaves, ref(self), id(capture)).atexit = False
        return known

    def arguments(
        self,
        capture: Capture,
        function: LossFunction,
        inputs: Sequence[Tensor],
        step: int,
        reduction: GradientReduction,
    ) -> StepArguments:
        """Return the arguments of the program of ``capture``, that of ``function``; ``step`` is of `number`."""
        leaves = self._leaves_of(capture)
        buffers = _standing(leaves.buffers)
        for number in leaves.changed:  # `store_buffers` overwrites them, and the backward may read what they were
            buffers[number] = buffers[number].clone()
        parameters: Sequence[Tensor] = leaves.parameters
        if leaves.split or reduction.keeps:
            named = zip(leaves.names, leaves.parameters, strict=True)
            parameters = [
                local_part(parameter, differentiable=False)
                if number in leaves.untrained
                else reduction.join(name, local_part(parameter))
                for number, (name, parameter) in enumerate(named)
            ]
        elif leaves.untrained and torch.is_grad_enabled():
            parameters = [p.detach() if i in leaves.untrained else p for i, p in enumerate(leaves.parameters)]
        constants = [self._constant(capture, function, name) for name in leaves.constants]
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
        """Keep the buffers that a step has made."""
        with torch.no_grad():
            for buffer, made in zip(_standing(self._leaves_of(capture).mutated), new, strict=True):
                buffer.copy_(made)

    def whole(self, communicator: Communicator) -> dict[str, Any]:
        """The state of the model, every tensor whole on every rank; all ranks call it together."""
        return {name: self._gathered(name, tensor, communicator) for name, tensor in self._module.state_dict().items()}

    def _gathered(self, name: str, tensor: Any, communicator: Communicator) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor.detach() if isinstance(tensor, Tensor) else tensor  # what a module adds: get_extra_state
        shape, replicated = tuple(tensor.shape), Layout.replicated(tensor.ndim)
        layout = self.storage.get(self._plan.capture.tied.get(name, name), replicated)
        steps = redistribute(layout, replicated, (), shape, self._plan.devices)
        communicator.prepare(step.axes for step in steps)
        with torch.no_grad():
            whole = tensor.to_local()
            for step in steps:
                whole = all_gather(whole, communicator, **step.arguments(shape))
        return whole


def _forget_leaves(state: ref[ModelState], capture: int) -> None:
    if (found := state()) is not None:
        found._leaves.pop(capture, None)
