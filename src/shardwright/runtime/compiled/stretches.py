"""The operators of a program that stand between two collectives, each run of them as one function.

What communicates, draws random numbers, or checks what a user gave it stays in the program as it is. The mask of a
dropout is drawn before the stretch that the dropout is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from shardwright.compiler.lower.call import DEVICE, Call, Name
from shardwright.compiler.lower.program import Instruction, LocalProgram, function_of, given_to, unused, variables

Chosen = Callable[[Instruction], bool]
"""Whether an instruction may be part of a stretch."""
_DROPOUTS = ("draws.dropout", "draws.native_dropout")
_FEWEST = 2  # operators: to call one that is compiled costs more than the operator


@dataclass(frozen=True)
class Stretch:
    """Instructions as one function of what they read and do not make, which gives what is read behind them."""

    function: str
    instructions: tuple[Instruction, ...]
    results: tuple[str, ...]

    @property
    def span(self) -> str:
        """The first and the last of the values that it makes, as the programs of all ranks call them."""
        return f"{self.instructions[0].outputs[0]} to {self.instructions[-1].outputs[-1]}"

    @property
    def call(self) -> Instruction:
        """What stands in the program in their place."""
        given = given_to(self.instructions)
        call = Call(self.function, variables(given))
        keeps = tuple(dict.fromkeys(name for instruction in self.instructions for name in instruction.keeps))
        return Instruction("stretch", self.results, given, call, block=self.instructions[0].block, keeps=keeps)

    @property
    def source(self) -> str:
        """The function."""
        return function_of(self.function, given_to(self.instructions), self.instructions, self.results)


def calls_torch(instruction: Instruction) -> bool:
    """Whether an instruction calls operators of torch's own alone, on what it reads and perhaps on a mask."""
    call = instruction.call
    return instruction.kind == "operator" and (call.calls_aten or call.function in _DROPOUTS)


def in_stretches(program: LocalProgram, chosen: Chosen = calls_torch) -> tuple[LocalProgram, list[Stretch]]:
    """The same program with functions in place of its stretches, and these."""
    last = program.last_reads()
    instructions: list[Instruction] = []
    stretches: list[Stretch] = []
    end = 0
    # Instructions that follow each other, all chosen or all not, and all of one block that the backward repeats.
    for (is_chosen, _), run in groupby(program.instructions, key=lambda one: (chosen(one), one.block)):
        members = list(run)
        end += len(members)
        if len(members) < _FEWEST or not is_chosen:
            instructions += members
            continue
        results = tuple(name for member in members for name in member.outputs if last[name] >= end)
        name = unused(f"compiled_{len(stretches) + 1}", program.names)
        masks, inside = _masks_before(members, program.names)
        stretches.append(Stretch(name, tuple(inside), results))
        instructions += [*masks, stretches[-1].call]
    return replace(program, instructions=tuple(instructions)), stretches


def _masks_before(members: Sequence[Instruction], taken: set[str]) -> tuple[list[Instruction], list[Instruction]]:
    """Instructions that draw the masks of the dropouts among the members, and the members, which read these.

    A number that changes with each step, as a key does, would be compiled anew.
    """
    masks, inside = list[Instruction](), list[Instruction]()
    for member in members:
        if member.call.function not in _DROPOUTS:
            inside.append(member)
            continue
        name = unused(f"kept_{member.outputs[0]}", taken)
        x, p, key, *place = member.call.args
        masks.append(
            Instruction("operator", (name,), (), Call("draws.kept", (p, key, *place, DEVICE)), block=member.block)
        )
        call = Call(member.call.function, (x, p, Name(name), *place))
        inside.append(replace(member, reads=(*member.reads, name), call=call))
    return masks, inside
