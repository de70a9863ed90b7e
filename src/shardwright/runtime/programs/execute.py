"""A local program bound to this rank, and the state of its model, of which each step takes its arguments.

The state is the parameters as the plan stores them, the buffers, and what random numbers depend on.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.common import torch_private
from shardwright.common.pulse import own_pulse
from shardwright.compiler.capture import operators
from shardwright.compiler.capture.capture import StepKind
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.capture.tracing.trace import LossFunction
from shardwright.compiler.lower.operators import draws, kernels, scheduled, stages
from shardwright.compiler.lower.operators.guard import Guard
from shardwright.compiler.lower.operators.randomness import mixed
from shardwright.compiler.lower.program import Instruction, LocalProgram
from shardwright.compiler.lower.recomputed import recomputed
from shardwright.compiler.mesh import collectives, together
from shardwright.compiler.mesh.collectives import Communicator, all_gather
from shardwright.compiler.mesh.dtensor import from_holders
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.redistribute import redistribute
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.rules.table import key_of
from shardwright.distributed.pending_numbers import PendingNumbers
from shardwright.errors import StrategyError, UsageError
from shardwright.runtime.compiled.compiler import Compiled, Compiler, calls_torch, in_stretches
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.failures import INDICES, explained, out_of_range
from shardwright.runtime.programs.inputs import shapes_of
from shardwright.runtime.programs.resharded import ReshardAfterForward
from shardwright.runtime.programs.sites import Sites
from shardwright.runtime.programs.splitting import local_part, note_whole

Outputs = tuple[Tensor | None, list[Tensor], list[Tensor]]
Pass = Literal["forward", "reduced", "deferred"]
"""A forward alone, one whose backward reduces the gradients, or one whose backward leaves them to a later one."""

_STEPS = (
    "all_gather", "local_slice", "reduce_scatter", "all_to_all", "all_reduce", "enter",
    "begin_all_gather", "reduced_late", "all_gather_together", "begin_all_gather_together",
)  # fmt: skip
_EVALUATIONS = 2**63  # the number of the first one, where no training comes
# What the source of a program may name.
_NAMES = {
    "torch": torch,
    "aten": torch.ops.aten,
    "draws": draws,
    "kernels": kernels,
    "ops": operators,
    "recomputed": recomputed,
    "scheduled": scheduled,
    "stages": stages,
    **{name: getattr(together if name.endswith("_together") else collectives, name) for name in _STEPS},
}


class StepArguments(NamedTuple):
    """The arguments of a program: this rank's parts in the program's order, and what fixes its random numbers.

    ``seed`` and ``step`` do that together with global positions. One is made at each step.
    """

    parameters: Sequence[Tensor]
    buffers: Sequence[Tensor]
    inputs: Sequence[Tensor]
    constants: Sequence[Tensor]
    seed: int
    step: int

    def key(self, number: int) -> int:
        """Return what the operator of that number draws its random numbers from in the step."""
        return mixed(mixed(mixed(self.seed) ^ self.step) ^ number)


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
        kind: StepKind,
        reduction: GradientReduction,
        step: int | None = None,
    ) -> StepArguments:
        """Return the arguments of the program of ``capture``, that of ``function``, for the next step of some kind.

        Args:
            step: another one than the next, in training.
        """
        if step is None:
            step = self.step if kind in ("training", "fine-tuning") else _EVALUATIONS + self.evaluations
        leaves = self._leaves_of(capture)
        buffers = _standing(leaves.buffers)
        for number in leaves.changed:  # `store_buffers` overwrites them, and the backward may read what they were
            buffers[number] = buffers[number].clone()
        parameters: Sequence[Tensor] = leaves.parameters
        if leaves.split or reduction.kept_over:
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
        """Keep the buffers that a step has made, if there are any."""
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
        if layout.held is not None:
            tensor, layout = from_holders(tensor), layout.without(layout.held[0])
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


def own_generator(device: torch.device) -> Tensor:
    """The state of the generator from which torch's own operators draw on a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _drew(program: LocalProgram) -> str:
    """Return what is said of a program that moved that generator: operators of others may draw without a word."""
    nodes = [instruction.node for instruction in program.instructions if instruction.node is not None]
    unknown = [f"{node.op}, at {node.source}" for node in nodes if key_of(node.op) is None]
    return (
        f"{'; or '.join(unknown) or 'an operator'}: draws random numbers from each device's own generator, so that "
        "ranks would disagree\nGive it its random numbers as a tensor, drawn by torch.rand or torch.randn in the loss "
        "function."
    )


def may_be_compiled(instruction: Instruction, device: torch.device) -> bool:
    """Return whether an instruction may be compiled on a device.

    What refuses a user's indices on a CPU does so at its own line. A GPU ends the process for them, compiled or not.
    """
    refuses = instruction.node is not None and INDICES.of(instruction.node.op) is not None
    return calls_torch(instruction) and (device.type == "cuda" or not refuses)


class Execution:
    """Run a local program: loss, auxiliary outputs and new buffers from this rank's parts.

    Tracebacks show the lines of the program, since they are what runs; messages those of the user, of whose step
    ``capture`` is the graph. ``runs`` counts how often it was called and how; a call with gradients is taken to be
    followed by one backward, in the same ``accumulate()`` or outside of it. A ``compiler`` compiles what stands between
    collectives.
    """

    def __init__(
        self,
        program: LocalProgram,
        capture: Capture,
        comm: Communicator,
        device: torch.device,
        reduction: GradientReduction,
        compiler: Compiler | None = None,
    ) -> None:
        self.program = program
        self._capture = capture
        self.runs: Counter[Pass] = Counter()
        self._comm = comm
        self._device = device
        self._reduction = reduction
        self._untried = program.mesh.size > 1
        self._reduce: Callable[..., Any] = reduction
        self._resharded = ReshardAfterForward()
        self._reshards = any(instruction.reshards for instruction in program.instructions)
        self._failed: PendingNumbers | None = None  # by how much checks of the last call have failed
        self._guard = Guard(on=device.type == "cuda")
        self._names = _NAMES | {"resharded": self._resharded, "later": reduction.later, "guard": self._guard}
        self._running = program
        self.compiled = None if compiler is None else self._compile(compiler)
        source, name = self._running.source, f"<program of rank {program.rank} {id(self):x}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), self._names)
        self._step: Callable[..., Outputs] = self._names["step"]
        self._tells_sites = False
        if own_pulse().watched:
            self.tell_sites()

    def tell_sites(self) -> None:
        """From now on tell the pulse for what each collective is."""
        if self._tells_sites:
            return
        self._tells_sites = True
        sites = Sites(self.program, self._running, self._step.__code__, own_pulse())
        self._names.update({name: sites.watched(self._names[name]) for name in _STEPS})
        self._names["kernels"] = sites.watched_members(kernels)
        self._reduce = sites.watched(self._reduction)
        self._names["later"] = sites.watched_later(self._reduction.later)

    def _compile(self, compiler: Compiler) -> Compiled:
        """Have the program call functions in place of its stretches, which are compiled when they are called."""
        self._running, stretches = in_stretches(self.program, lambda one: may_be_compiled(one, self._device))
        count = sum(instruction.kind == "operator" for instruction in self.program.instructions)
        compiled = compiler.compiled(stretches, count, shapes_of(self._capture), _NAMES | {"device": self._device})
        self._names |= compiled.functions
        return compiled

    def __call__(self, arguments: StepArguments) -> Outputs:
        """Run the forward, and count how it was run.

        Raises:
            UsageError: where an earlier call was given indices out of range, and a GPU has found out by now.
        """
        for operator, number in self._guard.known() if self._guard.on else ():
            raise UsageError(f"in an earlier step {out_of_range(self._capture, operator, number)}")
        before = own_generator(self._device) if self._untried else None
        try:
            with self._resharded.saving_shards() if self._reshards else nullcontext():
                outputs = self._step(*arguments[:4], self._comm, arguments.key, self._device, self._reduce)
        except Exception as error:
            told = explained(error, self._running, self._step.__code__, self._capture)
            if told is error:
                raise
            raise told from None
        if before is not None and not torch.equal(before, own_generator(self._device)):
            raise StrategyError(_drew(self.program))
        self._untried = False
        with_gradients: Pass = "deferred" if self._reduction.deferring else "reduced"
        self.runs[with_gradients if torch.is_grad_enabled() else "forward"] += 1
        if self.compiled is not None:
            self.compiled.tell()
        if self._capture.checks:
            loss, (*aux, counts), buffers = outputs
            outputs, self._failed = (loss, aux, buffers), PendingNumbers(counts)
        return outputs

    def raise_failed(self) -> None:
        """Raise what the model raises where a check has failed in the last call; a GPU is waited for.

        All ranks have the same counts, and ask together.
        """
        counts, self._failed = self._failed, None
        if counts is not None:
            for check, count in zip(self._capture.checks, counts.values(), strict=True):
                if count:
                    raise check.raised()

    def variables(self, arguments: StepArguments) -> dict[str, Any]:
        """Run the same forward one instruction at a time and keep every variable, under its name in the program."""
        program = self.program
        names = (*program.parameters, *program.buffers, *program.inputs, *program.constants)
        values: dict[str, Any] = dict(zip(names, chain(*arguments[:4]), strict=True))
        surroundings = {"comm": self._comm, "key": arguments.key, "device": self._device}
        scope = self._names | surroundings | {"reduce_gradients": self._reduction}
        for instruction in program.instructions:
            results = eval(instruction.call.source, scope, values)
            single = len(instruction.outputs) == 1 and not instruction.unpacks
            values.update(zip(instruction.outputs, [results] if single else results, strict=True))
        return values
