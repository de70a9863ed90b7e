"""A pass that has convolutions on a CPU take their operands with the channels last in memory.

Torch's convolutions otherwise bring each operand and each result into another order and back: with the channels last
they take some two thirds of the time, those of one channel or one place at a time a fifth and less. The values are the
same but for rounding. What is known to work in any order passes it on; all else, as views and collectives, is given
operands in the usual one. Most convolutions whose channels are no multiple of 16 stay as they are
(`kernels.may_come_last`).
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.lower.operators.kernels import may_come_last
from shardwright.compiler.lower.program import Instruction, LocalProgram, renamed, unused
from shardwright.compiler.rules.table import Column, column

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
_OPERANDS = re.compile(
    r"(aten\.conv2d\.\w+\(|kernels\.convolution_bias_elsewhere\('conv2d', )(?P<x>\w+), (?P<weight>\w+), "
)


def with_channels_last(program: LocalProgram, capture: Capture) -> LocalProgram:
    """The same program, in which images of float32 have their channels last between convolutions; the program itself
    where their order would change more often than there are convolutions."""
    convolutions = sum(_is_in(_CONVOLUTION, one) for one in program.instructions)
    if not convolutions:
        return program
    made = _Ordered(program, capture)
    changed = made.program()
    return changed if 0 < made.changes <= convolutions else program


class _Ordered:
    def __init__(self, program: LocalProgram, capture: Capture) -> None:
        self._program, self._capture = program, capture
        self._taken = {name for one in program.instructions for name in (*one.outputs, *one.reads)}
        self._last: set[str] = set()  # variables that may have their channels last
        self._usual: dict[tuple[str, str], str] = {}  # of such a variable and a block
        self._instructions: list[Instruction] = []
        self.changes = 0
        """How often something is brought into another order."""

    def program(self) -> LocalProgram:
        for instruction in self._program.instructions:
            self._instructions.append(self._given(instruction))
        outputs = {value: self._in_usual(name, "") for value, name in self._program.outputs.items()}
        return replace(self._program, instructions=tuple(self._instructions), outputs=outputs)

    def _given(self, instruction: Instruction) -> Instruction:
        """The instruction, reading what is in the order that it wants."""
        if self._gains(instruction):
            operands = _OPERANDS.match(instruction.text)
            if operands is not None:  # an empty part has none
                instruction = self._with_channels_last(instruction, operands["x"], operands["weight"])
            self._last.update(instruction.outputs)
        elif _is_in(_IN_ANY_ORDER, instruction):
            if self._last.intersection(instruction.reads):
                self._last.update(instruction.outputs[:1])
        else:
            for name in dict.fromkeys(instruction.reads):
                instruction = _reading(instruction, name, self._in_usual(name, instruction.block))
        return instruction

    def _gains(self, instruction: Instruction) -> bool:
        """Whether it is a convolution that does, as far as is known of all ranks together."""
        if instruction.node is None or not _is_in(_CONVOLUTION, instruction):
            return False
        x, weight, *_ = (self._capture.values[name] for name in instruction.node.operands)
        return len(x.shape) == 4 and x.dtype == torch.float32 and may_come_last(x.shape, weight.shape)

    def _with_channels_last(self, instruction: Instruction, x: str, weight: str) -> Instruction:
        self.changes += x not in self._last
        new = self._new(f"{x}_channels_last")
        text = f"kernels.channels_last({x}, {weight})"
        self._instructions.append(Instruction("operator", (new,), (x, weight), text, block=instruction.block))
        return _reading(instruction, x, new)

    def _in_usual(self, name: str, block: str) -> str:
        """The variable that has the values of another one in the usual order."""
        if name not in self._last:
            return name
        if (name, block) not in self._usual:
            self.changes += 1
            new = self._usual[name, block] = self._new(f"{name}_contiguous")
            self._instructions.append(Instruction("operator", (new,), (name,), f"{name}.contiguous()", block=block))
        return self._usual[name, block]

    def _new(self, name: str) -> str:
        new = unused(name, self._taken)
        self._taken.add(new)
        return new


def _reading(instruction: Instruction, name: str, new: str) -> Instruction:
    if new == name:
        return instruction
    reads = tuple(new if read == name else read for read in instruction.reads)
    return replace(instruction, reads=reads, text=renamed(instruction.text, name, new))


def _is_in(operators: Column[bool], instruction: Instruction) -> bool:
    """Of whichever kind its call is: on all ranks the same is done, so that replicas stay the same to the last bit."""
    return instruction.node is not None and operators.of(instruction.node.op) is not None
