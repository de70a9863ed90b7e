"""Small sums over ranks that a step waits for, brought together: the mean of a loss is a sum and a count."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from shardwright.lower.program import Instruction, LocalProgram
from shardwright.mesh.mesh import Mesh
from shardwright.plan.plan import Plan
from shardwright.plan.pricing.memory import local_bytes

_SMALL_BYTES = 1024  # of a sum that may be joined with others


def sum_first(program: LocalProgram, plan: Plan) -> LocalProgram:
    """Sum what a linear operator takes in place of what it gives, where the program returns that alone.

    A sum over ranks that is divided by a count then need not wait for the count.
    """
    instructions = list(program.instructions)
    outputs = dict(program.outputs)
    for instruction in program.instructions:
        if not _is_small_sum(instruction, program.mesh):
            continue
        (total,), (part,) = instruction.outputs, instruction.reads
        maker = next((i for i in instructions if i.kind == "operator" and i.outputs == (part,)), None)
        operand = None if maker is None else _passed_through(maker, instruction, plan)
        readers = [i for i in instructions if {total, part} & {*i.reads} and i is not instruction]
        if maker is None or operand is None or readers or part in outputs.values():
            continue
        instructions.remove(instruction)
        at = instructions.index(maker)
        earlier = dataclasses.replace(instruction, reads=(operand,), text=_renamed(instruction.text, part, operand))
        reads = tuple(total if name == operand else name for name in maker.reads)
        after = dataclasses.replace(maker, reads=reads, text=_renamed(maker.text, operand, total))
        instructions[at : at + 1] = [earlier, after]
        outputs = {value: part if variable == total else variable for value, variable in outputs.items()}
    return dataclasses.replace(program, instructions=tuple(instructions), outputs=outputs)


def _passed_through(maker: Instruction, instruction: Instruction, plan: Plan) -> str | None:
    """The variable whose partial sums those of the result were, where it is as small and nothing else is trained."""
    node, [(value, step)] = maker.node, instruction.steps()
    if node is None:
        return None
    rule, values = plan.graph.rules[node.name], plan.capture.values
    if len(rule.linear_operands) != 1 or {*plan.strategies[node.name].partial} != {*step.axes}:
        return None
    [index] = rule.linear_operands
    taken, *others = [values[node.operands[index]], *(values[n] for i, n in enumerate(node.operands) if i != index)]
    alike = (taken.shape, taken.dtype) == (value.shape, value.dtype) and maker.reads.count(maker.reads[index]) == 1
    return maker.reads[index] if alike and not any(other.needs_gradient for other in others) else None


def _renamed(text: str, old: str, new: str) -> str:
    """A call with another variable in the place of one."""
    function, bracket, arguments = text.partition("(")
    return function + bracket + re.sub(rf"(?<![\w.']){re.escape(old)}(?![\w='])", new, arguments)


def join_sums(program: LocalProgram) -> LocalProgram:
    """Join small all-reduces over the same axes that are known when the first of them is needed.

    The mean of a loss is a sum and a count, each of which would be waited for.
    """
    written = {name: at for at, instruction in enumerate(program.instructions) for name in instruction.outputs}
    small = [at for at, instruction in enumerate(program.instructions) if _is_small_sum(instruction, program.mesh)]
    joined: dict[int, list[Instruction]] = {}
    taken: set[int] = set()
    for at in small:
        first = program.instructions[at]
        members = [
            other
            for other in small
            if other >= at
            and other not in taken
            and program.instructions[other].steps()[0][1].axes == first.steps()[0][1].axes
            and written.get(program.instructions[other].reads[0], -1) < at
        ]
        if at not in taken and len(members) > 1:
            joined[at] = [program.instructions[member] for member in members]
            taken |= {*members}
    instructions = [
        _sum_of(joined[at]) if at in joined else instruction
        for at, instruction in enumerate(program.instructions)
        if at in joined or at not in taken
    ]
    return dataclasses.replace(program, instructions=tuple(instructions))


def _is_small_sum(instruction: Instruction, mesh: Mesh) -> bool:
    value, step = instruction.value, instruction.step
    if value is None or step is None or step.kind != "all_reduce" or instruction.again:
        return False
    return mesh.extent(step.axes) > 1 and local_bytes(value, step.after, mesh) <= _SMALL_BYTES


def _sum_of(members: Sequence[Instruction]) -> Instruction:
    pairs = tuple(pair for member in members for pair in member.steps())
    outputs, reads = (tuple(getattr(member, name)[0] for member in members) for name in ("outputs", "reads"))
    text = f"all_reduce_together(comm, {pairs[0][1].axes!r}, {', '.join(reads)})"
    return Instruction("joined", outputs, reads, text, bucket=pairs)
