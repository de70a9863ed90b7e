"""What the backward of a program does in the same order on all ranks, whatever parts they hold.

What is gathered again, or computed again, communicates. It is not to wait for the first operator whose backward asks
for what it kept: an operator on an empty part keeps nothing. So it is done in the backward of a function through which
all passes that a stretch of the program makes, and which autograd therefore comes to before all of the stretch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.lower.program import LocalProgram
from shardwright.compiler.plan.plan import Plan


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, action: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.action = action
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # as they are they would be views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.action()
        return None, *gradients


def before_backward(action: Callable[[], None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the same tensors, such that a backward calls ``action`` before it comes to what made any of them."""
    flowing = [tensor for tensor in tensors if tensor.requires_grad]
    if not flowing or not torch.is_grad_enabled():
        return tuple(tensors)
    passed = iter(_Before.apply(action, *flowing))  # type: ignore[no-untyped-call]
    return tuple(next(passed) if tensor.requires_grad else tensor for tensor in tensors)


def note_gathered(program: LocalProgram, plan: Plan) -> LocalProgram:
    """Note with each operator what its backward needs of what is gathered again, by the table of operators.

    A block that is computed again needs all that it is given.
    """
    if not any(instruction.again for instruction in program.instructions):
        return program
    lies_in: dict[str, str] = {}  # variable -> the gathered one in whose memory it lies
    instructions = []
    for instruction in program.instructions:
        if instruction.notes_gathered:
            lies_in |= {name: name for name in instruction.outputs}
        elif instruction.block:
            kept = (lies_in[name] for name in instruction.reads if name in lies_in)
            instruction = dataclasses.replace(instruction, keeps=tuple(dict.fromkeys(kept)))
        elif instruction.node is not None:
            reads, name = instruction.reads, instruction.node.name
            saved = (reads[index] for index in plan.kept.saved[name].operands or ())
            kept = (lies_in[read] for read in saved if read in lies_in)
            if name in plan.kept.views and reads[0] in lies_in:
                lies_in |= dict.fromkeys(instruction.outputs, lies_in[reads[0]])
            instruction = dataclasses.replace(instruction, keeps=tuple(dict.fromkeys(kept)))
        instructions.append(instruction)
    return dataclasses.replace(program, instructions=tuple(instructions))
