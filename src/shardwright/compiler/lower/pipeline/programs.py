"""The program of a rank of a pipeline stage.

`microbatches` has the instructions of all stages. One of a single stage is left out of the programs of the others; what
depends on parameters alone, or on the batch alone, is done by every stage that reads it. What one stage makes and a
later one reads is sent from each stage to the next.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch

from shardwright.compiler.lower.call import COMM, DEVICE, Call, Name
from shardwright.compiler.lower.check import check_variables
from shardwright.compiler.lower.pipeline.microbatches import ONCE, Placed, Unrolled, cut_dim
from shardwright.compiler.lower.program import Instruction, LocalProgram, variables
from shardwright.compiler.mesh.mesh import MICROBATCHES, PIPELINE, Mesh
from shardwright.compiler.plan.plan import Plan
from shardwright.errors import LoweringError

_PIPE, _ANCHOR = Name("pipe"), Name("anchor")


def microbatches_of(plan: Plan, rank: int) -> list[int]:
    """Return the places of a rank on the mesh of a plan with stages, one for each microbatch."""
    assert plan.stages is not None
    at = plan.devices.coordinates(rank)
    inside = {name: place for name, place in at.items() if name != PIPELINE}
    if MICROBATCHES not in plan.mesh.sizes:
        return [plan.mesh.rank_at(inside)]
    return [plan.mesh.rank_at({**inside, MICROBATCHES: number}) for number in range(plan.stages.microbatches)]


def in_stages(programs: Sequence[LocalProgram], plan: Plan, rank: int) -> LocalProgram:
    """Return the program of a rank, of a plan with stages.

    Args:
        programs: those of all microbatches, for the places that `microbatches_of` gives, as the plan has them.

    Raises:
        LoweringError: where these differ in more than sizes and positions (a defect, to be reported).
    """
    first = programs[0]
    for other in programs[1:]:
        if [(i.kind, i.outputs, i.reads) for i in other.instructions] != [
            (i.kind, i.outputs, i.reads) for i in first.instructions
        ]:
            raise LoweringError("the programs of microbatches differ in more than sizes and positions")
    made = Unrolled(plan, programs)
    return _OfStage(plan, rank, made).program()


@dataclass
class _OfStage:
    """The program of one stage, of what all do."""

    plan: Plan
    rank: int
    made: Unrolled
    instructions: list[Instruction] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    @property
    def stage(self) -> int:
        return self.plan.devices.coordinates(self.rank)[PIPELINE]

    @cached_property
    def owners(self) -> Mapping[str, Placed]:
        """Return who makes each variable.

        Cached, as all of this class: what is made stays.
        """
        return {name: placed for placed in self.made.placed for name in placed.instruction.outputs}

    @cached_property
    def crossing(self) -> Mapping[tuple[int, tuple[int, int]], list[str]]:
        """Return what goes from a stage to the next one, by the stage and the group, as it is made."""
        last: dict[str, int] = {}
        for placed in self.made.placed:
            for name in placed.instruction.reads:
                if name in self.owners and not placed.stages <= self.owners[name].stages:
                    last[name] = max(last.get(name, 0), *placed.stages)
        found: dict[tuple[int, tuple[int, int]], list[str]] = {}
        for name, placed in self.owners.items():
            for stage in range(min(placed.stages), last.get(name, 0)):
                found.setdefault((stage, placed.group), []).append(name)
        return found

    def program(self) -> LocalProgram:
        first, made = self.made.first, self.made
        self._add(("pipe",), (), Call("stages.Pipe", (COMM, DEVICE)))
        whole = self._fetch()
        for group, together in groupby(made.placed, key=lambda each: each.group):
            self._receive(group)
            self.instructions += [placed.instruction for placed in together if self.stage in placed.stages]
            self._send(group)
        outputs = {name: self._output(name) for name in first.outputs if name != first.loss}
        if first.loss:
            outputs[first.loss] = self._loss()
        else:
            self._add((), ("pipe",), Call("stages.wait", (_PIPE,)))
        renamed = [self._reading_whole(each, whole) for each in self.instructions]
        program = dataclasses.replace(
            first,
            rank=self.rank,
            mesh=self.plan.devices,
            instructions=tuple(_in_blocks(renamed)),
            outputs=outputs,
            of_stages=self._groups(),
        )
        check_variables(program)
        return program

    def _add(self, outputs: tuple[str, ...], reads: tuple[str, ...], call: Call, unpacks: bool = False) -> None:
        self.instructions.append(Instruction("pipeline", outputs, reads, call, unpacks=unpacks))

    def _reading_whole(self, instruction: Instruction, whole: Mapping[str, str]) -> Instruction:
        """Return the instruction with parameters as `stages.fetch` gives them; that itself takes them as they are."""
        if instruction.call.function == "stages.fetch":
            return instruction
        for name in dict.fromkeys(instruction.reads):
            instruction = instruction.reading(name, whole[name]) if name in whole else instruction
        return instruction

    def _fetch(self) -> dict[str, str]:
        """Let the stages exchange parameters; return the names of the whole ones that this stage has then."""
        readers: dict[str, set[int]] = {name: set() for name in self.made.first.parameters}
        for placed in self.made.placed:
            for name in placed.instruction.reads:
                if name in readers:
                    readers[name] |= placed.stages
        for name in set(readers).intersection(self.made.first.outputs.values()):
            readers[name] |= set(range(self.plan.devices.sizes[PIPELINE]))
        facts = [self._parameter(name, sorted(of)) for name, of in readers.items()]
        mine = [name for name, of in readers.items() if self.stage in of]
        whole = {name: self.made.fresh(f"{name}_whole") for name in mine}
        call = Call("stages.fetch", (_PIPE, list(variables(readers)), facts))
        self._add(("anchor", *whole.values()), ("pipe", *readers), call, unpacks=True)
        return whole

    def _parameter(self, name: str, readers: list[int]) -> tuple[object, ...]:
        value, layout = self.plan.capture.values[name], self.plan.stored[name]
        dim = next((dim for dim, split in enumerate(layout.dims) if PIPELINE in split.axes), None)
        summed_in = value.reduced_in if value.reduced_in != value.dtype else None
        size = 0 if dim is None else value.shape[dim]
        return dim, size, tuple(readers), self.made.sums.get(name, ()), summed_in, value.needs_gradient

    def _facts(self, name: str) -> tuple[tuple[int, ...], torch.dtype, bool]:
        """The local shape, the dtype of a variable, and whether it has a gradient."""
        placed = self.owners[name]
        known = self.made.known[self.made.original(name, placed.number)]
        program = self.made.programs[max(placed.number, 0)]
        shape = known.layout.local_shape(known.value.shape, self.plan.mesh, program.rank)
        return shape, known.value.dtype, known.value.needs_gradient

    def _receive(self, group: tuple[int, int]) -> None:
        if names := self.crossing.get((self.stage - 1, group)):
            call = Call("stages.receive", (_PIPE, _ANCHOR, [self._facts(name) for name in names]))
            self.ends.append(self.made.fresh(f"came_{len(self.ends)}"))
            self._add((self.ends[-1], *names), ("pipe", "anchor"), call, unpacks=True)

    def _send(self, group: tuple[int, int]) -> None:
        if names := self.crossing.get((self.stage, group)):
            trained = [self._facts(name)[2] for name in names]
            call = Call("stages.send", (_PIPE, _ANCHOR, trained, *variables(names)))
            self.ends.append(self.made.fresh(f"sent_{len(self.ends)}"))
            self._add((self.ends[-1],), ("pipe", "anchor", *names), call)

    def _output(self, value: str) -> str:
        """Let all stages have an output; return its variable."""
        made = self.made
        variable = made.first.outputs[value]
        known = made.known[variable]
        names = [made.name_of(variable, number) for number in made.numbers(known.split)]
        owner = self.owners.get(names[0])
        here = owner is None or self.stage in owner.stages
        found = names[0]
        if len(names) > 1:
            found = made.fresh(f"{variable}_rows")
            if here:
                call = Call("stages.joined", (list(variables(names)), cut_dim(known.layout)))
                self._add((found,), tuple(names), call)
        if owner is None or not known.staged:
            return found
        told = made.fresh(f"{found}_told")
        layout, inside = self.plan.on_devices(known.layout), _inside(self.plan)
        shape = layout.local_shape(known.value.shape, inside, inside.rank_at(self._place(inside)))
        facts = min(owner.stages), shape, known.value.dtype
        self._add(
            (told,),
            ("pipe", *([found] if here else [])),
            Call("stages.told", (_PIPE, *facts, Name(found) if here else None)),
        )
        return told

    def _place(self, mesh: Mesh) -> dict[str, int]:
        at = self.plan.devices.coordinates(self.rank)
        return {name: at[name] for name in mesh.names}

    def _loss(self) -> str:
        made = self.made
        variable = made.first.outputs[made.first.loss]
        name, known = made.name_of(variable, ONCE), made.known[variable]
        owner = min(self.owners[name].stages) if name in self.owners else 0
        here = name not in self.owners or self.stage in self.owners[name].stages
        ends = ["anchor", *self.ends]
        facts = owner, (), known.value.dtype, Name(name) if here else None
        self._add(
            ("loss_of_all",),
            ("pipe", *([name] if here else []), *ends),
            Call("stages.finish", (_PIPE, *facts, list(variables(ends)))),
        )
        return "loss_of_all"

    def _groups(self) -> tuple[tuple[str, ...], ...]:
        """Return over which axes some stage communicates."""
        found = {(PIPELINE,)} | {(PIPELINE, *axes) for axes in self.made.sums.values()} | set(self.made.sums.values())
        for placed in self.made.placed:
            found |= {each.axes for _, _, each in placed.instruction.collectives(self.plan.devices)}
        return tuple(sorted(axes for axes in found if axes))


def _in_blocks(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return the instructions with what follows each other as one block: others may stand in between now."""
    found: list[Instruction] = []
    runs: Counter[str] = Counter()
    for block, run in groupby(instructions, key=lambda each: each.block):
        runs[block] += 1
        name = f"{block}, part {runs[block]}" if block and runs[block] > 1 else block
        found += [dataclasses.replace(each, block=name) for each in run]
    return found


def _inside(plan: Plan) -> Mesh:
    """Return the mesh of the ranks of one stage."""
    return Mesh(tuple(axis for axis in plan.devices.axes if axis.name != PIPELINE))
