"""Passes over a local program."""

from __future__ import annotations

import dataclasses

from shardwright.lower.program import Instruction, LocalProgram
from shardwright.world.gradients import BUCKET_BYTES


def join_buckets(program: LocalProgram, limit_bytes: int = BUCKET_BYTES) -> LocalProgram:
    """Join the gradient reductions of replicated parameters into buckets.

    Such a reduction is an ``enter`` step on a parameter: identity forward, all-reduce backward. Those over the same
    axes and of one dtype, in the order in which the parameters are first used, share one function with one flat
    all-reduce. A bucket stands where its first parameter is needed; its backward runs as soon as all its
    gradients are there, while the rest of the backward goes on to earlier layers.
    """
    parameters = set(program.parameters)
    open_buckets: dict[tuple[object, ...], list[Instruction]] = {}
    members: dict[int, list[Instruction]] = {}  # id of the first member -> all members
    sizes: dict[tuple[object, ...], int] = {}
    for instruction in program.instructions:
        value, step = instruction.value, instruction.step
        if value is None or step is None or step.kind != "enter" or instruction.reads[0] not in parameters:
            continue
        key = (step.axes, value.dtype)
        # A parameter that enters twice, as to two layouts that differ in units alone, has no two places in a bucket.
        twice = any(member.reads == instruction.reads for member in open_buckets.get(key, ()))
        if key not in open_buckets or twice or sizes[key] + value.bytes > limit_bytes:
            open_buckets[key] = []
            members[id(instruction)] = open_buckets[key]
            sizes[key] = 0
        open_buckets[key].append(instruction)
        sizes[key] += value.bytes
    joined = {id(member) for bucket in members.values() for member in bucket}
    instructions: list[Instruction] = []
    for instruction in program.instructions:
        if id(instruction) in members:
            instructions.append(_bucket(members[id(instruction)]))
        elif id(instruction) not in joined:
            instructions.append(instruction)
    return dataclasses.replace(program, instructions=tuple(instructions))


def _bucket(members: list[Instruction]) -> Instruction:
    reads = tuple(member.reads[0] for member in members)
    pairs = tuple(pair for member in members for pair in member.steps())
    axes = pairs[0][1].axes
    return Instruction(
        "bucket",
        tuple(member.outputs[0] for member in members),
        reads,
        f"reduce_gradients(comm, {axes!r}, {', '.join(f'{name}={name}' for name in reads)})",
        bucket=pairs,
    )
