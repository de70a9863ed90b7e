"""The operators of a program that stand between two collectives, each run of them as one function.

What communicates, draws random numbers, or checks what a user gave it stays in the program as it is. The mask of a
dropout is drawn before the stretch that the dropout is in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from shardwright.compiler.lower.program import Instruction, LocalProgram, function_of, given_to, unused

Chosen = Callable[[Instruction], bool]
"""Whether an instruction may be part of a stretch."""
_DROPOUT = re.compile(r"(?P<call>draws\.(?:native_)?dropout\(\w+, )(?P<p>[^,]+), (?P<key>key\(\d+\)), (?P<place>.*)\)")
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
        text = f"{self.function}({', '.join(given)})"
        keeps = tuple(dict.fromkeys(name for instruction in self.instructions for name in instruction.keeps))
        return Instruction("stretch", self.results, given, text, block=self.instructions[0].block, keeps=keeps)

    @property
    def source(self) -> str:
        """The function."""
        return function_of(self.function, given_to(self.instructions), self.instructions, self.results)


def calls_torch(instruction: Instruction) -> bool:
    """Whether an instruction calls operators of torch's own alone, on what it reads and perhaps on a mask."""
    own = instruction.text.startswith("aten.") or _DROPOUT.fullmatch(instruction.text)
    return instruction.kind == "operator" and bool(own)


def in_stretches(program: LocalProgram, chosen: Chosen = calls_torch) -> tuple[LocalProgram, list[Stretch]]:
    """The same program with functions in place of its stretches, and these."""
    taken = {name for instruction in program.instructions for name in (*instruction.outputs, *instruction.reads)}
    last = program.last_reads()
    instructions: list[Instruction] = []
    stretches: list[Stretch] = []
    end = 0
    for members in _runs(program.instructions, chosen):
        end += len(members)
        if len(members) < _FEWEST or not chosen(members[0]):
            instructions += members
            continue
        results = tuple(name for member in members for name in member.outputs if last[name] >= end)
        name = unused(f"compiled_{len(stretches) + 1}", taken)
        masks, inside = _masks_before(members, taken)
        stretches.append(Stretch(name, tuple(inside), results))
        instructions += [*masks, stretches[-1].call]
    return replace(program, instructions=tuple(instructions)), stretches


def _masks_before(members: Sequence[Instruction], taken: set[str]) -> tuple[list[Instruction], list[Instruction]]:
    """Instructions that draw the masks of the dropouts among the members, and the members, which read these.

    A number that changes with each step, as a key does, would be compiled anew.
    """
    masks, inside = list[Instruction](), list[Instruction]()
    for member in members:
        if (found := _DROPOUT.fullmatch(member.text)) is None:
            inside.append(member)
            continue
        name = unused(f"kept_{member.outputs[0]}", taken)
        drawn = f"draws.kept({found['p']}, {found['key']}, {found['place']}, device)"
        masks.append(Instruction("operator", (name,), (), drawn, block=member.block))
        text = f"{found['call']}{found['p']}, {name}, {found['place']})"
        inside.append(replace(member, reads=(*member.reads, name), text=text))
    return masks, inside


def _runs(instructions: Sequence[Instruction], chosen: Chosen) -> Iterator[list[Instruction]]:
    """Instructions that follow each other, all chosen or all not, and all of one block that the backward repeats."""
    for _, run in groupby(instructions, key=lambda instruction: (chosen(instruction), instruction.block)):
        yield list(run)
