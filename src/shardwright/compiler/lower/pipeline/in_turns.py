"""The program of a rank that does forwards and backwards of microbatches in turns: 1F1B, interleaved or not.

What depends on no parameter or on no batch comes first, as a count of labels; then the actions of the schedule; last
what follows from all microbatches, as the loss, whose gradient for each of them is known before: see
`operators.scheduled`. `plan.pipeline.linear` says which losses are such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from shardwright.compiler.lower.call import Call, Name
from shardwright.compiler.lower.pipeline.microbatches import ONCE, Placed
from shardwright.compiler.lower.pipeline.programs import PIPE, OfStage, reading
from shardwright.compiler.lower.program import Instruction, variables
from shardwright.compiler.plan.pipeline.split_backward import with_split_backward
from shardwright.compiler.plan.pricing.schedule import schedule

_FIRST, _FORWARD, _LAST = range(3)


class InTurns(OfStage):
    """The program of a rank whose stages do forwards and backwards in turns."""

    @cached_property
    def _when(self) -> Mapping[int, tuple[int, int]]:
        """Return when each instruction is done, by its identity: first, in the forward of a microbatch, or last.

        Cached, as all of this class: what is made stays, and is held.
        """
        found: dict[int, tuple[int, int]] = {}
        behind, first = set[str](), set[str]()
        for at, placed in enumerate(self.made.placed):
            reads = placed.instruction.reads
            if placed.staged and (placed.number == ONCE or not behind.isdisjoint(reads)):
                found[at] = _LAST, ONCE
                behind.update(placed.instruction.outputs)
            elif placed.staged or placed.number != ONCE:
                found[at] = _FORWARD, placed.number
            else:
                found[at] = _FIRST, ONCE
                first.update(reads)
        for at in reversed(range(len(self.made.placed))):  # what the first read comes first, too
            placed = self.made.placed[at]
            if found[at][0] == _FORWARD and not first.isdisjoint(placed.instruction.outputs):
                found[at] = _FIRST, ONCE
                first.update(placed.instruction.reads)
        return {id(placed): found[at] for at, placed in enumerate(self.made.placed)}

    def when(self, placed: Placed) -> tuple[int, int]:
        return self._when[id(placed)]

    @cached_property
    def _loss_stage(self) -> int:
        """Return the stage whose last instructions give the loss.

        Cached: what is made stays.
        """
        variable = self.made.first.outputs[self.made.first.loss]
        return min(self.owners[self.made.name_of(variable, ONCE)].stages)

    @cached_property
    def _of_loss(self) -> list[Placed]:
        """Return the last instructions that the loss is made by.

        Cached: what is made stays.
        """
        needed = {self.made.name_of(self.made.first.outputs[self.made.first.loss], ONCE)}
        found = []
        for placed in reversed(self.made.placed):
            if self.when(placed)[0] == _LAST and not needed.isdisjoint(placed.instruction.outputs):
                needed.update(placed.instruction.reads)
                found.append(placed)
        return found[::-1]

    @cached_property
    def _parts(self) -> list[str]:
        """Return what microbatches give these instructions.

        Cached: what is made stays.
        """
        reads = dict.fromkeys(name for placed in self._of_loss for name in placed.instruction.reads)
        return [name for name in reads if name in self.owners and self.when(self.owners[name])[0] == _FORWARD]

    @property
    def _trains(self) -> bool:
        """Return whether there are backwards: without, as in an evaluation, any stage may give the loss a part."""
        loss = self.made.first.loss
        return bool(loss) and self.plan.capture.values[loss].needs_gradient

    def place(self) -> None:
        self._names: dict[int, dict[str, str]] = {stage: {} for stage in self.own(range(self.stages.total))}
        self._slopes: dict[str, str] = {}
        self._leaves: dict[str, str] = {}
        self.instructions += [each.instruction for each in self._mine() if self.when(each)[0] == _FIRST]
        if self._trains:
            self._cut()
        if self._trains and self._loss_stage in self._names:
            self._find_slopes()
        table = schedule(self.stages.schedule, self.stages.count, self.stages.microbatches, self.stages.total)
        for kind, stage, number in table[self.group]:
            if kind == "forward":
                self._forward(stage, (_FORWARD, number))
            elif self._trains and kind == "backward":
                self._backward(stage, (_FORWARD, number))
            elif self._trains:
                self.add((), ("pipe",), Call("scheduled.weights", (PIPE, (stage, number))))
        for stage in self._names:
            self._forward(stage, (_LAST, ONCE))

    def _mine(self) -> list[Placed]:
        return [placed for placed in self.made.placed if self.own(placed.stages)]

    def _stage_of(self, placed: Placed) -> int:
        """Return the first stage of this rank that does an instruction."""
        return self.own(placed.stages)[0]

    def _cut(self) -> None:
        """Cut off from autograd what is made first, or is a parameter, and is read later."""
        later = [each for each in self._mine() if self.when(each)[0] != _FIRST]
        reads = dict.fromkeys(name for placed in later for name in placed.instruction.reads)
        first = [each for each in self._mine() if self.when(each)[0] == _FIRST]
        firsts = {name for placed in first for name in placed.instruction.outputs}
        cut = [name for name in reads if (name in firsts or name in self.whole) and self._is_trained(name)]
        self._leaves = {name: self.made.fresh(f"{name}_leaf") for name in cut}
        if cut:
            call = Call("scheduled.leaves", (list(variables(cut)),))
            self.add(tuple(self._leaves.values()), tuple(cut), call, unpacks=True)

    def _is_trained(self, name: str) -> bool:
        number = self.owners[name].number if name in self.owners else ONCE
        return self.made.known[self.made.original(name, number)].value.needs_gradient

    def _find_slopes(self) -> None:
        """Add what finds the gradient of the loss for what each microbatch gives it, by the loss of zeros."""
        made = self.made
        zeros = {name: made.fresh(f"{name}_zero") for name in self._parts}
        facts = [self.facts(name)[:2] for name in self._parts]
        self.add(tuple(zeros.values()), ("pipe",), Call("scheduled.zeros", (PIPE, facts)), unpacks=True)
        names = dict(zeros)
        for placed in self._of_loss:
            names |= {name: made.fresh(f"{name}_of_zeros") for name in placed.instruction.outputs}
            self.instructions.append(_renamed(reading(placed.instruction, self._leaves), names))
        self._slopes = {name: made.fresh(f"{name}_slope") for name in self._parts}
        loss = names[made.name_of(made.first.outputs[made.first.loss], ONCE)]
        call = Call("scheduled.slopes", (Name(loss), list(variables(zeros.values()))))
        self.add(tuple(self._slopes.values()), (loss, *zeros.values()), call, unpacks=True)

    def _forward(self, stage: int, when: tuple[int, int]) -> None:
        names = self._names[stage]
        if came := self.crossing.get((stage - 1, when)):
            several = self.stages.each > 1  # stages of this rank may have it under its name
            names |= {name: self.made.fresh(f"{name}_at_{stage}") if several else name for name in came}
            facts = [self._facts_of(name, when) for name in came]
            before = self.stages.group(stage - 1)
            self.expects(came, before)
            call = Call("scheduled.receive", (PIPE, before, facts))
            self.add(tuple(names[name] for name in came), ("pipe",), call, unpacks=True)
        for placed in self._mine():
            if self.when(placed) == when and self._stage_of(placed) == stage:
                made = self._with_split_backward(placed, stage)
                self.instructions.append(reading(made, {**self._leaves, **names}))
        if sent := self.crossing.get((stage, when)):
            local = [names.get(name, name) for name in sent]
            call = Call("scheduled.send", (PIPE, self.stages.group(stage + 1), *variables(local)))
            self.add((), ("pipe", *local), call)

    def _with_split_backward(self, placed: Placed, stage: int) -> Instruction:
        """Return an instruction such that the schedule's actions for weights do the gradients of these."""
        instruction, call = placed.instruction, placed.instruction.call
        if instruction.node is None or instruction.node.name not in self._split or not self._trains:
            return instruction
        weights = {name for name in instruction.reads if self._is_weight(name, placed.number)}
        places = tuple(at for at, arg in enumerate(call.args) if isinstance(arg, Name) and arg.text in weights)
        function = Name(call.function.removeprefix("torch.ops."))
        args = (PIPE, (stage, placed.number), places, function, *call.args)
        return replace(
            instruction, reads=("pipe", *instruction.reads), call=Call("scheduled.product", args, call.kwargs)
        )

    def _is_weight(self, name: str, number: int) -> bool:
        known = self.made.known[self.made.original(name, number)]
        return known.value.needs_gradient and not known.staged

    @cached_property
    def _split(self) -> frozenset[str]:
        """Return the operators whose gradients of weights have actions of their own.

        Cached: the plan stays.
        """
        return with_split_backward(self.plan)

    def _facts_of(self, name: str, when: tuple[int, int]) -> tuple[object, ...]:
        shape, dtype, trained = self.facts(name)
        return shape, dtype, trained and when[0] == _FORWARD and self._trains

    def _backward(self, stage: int, when: tuple[int, int]) -> None:
        names = self._names[stage]
        own = self._parts if stage == self._loss_stage else []
        parts = [name for name in own if self.when(self.owners[name]) == when]
        sent, came = (self._crossing_back(of, when) for of in (stage, stage - 1))
        if not (parts or sent or came):
            return

        def local(of: Sequence[str]) -> list[str]:
            return [names.get(name, name) for name in of]

        slopes = [self._slopes[name] for name in parts]
        following = self.stages.group(stage + 1) if sent else None
        before = self.stages.group(stage - 1) if came else None
        if following is not None:
            self.expects(sent, following, backward=True)
        lists = [list(variables(of)) for of in (local(parts), slopes, local(sent), local(came))]
        call = Call("scheduled.backward", (PIPE, lists[0], lists[1], following, lists[2], before, lists[3]))
        self.add((), ("pipe", *local(parts), *slopes, *local(sent), *local(came)), call)

    def _crossing_back(self, stage: int, when: tuple[int, int]) -> list[str]:
        """Return what goes from a stage to the next one and has a gradient."""
        return [name for name in self.crossing.get((stage, when), []) if self.facts(name)[2]]

    def _loss(self) -> str:
        owner, name, dtype = self.of_loss()
        cut = {self.whole.get(of, of): leaf for of, leaf in self._leaves.items()}
        stored = self.made.first.parameters
        lists = ["anchor", *cut], [None, *variables(cut.values())], list(variables(stored))
        facts = owner, (), dtype, None if name is None else Name(name)
        call = Call("scheduled.hand_out", (PIPE, *facts, list(variables(lists[0])), *lists[1:]))
        reads = ("pipe", *([name] if name is not None else []), "anchor", *cut, *cut.values(), *stored)
        self.add(("loss_of_all",), reads, call)
        return "loss_of_all"


def _renamed(instruction: Instruction, names: Mapping[str, str]) -> Instruction:
    """Return an instruction with other variables, also in the places of those that it makes."""
    found = reading(instruction, names)
    return replace(found, outputs=tuple(names[name] for name in found.outputs), block="")
