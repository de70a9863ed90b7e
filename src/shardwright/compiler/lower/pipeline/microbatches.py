"""The instructions of a program for all microbatches of a pipeline, from the programs of all without stages.

The plan's mesh has an axis of microbatches. Programs of all places on it differ in sizes and positions alone, so that
each instruction is looked at once:

- what depends on no microbatch is done once: casts of weights, tables of positions, and what follows from sums;
- what depends on one is done for each of them;
- an all-reduce over microbatches is a sum of what they have made, an all-gather their rows behind each other, and what
  follows waits for all of them: it is of a later *phase*.

A gradient that would be summed over microbatches adds up by itself, as all of them read one variable.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.compiler.capture.ir import Value
from shardwright.compiler.lower.call import COMM, Call, Name
from shardwright.compiler.lower.program import Instruction, LocalProgram, unused, variables
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import MICROBATCHES
from shardwright.compiler.mesh.redistribute import Step
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.rules.table import row_of
from shardwright.errors import LoweringError

ONCE = -1
"""In the place of a microbatch: what depends on none."""


@dataclass(frozen=True)
class Placed:
    """An instruction, with the stages that do it, the phase in which they do, and the microbatch for which, if any.

    It is ``staged`` where it depends on the batch and on parameters, of which one stage then does it.
    """

    instruction: Instruction
    stages: frozenset[int]
    phase: int
    number: int
    staged: bool

    @property
    def group(self) -> tuple[int, int]:
        """Return what is done together, in the order in which it is done."""
        return self.phase, self.number


@dataclass(frozen=True)
class _Variable:
    """A variable of the program without stages: of a value, laid out as ``layout``.

    ``staged`` says that it depends on the batch and on parameters, ``split`` that it differs between microbatches.
    ``both`` says of a cast of a parameter, or a view of that, that there is one and also one for each microbatch.
    """

    value: Value
    layout: Layout
    phase: int = 0
    split: bool = False
    staged: bool = False
    both: bool = False


class Unrolled:
    """The instructions of all microbatches and all stages, in order of execution."""

    def __init__(self, plan: Plan, programs: Sequence[LocalProgram]) -> None:
        assert plan.stages is not None
        self.plan, self.programs, self.first = plan, programs, programs[0]
        self.stage_of, self.count = plan.stages.of, len(programs)
        self.known: dict[str, _Variable] = {}
        self.sums: dict[str, tuple[str, ...]] = {}  # over which axes `fetch` sums the gradient of a parameter
        leaves = (*self.first.parameters, *self.first.buffers, *self.first.constants, *self.first.inputs)
        self._taken = {*self.first.names, *leaves}
        self._mark = _unused_mark(self._taken)
        self._sums_of: dict[str, str] = {}  # sum over microbatches -> the variable that it becomes
        self._same: dict[str, str] = {}  # variable -> the one in whose place it stands
        self._placed: list[Placed] = []
        self._staged: set[str] = set()  # variables that depend on the batch and on parameters
        for name in leaves:
            layout = plan.leaves[name]
            split = MICROBATCHES in layout.split_axes
            self.known[name] = _Variable(plan.capture.values[name], layout, split=split)
        for at in range(len(self.first.instructions)):
            self._note(at)
        self.doing = self._stages()
        self._rows_of_inputs()
        for at in range(len(self.first.instructions)):
            self._place(at)
        # Phases follow each other, and in each of them the microbatches do.
        self.placed = sorted(self._placed, key=lambda each: each.group)

    # What is known of each variable

    def _note(self, at: int) -> None:
        instruction = self.first.instructions[at]
        reads = [self.known[name] for name in instruction.reads]
        phase, split = max((x.phase for x in reads), default=0), any(x.split for x in reads)
        staged = any(x.staged for x in reads)
        if instruction.kind == "redistribution":
            [(value, step)] = instruction.moves
            if MICROBATCHES in step.axes:
                split = step.kind in ("slice", "reduce_scatter") or self._sums_each(instruction)
                phase += step.kind in ("all_reduce", "all_gather", "reduce_scatter")
            [name] = instruction.outputs
            self.known[name] = _Variable(value, step.after, phase, split, staged)
            return
        for name in instruction.outputs:
            if instruction.node is None:  # a cast that several share
                made = self.known[instruction.reads[0]]
                self.known[name] = dataclasses.replace(made, phase=phase, split=split, staged=staged)
                continue
            node = instruction.node
            split = split or MICROBATCHES in self.plan.strategies[node.name].used
            value, layout = self.plan.capture.values[name], self.plan.layout(name)
            self.known[name] = _Variable(
                value,
                layout,
                phase,
                split,
                node.name in self.stage_of,
                self._is_cast(instruction) or self._is_view(reads, value),
            )

    def _is_cast(self, instruction: Instruction) -> bool:
        """Return whether it casts a parameter to a dtype in which gradients of microbatches are not to be added up."""
        if self.count == 1 or instruction.node is None or not row_of(instruction.node.op).casts:
            return False
        made, cast = self.plan.capture.values[instruction.outputs[0]], self.known[instruction.reads[0]]
        return cast.value.kind == "parameter" and made.reduced_in not in (None, made.dtype) and made.needs_gradient

    def _is_view(self, reads: Sequence[_Variable], value: Value) -> bool:
        return len(reads) == 1 and reads[0].both and value.of_parameter

    def _sums_each(self, instruction: Instruction) -> bool:
        """Return whether the gradient of each microbatch is cast before they are added up: where a cast is given."""
        return instruction.enters and len(instruction.reads) > 1

    @cached_property
    def _readers(self) -> Mapping[str, list[int]]:
        """Return the places of the instructions that read each variable.

        Cached: the programs stay.
        """
        found: dict[str, list[int]] = {}
        for at, instruction in enumerate(self.first.instructions):
            for name in instruction.reads:
                found.setdefault(name, []).append(at)
        return found

    def _stages(self) -> list[frozenset[int]]:
        """Return which stages do each instruction, by its place."""
        assert self.plan.stages is not None
        everyone = frozenset(range(self.plan.stages.total))
        outputs = set(self.first.outputs.values())
        doing: list[frozenset[int]] = [frozenset()] * len(self.first.instructions)
        owner: dict[str, int] = {}  # of variables that one stage makes
        for instruction in self.first.instructions:
            if instruction.node is not None and instruction.node.name in self.stage_of:
                owner |= dict.fromkeys(instruction.outputs, self.stage_of[instruction.node.name])
            elif any(self.known[name].staged for name in instruction.outputs):
                owner |= dict.fromkeys(instruction.outputs, max(owner.get(name, 0) for name in instruction.reads))
        for at in reversed(range(len(self.first.instructions))):
            instruction = self.first.instructions[at]
            readers = frozenset[int]().union(
                *(doing[reader] for name in instruction.outputs for reader in self._readers.get(name, ()))
            )
            if instruction.node is not None and instruction.node.name in self.stage_of:
                doing[at] = frozenset([self.stage_of[instruction.node.name]])
            elif any(self.known[name].staged for name in instruction.outputs):
                doing[at] = frozenset([min(readers, default=owner[instruction.outputs[0]])])
            else:
                doing[at] = everyone if outputs.intersection(instruction.outputs) else readers
        return doing

    # The instructions

    def name_of(self, name: str, number: int) -> str:
        """Return the variable that stands for one, of a microbatch or of none."""
        name = self._same.get(name, name)
        known = self.known[name]
        return self._of_microbatch(name, number) if known.split or known.both else name

    def _of_microbatch(self, name: str, number: int) -> str:
        return f"{name}{self._mark}{number}" if self.count > 1 and number != ONCE else name

    def original(self, name: str, number: int) -> str:
        """Return the variable of the programs without stages for which one stands."""
        return self._sums_of.get(name, name.removesuffix(f"{self._mark}{number}"))

    def fresh(self, name: str) -> str:
        """Return that name for a variable, or one like it that none has."""
        return unused(name, self._taken)

    def numbers(self, split: bool) -> range:
        return range(self.count) if split and self.count > 1 else range(ONCE, 0)

    def _add(self, instruction: Instruction, stages: frozenset[int], phase: int, number: int) -> None:
        if stages:
            self._placed.append(Placed(instruction, stages, phase, number, self._is_staged(instruction)))

    def _is_staged(self, instruction: Instruction) -> bool:
        """Return whether what an instruction makes depends on the batch and on parameters, and note that."""
        of_stage = instruction.node is not None and instruction.node.name in self.stage_of
        if staged := of_stage or not self._staged.isdisjoint(instruction.reads):
            self._staged.update(instruction.outputs)
        return staged

    def _rows_of_inputs(self) -> None:
        """Take from the whole of each input the rows that this rank has of each microbatch."""
        assert self.plan.stages is not None
        for name in self.first.inputs:
            known = self.known[name]
            if not known.split or self.count == 1:
                continue
            stages = frozenset[int]().union(*(self.doing[at] for at in self._readers.get(name, ())))
            if name in self.first.outputs.values():
                stages = frozenset(range(self.plan.stages.total))
            dim = cut_dim(known.layout)
            for number in range(self.count):
                start, stop = self._bounds(known, dim, number)
                call = Call("stages.rows", (Name(name), dim, start, stop))
                made = Instruction("pipeline", (self.name_of(name, number),), (name,), call)
                self._add(made, stages, 0, number)

    def _bounds(self, known: _Variable, dim: int, number: int) -> tuple[int, int]:
        """The rows that this rank has of a microbatch."""
        place = self.plan.mesh.coordinates(self.programs[number].rank)
        return known.layout.dims[dim].bounds(known.value.shape[dim], self.plan.mesh, place)

    def _place(self, at: int) -> None:
        instruction = self.first.instructions[at]
        if instruction.kind == "redistribution" and MICROBATCHES in instruction.moves[0][1].axes:
            self._over_microbatches(at)
            return
        known = [self.known[name] for name in instruction.outputs]
        if self._is_summed_by_fetch(instruction):
            self._same[instruction.outputs[0]] = instruction.reads[0]
            self.sums[instruction.reads[0]] = instruction.moves[0][1].axes
            return
        split, phase = any(x.split for x in known), max(x.phase for x in known)
        if self._is_cast(instruction):
            self._cast_once(at)
            return
        numbers = range(ONCE, self.count) if any(x.both for x in known) else self.numbers(split)
        for number in numbers:
            self._add(self._of(at, number), self.doing[at], phase, number)

    def _cast_once(self, at: int) -> None:
        """Cast a parameter once, and let each microbatch give its gradient to the parameter in the dtype of that."""
        made = self._of(at, ONCE)
        [name], [source] = made.outputs, made.reads
        self._add(made, self.doing[at], 0, ONCE)
        for number in self.numbers(True):
            call = Call("enter", (Name(name), COMM), (("axes", ()), ("source", Name(source))))
            self._pipeline(at, self._of_microbatch(name, number), (name, source), call, number)

    def _of(self, at: int, number: int, rest: tuple[str, ...] | None = None, *, within: bool = False) -> Instruction:
        """Return the instruction for a microbatch, or done once.

        Args:
            rest: the axes that it is over, where that are others.
            within: whether it is over those within the rows of the microbatch.
        """
        found = self.programs[max(number, 0)].instructions[at]
        call = found.call
        if rest is not None:
            given = dict(call.kwargs) | {"axes": rest} | ({"within": (MICROBATCHES,)} if within else {})
            call = dataclasses.replace(call, kwargs=tuple(given.items()))
        changed = {name: self.name_of(name, number) for name in (*found.reads, *found.outputs)}
        call = call.renamed(lambda name: changed.get(name, name))
        if number > 0 and (whole := self._given_whole_gradients(found)):
            whole = {self.name_of(name, number) for name in whole}
            call = call.mapped(
                lambda arg: Call("stages.detached", (arg,)) if isinstance(arg, Name) and arg.text in whole else arg
            )
        if MICROBATCHES in self.plan.mesh.sizes:
            axes = tuple(self.plan.mesh.sizes.items())
            place = Call("stages.at", (COMM, axes, max(number, 0)))
            call = call.mapped(lambda arg: place if arg == COMM else arg)
        moves = tuple((self._value(value, step, number), _on_devices(step, rest)) for value, step in found.moves)
        return dataclasses.replace(
            found,
            outputs=tuple(changed[name] for name in found.outputs),
            reads=tuple(changed[name] for name in found.reads),
            call=call,
            moves=moves,
            block=self._block(at, number),
            recommunicates=found.recommunicates and number >= 0,
        )

    def _given_whole_gradients(self, instruction: Instruction) -> set[str]:
        """Return the variables of which each microbatch computes the whole gradient: one of them gives it.

        Such is the bias of a product that is summed over microbatches, which one of them adds.

        Raises:
            LoweringError: where an operator reads a variable so, and in another way, too.
        """
        node = instruction.node
        if node is None or MICROBATCHES not in self.plan.strategies[node.name].used:
            return set()
        whole, other = set[str](), set[str]()
        for index, name in enumerate(instruction.reads[: len(node.operands)]):
            target = self.plan.target(node, index)
            differs = MICROBATCHES in (*target.layout.split_axes, *target.layout.partial, *target.gradient_partial)
            (other if differs else whole).add(name)
        if both := whole & other:
            raise LoweringError(
                f"{node.op}, at {node.source}, reads {min(both)} in two ways that differ in its gradient"
            )
        return whole

    def _value(self, value: Value, step: Step, number: int) -> Value:
        """Return a value with the sizes that it has in a microbatch."""
        shape = list(value.shape)
        for dim, (before, after) in enumerate(zip(step.before.dims, step.after.dims, strict=True)):
            for split in (before, after):
                if MICROBATCHES in split.axes and number >= 0:
                    alone = Split((MICROBATCHES,), split.unit)
                    start, stop = alone.bounds(value.shape[dim], self.plan.mesh, {MICROBATCHES: number})
                    shape[dim] = stop - start
        return dataclasses.replace(value, shape=tuple(shape))

    def _is_summed_by_fetch(self, instruction: Instruction) -> bool:
        """Return whether a sum of a gradient is that of a parameter, which `stages.fetch` can make with others."""
        if not instruction.enters or len(instruction.reads) > 1:
            return False
        [name] = instruction.reads
        if self.known[name].value.kind != "parameter" or name in self.first.outputs.values():
            return False
        readers = [self.first.instructions[at] for at in self._readers[name]]
        sums = {_without_microbatches(each.moves[0][1].axes) if each.enters else None for each in readers}
        return len(sums) == 1 and None not in sums and all(len(each.reads) == 1 for each in readers)

    def _over_microbatches(self, at: int) -> None:
        """Place a step over microbatches: what communicates in it besides is done as it is."""
        instruction = self.first.instructions[at]
        [(_, step)], [name] = instruction.moves, instruction.outputs
        rest, stages = _without_microbatches(step.axes), self.doing[at]
        read, phase = instruction.reads[0], self.known[name].phase
        if step.kind in ("all_reduce", "reduce_scatter"):
            whole = self._total(at, self.fresh(f"{name}_sum") if rest or step.kind == "reduce_scatter" else name)
            self._sums_of[whole] = name
            if step.kind == "reduce_scatter":
                self._cut(at, whole)
            elif rest:
                self._add(_reading(self._of(at, ONCE, rest), whole), stages, phase, ONCE)
        elif step.kind == "slice":
            self._cut(at, self.name_of(read, ONCE))
        elif step.kind == "all_gather":
            self._join(at)
        elif self._sums_each(instruction):
            self._enter_each(at, rest)
        elif self._is_summed_by_fetch(instruction):
            self._same[name] = read
            self.sums[read] = rest
        elif rest:
            self._add(self._of(at, ONCE, rest), stages, phase, ONCE)
        else:
            self._same[name] = self._same.get(read, read)

    def _pipeline(self, at: int, made: str, reads: tuple[str, ...], call: Call, number: int = ONCE) -> None:
        phase, block = self.known[self.first.instructions[at].outputs[0]].phase, self._block(at, number)
        self._add(Instruction("pipeline", (made,), reads, call, block=block), self.doing[at], phase, number)

    def _block(self, at: int, number: int) -> str:
        """Return what an instruction is recomputed with, for a microbatch."""
        block = self.first.instructions[at].block
        return f"{block}, microbatch {number}" if block and number >= 0 else ""

    def _parts(self, name: str) -> tuple[str, ...]:
        """Return the variables of all microbatches that stand for one."""
        return tuple(self.name_of(name, number) for number in range(self.count))

    def _total(self, at: int, made: str) -> str:
        """Place the sum of what the microbatches have made; return its variable."""
        parts = self._parts(self.first.instructions[at].reads[0])
        self._pipeline(at, made, parts, Call("stages.total", (list(variables(parts)),)))
        return made

    def _join(self, at: int) -> None:
        """Place the rows of all microbatches as one, each gathered over other axes before."""
        instruction = self.first.instructions[at]
        [(_, step)], [name] = instruction.moves, instruction.outputs
        rest, parts = _without_microbatches(step.axes), self._parts(instruction.reads[0])
        if rest:
            phase = self.known[instruction.reads[0]].phase
            gathered = [
                dataclasses.replace(
                    self._of(at, number, rest, within=True), outputs=(f"{self._of_microbatch(name, number)}_gathered",)
                )
                for number in range(self.count)
            ]
            for number, each in enumerate(gathered):
                self._add(each, self.doing[at], phase, number)
            parts = tuple(each.outputs[0] for each in gathered)
        self._pipeline(at, name, parts, Call("stages.joined", (list(variables(parts)), step.dim)))

    def _cut(self, at: int, whole: str) -> None:
        """Place the rows of each microbatch of ``whole``, cut over other axes behind."""
        instruction = self.first.instructions[at]
        [(value, step)], [name] = instruction.moves, instruction.outputs
        assert step.dim is not None
        rest, split = _without_microbatches(step.axes), step.after.dims[step.dim]
        for number in self.numbers(True):
            place = {MICROBATCHES: number}
            start, stop = Split((MICROBATCHES,), split.unit).bounds(value.shape[step.dim], self.plan.mesh, place)
            made = self.name_of(name, number)
            rows = self.fresh(f"{made}_rows") if rest else made
            self._pipeline(at, rows, (whole,), Call("stages.rows", (Name(whole), step.dim, start, stop)), number)
            if rest:
                behind = _reading(self._of(at, number, rest, within=True), rows)
                self._add(behind, self.doing[at], self.known[name].phase, number)

    def _enter_each(self, at: int, rest: tuple[str, ...]) -> None:
        """Let each microbatch give its gradient of a cast to what was cast, which sums them over the other axes."""
        instruction, stages = self.first.instructions[at], self.doing[at]
        _, source = instruction.reads
        entered = self.name_of(source, ONCE)
        phase = self.known[instruction.outputs[0]].phase
        if rest:
            [(_, step)] = instruction.moves
            entered = self.fresh(f"{instruction.outputs[0]}_entered")
            self.known[entered] = dataclasses.replace(self.known[source], split=False, both=False)
            given = dict(instruction.call.kwargs)
            kwargs = tuple((name, given[name]) for name in ("reduced_in",) if name in given)
            call = Call("enter", (Name(self.name_of(source, ONCE)), COMM), (("axes", rest), *kwargs))
            moves = ((self.known[source].value, _on_devices(step, rest)),)
            reads = (self.name_of(source, ONCE),)
            self._add(Instruction("redistribution", (entered,), reads, call, moves=moves), stages, phase, ONCE)
        for number in self.numbers(True):
            made = self._of(at, number, ())
            old = self.name_of(source, number)
            made = dataclasses.replace(made.reading(old, entered), kind="pipeline", moves=())
            self._add(made, stages, phase, number)


def _unused_mark(names: Collection[str]) -> str:
    """Return what stands between a variable and the number of a microbatch, and in no other name before a number."""
    mark = "_m"
    while any(re.search(rf"{mark}\d", name) for name in names):
        mark += "m"
    return mark


def _reading(instruction: Instruction, name: str) -> Instruction:
    """Return an instruction that reads one variable, reading another one."""
    return instruction.reading(instruction.reads[0], name)


def cut_dim(layout: Layout) -> int:
    """Return the dim that is cut into microbatches."""
    return next(dim for dim, split in enumerate(layout.dims) if MICROBATCHES in split.axes)


def _without_microbatches(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != MICROBATCHES)


def _on_devices(step: Step, rest: tuple[str, ...] | None) -> Step:
    axes = step.axes if rest is None else rest
    return dataclasses.replace(
        step, axes=axes, before=step.before.without(MICROBATCHES), after=step.after.without(MICROBATCHES)
    )
