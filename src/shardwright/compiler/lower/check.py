"""Checks each local program before the passes and after those that move collectives."""

from __future__ import annotations

from collections import Counter

from shardwright.compiler.capture.ir import NAMES_OF_PROGRAMS
from shardwright.compiler.lower.program import LocalProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.errors import LoweringError


def check(program: LocalProgram, plan: Plan) -> None:
    """Every variable is written once, before it is read, and known to be read; the collectives are the plan's.

    What is begun, and what has its gradient late, is read once.

    Raises:
        LoweringError: naming the variable, or the collectives that differ.
    """
    written = check_variables(program)
    _check_read_once(program)
    missing = [value for value in plan.outputs if program.outputs.get(value) not in written]
    if missing:
        raise LoweringError(f"the outputs {missing} are never written")
    ours = Counter(program.collectives())
    planned = Counter((p.cause, p.direction, p.collective) for p in plan.collectives())
    if ours != planned:
        raise LoweringError(
            f"collectives differ; only planned: {planned - ours}; only in the program: {ours - planned}"
        )


def check_variables(program: LocalProgram) -> set[str]:
    """Check that every variable is written once, before it is read, and known to be read; return all of them.

    Raises:
        LoweringError: naming the variable.
    """
    written = {*program.parameters, *program.buffers, *program.inputs, *program.constants}
    for instruction in program.instructions:
        if unknown := instruction.call.names() - {*instruction.reads, *NAMES_OF_PROGRAMS}:
            raise LoweringError(f"{min(unknown)} is no variable that {instruction.call.source} is said to read")
        for name in instruction.reads:
            if name not in written:
                raise LoweringError(f"{name} is read before it is written, in {instruction.call.source}")
        for name in instruction.outputs:
            if name in written:
                raise LoweringError(f"{name} is written twice, the second time by {instruction.call.source}")
            written.add(name)
    return written


def _check_read_once(program: LocalProgram) -> None:
    """Check that one all-gather alone waits for each that is begun, and gives each that is late its gradient."""
    reads = Counter(name for instruction in program.instructions for name in instruction.reads)
    reads.update(program.outputs.values())
    for instruction in program.instructions:
        for name in instruction.outputs if instruction.kind in ("begin", "late") else ():
            if reads[name] != 1:
                raise LoweringError(f"{name} is to be read once, and is read {reads[name]} times")
