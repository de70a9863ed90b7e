"""Passes over a local program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeVar

import torch

from shardwright.compiler.capture.ir import Value
from shardwright.compiler.lower.call import COMM, Call
from shardwright.compiler.lower.program import Instruction, LocalProgram, variables
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Step
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.joined import (
    EnteringParameter,
    SmallGather,
    entering_alike,
    in_buckets,
    in_gathers,
    in_repeated_gathers,
    repeated_gather,
    small_gather,
)
from shardwright.compiler.plan.pricing.memory import local_bytes
from shardwright.distributed.gradients import BUCKET_BYTES

T = TypeVar("T")
Moves = tuple[tuple[Value, Step], ...]


def join_buckets(
    program: LocalProgram, limit_bytes: int = BUCKET_BYTES, first_bytes: int = BUCKET_BYTES
) -> LocalProgram:
    """Join the gradient reductions of replicated parameters into buckets.

    Such a reduction is an ``enter`` step on a parameter: identity forward, all-reduce backward. Those over the same
    axes and of one dtype, in the order in which the backward comes to them, share one function with one flat
    all-reduce; large ones are reduced alone, as soon as they are there. A bucket stands where its first parameter is
    needed; its backward begins its reduction as soon as all its gradients are there, while the rest of the backward
    goes on to earlier layers. It is waited for in the backward of ``later``, with which the program begins: what is
    made first is what autograd comes to last. The bucket that the backward fills first has ``first_bytes`` at most.

    A single bucket behind which nothing is left of the backward is waited for at once, without ``later``.
    """
    parameters = set(program.parameters)
    entering = [
        instruction for instruction in program.instructions if instruction.enters and instruction.reads[0] in parameters
    ]
    if not entering:
        return program
    groups = in_buckets([_entering(instruction, program.mesh) for instruction in entering], limit_bytes, first_bytes)
    ends = len(groups) == 1 and not _trained_before(entering[0], program)
    buckets = {id(entering[members[0]]): _bucket([entering[i] for i in members], ends) for members in groups}
    joined = {id(instruction) for instruction in entering}
    instructions = [
        buckets.get(id(instruction), instruction)
        for instruction in program.instructions
        if id(instruction) in buckets or id(instruction) not in joined
    ]
    later = [] if ends else [_later([instruction for instruction in instructions if instruction.kind == "bucket"])]
    return dataclasses.replace(program, instructions=(*later, *_before_blocks(instructions)))


def _trained_before(first: Instruction, program: LocalProgram) -> bool:
    """Return whether something of which the backward makes gradients comes before an instruction."""
    before = program.instructions[: program.instructions.index(first)]
    return any(name in program.parameters for instruction in before for name in instruction.reads)


def _entering(instruction: Instruction, mesh: Mesh) -> EnteringParameter:
    [(value, step)] = instruction.moves
    return EnteringParameter(instruction.reads[0], local_bytes(value, step.after, mesh), entering_alike(value, step))


def _before_blocks(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Buckets, which read nothing but parameters, go before the blocks within which they stand: these run twice."""
    found: list[Instruction] = []
    inside: list[Instruction] = []  # the instructions of the block so far
    for instruction in instructions:
        if inside and instruction.block != inside[-1].block and instruction.kind != "bucket":
            found += inside
            inside = []
        (inside if instruction.block else found).append(instruction)
    return [*found, *inside]


def _bucket(members: Sequence[Instruction], ends: bool) -> Instruction:
    """The joined reductions; of parameters as ``later`` gives them unless the backward ``ends`` with this bucket."""
    outputs, parameters, moves = _joined(members)
    reads = parameters if ends else tuple(f"{output}_late" for output in outputs)
    named = tuple(zip(parameters, variables(reads), strict=True))
    [(value, step), *_] = moves
    call = Call("reduce_gradients", (COMM, step.axes, *_summed_in(value)), named)
    return Instruction("bucket", outputs, reads, call, moves=moves, unpacks=True)


def _summed_in(value: Value) -> tuple[torch.dtype, ...]:
    """The dtype in which the gradient of a parameter is summed, if that is not its own."""
    return (value.reduced_in,) if value.reduced_in not in (None, value.dtype) else ()


def _joined(members: Sequence[Instruction]) -> tuple[tuple[str, ...], tuple[str, ...], Moves]:
    """The outputs, the reads and the moves of instructions of one each."""
    outputs, reads = (tuple(getattr(member, which)[0] for member in members) for which in ("outputs", "reads"))
    return outputs, reads, tuple(member.moves[0] for member in members)


def _later(buckets: Sequence[Instruction]) -> Instruction:
    """The parameters of all buckets, with which the program begins."""
    reads = [tuple(value.name for value, _ in bucket.moves) for bucket in buckets]
    outputs = tuple(name for bucket in buckets for name in bucket.reads)
    return Instruction("later", outputs, sum(reads, ()), Call("later", tuple(map(variables, reads))), unpacks=True)


def join_running_statistics(program: LocalProgram) -> LocalProgram:
    """Move the sums of running statistics over ranks to the end of the program, as one collective.

    This is done for batch norms of which nothing else is shared: nothing in the step waits for these sums, and so no
    rank for another.
    """
    read = {name for instruction in program.instructions for name in instruction.reads}
    instructions = list(program.instructions)
    shares: dict[tuple[str, ...], list[str]] = {}  # by the axes that share them
    for at, instruction in enumerate(instructions):
        call, running = instruction.call, instruction.outputs[3:]
        alone = call.function != "kernels.batch_norm_per_replica" or not instruction.internal[0]
        if alone or instruction.block or read.intersection(running):
            continue
        *given, _, axes, counts = call.args
        instructions[at] = dataclasses.replace(
            instruction, call=Call("kernels.batch_norm_of_replica", (*given, counts), call.kwargs)
        )
        shares.setdefault(axes, []).extend(running)
    for axes, names in shares.items():
        call = Call("kernels.sum_in_place", (COMM, axes, *variables(names)))
        instructions.append(Instruction("in place", (), tuple(names), call))
    return dataclasses.replace(program, instructions=tuple(instructions))


def join_gathers(program: LocalProgram) -> LocalProgram:
    """Join all-gathers of parameters that are stored split.

    All parts are there before the program begins. Small parameters that are kept until the backward are gathered where
    the first one is needed, all that are over the same axes, of one dtype and one adjoint; their gradients are added up
    and scattered together when the backward has them all. Of parameters that the backward gathers again neighbours are,
    as many as take no more memory than the largest collective does.
    """
    small = _found(program, _small_gather)
    repeated = _found(program, _repeated_gather)
    largest = max((collective.bytes for _, _, collective in program.collectives()), default=0)
    between = _gathers_before(program, {id(instruction) for instruction, _ in (*small, *repeated)})
    kinds = [((kind, between[id(instruction)]), instruction.moves[0]) for instruction, kind in repeated]
    groups = [[small[i][0] for i in members] for members in in_gathers([gathered for _, gathered in small])]
    groups += [[repeated[i][0] for i in members] for members in in_repeated_gathers(kinds, program.mesh, largest)]
    joined = [members for members in groups if len(members) > 1]
    first = {id(members[0]): _gather_of(members) for members in joined}
    others = {id(member) for members in joined for member in members[1:]}
    instructions = [first.get(id(i), i) for i in program.instructions if id(i) not in others]
    return dataclasses.replace(program, instructions=tuple(instructions))


def _found(
    program: LocalProgram, kind_of: Callable[[Instruction, LocalProgram], T | None]
) -> list[tuple[Instruction, T]]:
    """The gathers of parameters which may be joined with others, and of what kind they are."""
    found = (
        (instruction, kind_of(instruction, program)) for instruction in program.instructions if not instruction.block
    )
    return [(instruction, kind) for instruction, kind in found if kind is not None]


def _gathers_before(program: LocalProgram, joining: Collection[int]) -> dict[int, int]:
    """Before each of these, by identity, how many gathers of parameters there are that cannot be joined."""
    found, count = {}, 0
    for instruction in program.instructions:
        if id(instruction) in joining:
            found[id(instruction)] = count
        elif any(step.kind == "all_gather" and value.kind == "parameter" for value, step in instruction.moves):
            count += 1
    return found


def _small_gather(instruction: Instruction, program: LocalProgram) -> SmallGather | None:
    if instruction.kind != "redistribution" or instruction.regathers or instruction.reads[0] not in program.parameters:
        return None
    return small_gather(*instruction.moves[0], program.mesh)


def _repeated_gather(instruction: Instruction, program: LocalProgram) -> Hashable | None:
    if not instruction.reshards or instruction.reads[0] not in program.parameters:
        return None
    return repeated_gather(*instruction.moves[0], program.mesh)


def _gather_of(members: Sequence[Instruction]) -> Instruction:
    outputs, reads, moves = _joined(members)
    axes, adjoint = moves[0][1].axes, moves[0][1].adjoint
    parts = []
    for part, (value, step) in zip(variables(reads), moves, strict=True):
        own = {name: given for name, given in step.arguments(value.shape).items() if name not in ("axes", "adjoint")}
        parts.append((part, own))
    summed = [("reduced_in", dtype) for dtype in _summed_in(moves[0][0]) if moves[0][1].sums_gradient]
    call = Call("all_gather_together", (COMM, axes, adjoint, *parts), tuple(summed))
    if members[0].regathers:
        call = Call("resharded.together", (call, tuple(value.label for value, _ in moves), COMM, axes, *parts))
    return Instruction("joined", outputs, reads, call, moves=moves, regathers=members[0].regathers)


def note_regathered(program: LocalProgram, plan: Plan) -> LocalProgram:
    """Note with each operator what its backward needs of what is gathered again, by the table of operators.

    A block that is computed again needs all that it is given.
    """
    if not any(instruction.regathers for instruction in program.instructions):
        return program
    lies_in: dict[str, str] = {}  # variable -> the gathered one in whose memory it lies
    instructions = []
    for instruction in program.instructions:
        if instruction.reshards:
            lies_in |= {name: name for name in instruction.outputs}
        elif instruction.block:
            kept = (lies_in[name] for name in instruction.reads if name in lies_in)
            instruction = dataclasses.replace(instruction, regathered=tuple(dict.fromkeys(kept)))
        elif instruction.node is not None:
            reads, name = instruction.reads, instruction.node.name
            saved = (reads[index] for index in plan.kept.saved[name].operands or ())
            kept = (lies_in[read] for read in saved if read in lies_in)
            if name in plan.kept.views and reads[0] in lies_in:
                lies_in |= dict.fromkeys(instruction.outputs, lies_in[reads[0]])
            instruction = dataclasses.replace(instruction, regathered=tuple(dict.fromkeys(kept)))
        instructions.append(instruction)
    return dataclasses.replace(program, instructions=tuple(instructions))
