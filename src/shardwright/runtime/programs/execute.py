"""A local program, compiled and bound to this rank."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwright.common.pulse import own_pulse
from shardwright.compiler.capture import operators
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.lower.operators import draws, kernels, scheduled, stages
from shardwright.compiler.lower.operators.guard import Guard
from shardwright.compiler.lower.operators.randomness import mixed
from shardwright.compiler.lower.program import Instruction, LocalProgram
from shardwright.compiler.lower.recomputed import recomputed
from shardwright.compiler.mesh import collectives, together
from shardwright.compiler.mesh.collectives import Communicator
from shardwright.compiler.rules.table import key_of
from shardwright.distributed.on_its_way import OnItsWay
from shardwright.errors import StrategyError, UsageError
from shardwright.runtime.compiled.compiler import Compiled, Compiler, calls_torch, in_stretches
from shardwright.runtime.programs.buckets import GradientReduction
from shardwright.runtime.programs.failures import INDICES, explained, out_of_range
from shardwright.runtime.programs.inputs import shapes_of
from shardwright.runtime.programs.resharded import ReshardAfterForward
from shardwright.runtime.programs.sites import Sites

Outputs = tuple[Tensor | None, list[Tensor], list[Tensor]]
Pass = Literal["forward", "reduced", "deferred"]
"""A forward alone, one whose backward reduces the gradients, or one whose backward leaves them to a later one."""

_STEPS = (
    "all_gather", "local_slice", "reduce_scatter", "all_to_all", "all_reduce", "enter",
    "begin_all_gather", "reduced_late", "all_gather_together", "begin_all_gather_together",
)  # fmt: skip
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

    def leaves(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """All tensors that the program is called with, kind by kind."""
        return self.parameters, self.buffers, self.inputs, self.constants

    def keys(self) -> Callable[[int], int]:
        """Return what the operators of a step draw their random numbers from, by their number."""
        return lambda number: mixed(mixed(mixed(self.seed) ^ self.step) ^ number)


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
    """Runs a local program: loss, auxiliary outputs and new buffers from this rank's parts.

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
        self._failed: OnItsWay | None = None  # by how much checks of the last call have failed
        self._guard = Guard(on=device.type == "cuda")
        self._names = _NAMES | {"resharded": self._resharded, "later": reduction.later, "guard": self._guard}
        self._running = program
        self._compiled = None if compiler is None else self._compile(compiler)
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

    @property
    def left_out(self) -> str:
        """Return what the compiler has left out so far: ranks on which that differs would round values differently."""
        return "" if self._compiled is None else self._compiled.left_out

    def __call__(self, arguments: StepArguments) -> Outputs:
        """Run the forward, and count how it was run.

        Raises:
            UsageError: where an earlier call was given indices out of range, and a GPU has found out by now.
        """
        for operator, number in self._guard.known() if self._guard.on else ():
            raise UsageError(f"in an earlier step {out_of_range(self._capture, operator, number)}")
        before = own_generator(self._device) if self._untried else None
        try:
            with self._resharded.keeping_parts() if self._reshards else nullcontext():
                outputs = self._step(*arguments.leaves(), self._comm, arguments.keys(), self._device, self._reduce)
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
        if self._compiled is not None:
            self._compiled.tell()
        if self._capture.checks:
            loss, (*aux, counts), buffers = outputs
            outputs, self._failed = (loss, aux, buffers), OnItsWay(counts)
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
        values: dict[str, Any] = dict(zip(names, chain(*arguments.leaves()), strict=True))
        surroundings = {"comm": self._comm, "key": arguments.keys(), "device": self._device}
        scope = self._names | surroundings | {"reduce_gradients": self._reduction}
        for instruction in program.instructions:
            results = eval(instruction.call.source, scope, values)
            single = len(instruction.outputs) == 1 and not instruction.unpacks
            values.update(zip(instruction.outputs, [results] if single else results, strict=True))
        return values
