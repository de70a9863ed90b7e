"""The program of a rank of a pipeline stage.

`microbatches` has the instructions of all stages. One of a single stage is left out of the programs of the others; what
depends on parameters alone, or on the batch alone, is done by every stage that reads it. What one stage makes and a
later one reads is sent from each stage to the next.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch

from shardwright.compiler.lower.call import COMM, DEVICE, Call, Name
from shardwright.compiler.lower.check import check_variables
from shardwright.compiler.lower.pipeline.microbatches import ONCE, Placed, Unrolled, cut_dim
from shardwright.compiler.lower.program import Instruction, LocalProgram, variables
from shardwright.compiler.mesh.mesh import PIPELINE, Mesh, Stages
from shardwright.compiler.plan.plan import Plan

PIPE, ANCHOR = Name("pipe"), Name("anchor")


@dataclass
class OfStage:
    """The program of a rank, of what all do: all microbatches forward, and the backward as autograd does it."""

    plan: Plan
    rank: int
    made: Unrolled
    instructions: list[Instruction] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)  # parameter -> the variable in which it is whole here
    # What other groups send to this one in the forward, or backward, in order; each the facts of some tensors.
    messages: dict[tuple[int, bool], list[list[tuple[tuple[int, ...], torch.dtype]]]] = field(default_factory=dict)

    @property
    def stages(self) -> Stages:
        assert self.plan.stages is not None
        return self.plan.stages

    @property
    def group(self) -> int:
        """The coordinate of the rank on the axis of stages."""
        return self.plan.devices.coordinates(self.rank)[PIPELINE]

    def own(self, stages: Collection[int]) -> list[int]:
        """Return those of some stages that are on this rank."""
        return sorted(stage for stage in stages if self.stages.group(stage) == self.group)

    @cached_property
    def owners(self) -> Mapping[str, Placed]:
        """Return who makes each variable.

        Cached, as all of this class: what is made stays.
        """
        return {name: placed for placed in self.made.placed for name in placed.instruction.outputs}

    @cached_property
    def crossing(self) -> Mapping[tuple[int, tuple[int, int]], list[str]]:
        """Return what goes from a stage to the next one, by the stage and by when it goes, as it is made."""
        last: dict[str, int] = {}
        for placed in self.made.placed:
            for name in placed.instruction.reads:
                if name in self.owners and not placed.stages <= self.owners[name].stages:
                    last[name] = max(last.get(name, 0), *placed.stages)
        found: dict[tuple[int, tuple[int, int]], list[str]] = {}
        for name, placed in self.owners.items():
            for stage in range(min(placed.stages), last.get(name, 0)):
                found.setdefault((stage, self.when(placed)), []).append(name)
        return found

    def when(self, placed: Placed) -> tuple[int, int]:
        """Return a key of what is done together."""
        return placed.group

    def program(self) -> LocalProgram:
        first = self.made.first
        self.add(("pipe",), (), Call("stages.Pipe", (COMM, DEVICE)))
        self._fetch()
        at = len(self.instructions)
        self.place()
        self.instructions[at:at] = [self._expect(*of, messages) for of, messages in self.messages.items()]
        outputs = {name: self._output(name) for name in first.outputs if name != first.loss}
        if first.loss:
            outputs[first.loss] = self._loss()
        else:
            self.add((), ("pipe",), Call("stages.wait", (PIPE,)))
        renamed = [self._reading_whole(each) for each in self.instructions]
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

    def place(self) -> None:
        """Add the instructions of this rank, and what it sends and receives."""
        for when, together in groupby(self.made.placed, key=self.when):
            self._receive(when)
            self.instructions += [placed.instruction for placed in together if self.group in placed.stages]
            self._send(when)

    def add(self, outputs: tuple[str, ...], reads: tuple[str, ...], call: Call, unpacks: bool = False) -> None:
        self.instructions.append(Instruction("pipeline", outputs, reads, call, unpacks=unpacks))

    def expects(self, names: Sequence[str], source: int, backward: bool = False) -> None:
        """Note that the next message of another group is made of these."""
        self.messages.setdefault((source, backward), []).append([self.facts(name)[:2] for name in names])

    def _expect(self, source: int, backward: bool, messages: Sequence[object]) -> Instruction:
        given = (("backward", True),) if backward else ()
        return Instruction("pipeline", (), ("pipe",), Call("stages.expect", (PIPE, source, list(messages)), given))

    def _reading_whole(self, instruction: Instruction) -> Instruction:
        """Return the instruction with parameters as `stages.fetch` gives them, but where it takes them as stored."""
        if instruction.call.function in ("stages.fetch", "scheduled.hand_out"):
            return instruction
        return reading(instruction, self.whole)

    def _fetch(self) -> None:
        """Let the stages exchange parameters; note the names of the whole ones that this rank has then."""
        readers: dict[str, set[int]] = {name: set() for name in self.made.first.parameters}
        for placed in self.made.placed:
            for name in placed.instruction.reads:
                if name in readers:
                    readers[name] |= {self.stages.group(stage) for stage in placed.stages}
        for name in set(readers).intersection(self.made.first.outputs.values()):
            readers[name] |= set(range(self.stages.count))
        facts = [self._parameter(name, sorted(of)) for name, of in readers.items()]
        mine = [name for name, of in readers.items() if self.group in of]
        self.whole = {name: self.made.fresh(f"{name}_whole") for name in mine}
        call = Call("stages.fetch", (PIPE, list(variables(readers)), facts))
        self.add(("anchor", *self.whole.values()), ("pipe", *readers), call, unpacks=True)

    def _parameter(self, name: str, readers: list[int]) -> tuple[object, ...]:
        value, layout = self.plan.capture.values[name], self.plan.stored[name]
        dim = next((dim for dim, split in enumerate(layout.dims) if PIPELINE in split.axes), None)
        summed_in = value.reduced_in if value.reduced_in != value.dtype else None
        here = layout.without(PIPELINE).local_shape(value.shape, self.plan.devices, self.rank)  # whole over the stages
        size, holder = (0, None) if dim is None else (here[dim], layout.dims[dim].holder)
        return dim, size, tuple(readers), self.made.sums.get(name, ()), summed_in, value.needs_gradient, holder

    def facts(self, name: str) -> tuple[tuple[int, ...], torch.dtype, bool]:
        """The local shape, the dtype of a variable, and whether it has a gradient."""
        placed = self.owners[name]
        known = self.made.known[self.made.original(name, placed.number)]
        program = self.made.programs[max(placed.number, 0)]
        shape = known.layout.local_shape(known.value.shape, self.plan.mesh, program.rank)
        return shape, known.value.dtype, known.value.needs_gradient

    def _receive(self, when: tuple[int, int]) -> None:
        if names := self.crossing.get((self.group - 1, when)):
            self.expects(names, self.group - 1)
            call = Call("stages.receive", (PIPE, ANCHOR, [self.facts(name) for name in names]))
            self.ends.append(self.made.fresh(f"came_{len(self.ends)}"))
            self.add((self.ends[-1], *names), ("pipe", "anchor"), call, unpacks=True)

    def _send(self, when: tuple[int, int]) -> None:
        if names := self.crossing.get((self.group, when)):
            trained = [self.facts(name)[2] for name in names]
            call = Call("stages.send", (PIPE, ANCHOR, trained, *variables(names)))
            self.ends.append(self.made.fresh(f"sent_{len(self.ends)}"))
            self.add((self.ends[-1],), ("pipe", "anchor", *names), call)

    def _output(self, value: str) -> str:
        """Let all stages have an output; return its variable."""
        made = self.made
        variable = made.first.outputs[value]
        known = made.known[variable]
        names = [made.name_of(variable, number) for number in made.numbers(known.split)]
        owner = self.owners.get(names[0])
        here = owner is None or bool(self.own(owner.stages))
        found = names[0]
        if len(names) > 1:
            found = made.fresh(f"{variable}_rows")
            if here:
                call = Call("stages.joined", (list(variables(names)), cut_dim(known.layout)))
                self.add((found,), tuple(names), call)
        if owner is None or not known.staged:
            return found
        everywhere = made.fresh(f"{found}_of_all")
        layout, inside = self.plan.on_devices(known.layout), _inside(self.plan)
        shape = layout.local_shape(known.value.shape, inside, inside.rank_at(self._place(inside)))
        facts = self.stages.group(min(owner.stages)), shape, known.value.dtype
        self.add(
            (everywhere,),
            ("pipe", *([found] if here else [])),
            Call("stages.broadcast", (PIPE, *facts, Name(found) if here else None)),
        )
        return everywhere

    def _place(self, mesh: Mesh) -> dict[str, int]:
        at = self.plan.devices.coordinates(self.rank)
        return {name: at[name] for name in mesh.names}

    def _loss(self) -> str:
        owner, name, dtype = self.of_loss()
        ends = ["anchor", *self.ends]
        facts = owner, (), dtype, None if name is None else Name(name)
        call = Call("stages.finish", (PIPE, *facts, list(variables(ends))))
        self.add(("loss_of_all",), ("pipe", *([name] if name is not None else []), *ends), call)
        return "loss_of_all"

    def of_loss(self) -> tuple[int, str | None, torch.dtype]:
        """Return on which group the loss is, its variable where it is this one, and its dtype."""
        made = self.made
        variable = made.first.outputs[made.first.loss]
        name, dtype = made.name_of(variable, ONCE), made.known[variable].value.dtype
        if name not in self.owners:
            return 0, name, dtype
        stages = self.owners[name].stages
        return self.stages.group(min(stages)), name if self.own(stages) else None, dtype

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


def reading(instruction: Instruction, names: Mapping[str, str]) -> Instruction:
    """Return an instruction with other variables in the places of those that it reads."""
    for name in dict.fromkeys(instruction.reads):
        instruction = instruction.reading(name, names[name]) if name in names else instruction
    return instruction


def _inside(plan: Plan) -> Mesh:
    """Return the mesh of the ranks of one stage."""
    return Mesh(tuple(axis for axis in plan.devices.axes if axis.name != PIPELINE))
