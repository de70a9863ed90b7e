"""A pass that has convolutions on a CPU take their operands with the channels last in memory.

Torch's convolutions otherwise bring each operand and each result into another order and back: with the channels last
they take some two thirds of the time, those of one channel or one place at a time a fifth and less. The values are the
same but for rounding. What is known to work in any order passes it on; all else, as views and collectives, is given
operands in the usual one.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from shardwright.graph.ir import Capture
from shardwright.lower.program import Instruction, LocalProgram, renamed, unused
from shardwright.rules.table import Column, column

_CONVOLUTION: Column[bool] = column(("conv2d", True))
# What these give depends on values and shapes alone, and lies as their first operand does.
_IN_ANY_ORDER: Column[bool] = column(
    (
        "_native_batch_norm_legit_functional shardwright.batch_norm_per_replica relu leaky_relu hardtanh hardswish "
        "hardsigmoid sigmoid silu gelu elu tanh add sub mul max_pool2d avg_pool2d adaptive_avg_pool2d "
        "upsample_nearest2d upsample_bilinear2d",
        True,
    )
)
_OPERAND = re.compile(r"(aten\.conv2d\.\w+\(|kernels\.convolution_bias_elsewhere\('conv2d', )(?P<x>\w+), ")
_LAST, _USUAL = "channels_last", "contiguous"
_CALLS = {_LAST: ".contiguous(memory_format=torch.channels_last)", _USUAL: ".contiguous()"}


def with_channels_last(program: LocalProgram, capture: Capture) -> LocalProgram:
    """The same program, in which images of float32 have their channels last between convolutions; the program itself
    where their order would change more often than there are convolutions."""
    made = _Ordered(program, capture)
    changed = made.program()
    convolutions = sum(_is_in(_CONVOLUTION, one) for one in program.instructions)
    return changed if 0 < made.changes <= convolutions else program


class _Ordered:
    def __init__(self, program: LocalProgram, capture: Capture) -> None:
        self._program, self._capture = program, capture
        self._taken = {name for one in program.instructions for name in (*one.outputs, *one.reads)}
        self._last: set[str] = set()  # variables that may have their channels last
        self._made: dict[tuple[str, str, str], str] = {}  # of a variable, an order and a block
        self._instructions: list[Instruction] = []

    @property
    def changes(self) -> int:
        """How often something is brought into another order."""
        return len(self._made)

    def program(self) -> LocalProgram:
        for instruction in self._program.instructions:
            self._instructions.append(self._given(instruction))
        outputs = {value: self._in(name, _USUAL, "") for value, name in self._program.outputs.items()}
        return replace(self._program, instructions=tuple(self._instructions), outputs=outputs)

    def _given(self, instruction: Instruction) -> Instruction:
        """The instruction, reading what is in the order that it wants."""
        if self._gains(instruction):
            if (operand := _OPERAND.match(instruction.text)) is not None:  # an empty part has none
                instruction = self._reading(instruction, operand["x"], _LAST)
            self._last.update(instruction.outputs)
        elif _is_in(_CONVOLUTION, instruction) or _is_in(_IN_ANY_ORDER, instruction):
            if self._last.intersection(instruction.reads):
                self._last.update(instruction.outputs[:1])
        else:
            for name in dict.fromkeys(instruction.reads):
                instruction = self._reading(instruction, name, _USUAL)
        return instruction

    def _gains(self, instruction: Instruction) -> bool:
        """Whether it is a convolution that does. Of one channel there is but one order, and other dtypes stay as they
        are."""
        if instruction.node is None or not _is_in(_CONVOLUTION, instruction):
            return False
        x = self._capture.values[instruction.node.operands[0]]
        return x.dtype == torch.float32 and len(x.shape) == 4 and x.shape[1] > 1

    def _reading(self, instruction: Instruction, name: str, order: str) -> Instruction:
        new = self._in(name, order, instruction.block)
        if new == name:
            return instruction
        reads = tuple(new if read == name else read for read in instruction.reads)
        return replace(instruction, reads=reads, text=renamed(instruction.text, name, new))

    def _in(self, name: str, order: str, block: str) -> str:
        """The variable that has the values of another one in that order."""
        if (name in self._last) == (order == _LAST):
            return name
        key = name, order, block
        if key not in self._made:
            new = self._made[key] = unused(f"{name}_{order}", self._taken)
            self._taken.add(new)
            made = Instruction("operator", (new,), (name,), f"{name}{_CALLS[order]}", block=block)
            self._instructions.append(made)
            self._last.update([new] if order == _LAST else [])
        return self._made[key]


def _is_in(operators: Column[bool], instruction: Instruction) -> bool:
    """Of whichever kind its call is: on all ranks the same is done, so that replicas stay the same to the last bit."""
    return instruction.node is not None and operators.of(instruction.node.op) is not None
