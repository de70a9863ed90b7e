"""Finds where a loss that is not finite came from: the first operator, and the rank on which it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.lower.program import Instruction, LocalProgram
from shardwright.distributed.agreement import from_all_ranks
from shardwright.runtime.model import Replay


@dataclass(frozen=True)
class Origin:
    """The first value that was not finite: of instruction ``position`` on ``rank``; -1 for what the step began with.

    ``what`` names it for people.
    """

    position: int
    rank: int
    what: str


def first_non_finite(replay: Replay, rank: int) -> Origin | None:
    """Looks at every value of the forward that this rank has run once more.

    All ranks call it together and get the same answer: the earliest in the program, and of equal ones that of the
    lowest rank. None where the loss is finite this time.
    """
    bad = {name: value for name, value in replay.values.items() if _is_bad(value)}
    mine = _origin(replay.capture, replay.program, bad, rank)
    origins = [origin for origin in from_all_ranks(mine) if origin is not None]
    return min(origins, key=lambda origin: (origin.position, origin.rank), default=None)


def _origin(capture: Capture, program: LocalProgram, bad: Mapping[str, Tensor], rank: int) -> Origin | None:
    """This rank's first value that is not finite, among those that reach the loss through such values.

    So the infinities of an attention mask are innocent. A NaN may be made of infinities, which then are its origin.
    """
    position = {name: i for i, instruction in enumerate(program.instructions) for name in instruction.outputs}

    def reads(name: str) -> list[str]:
        """The bad values that ``name`` was made from."""
        made_by = program.instructions[position[name]].reads if name in position else ()
        return [read for read in made_by if read in bad]

    waiting, guilty = [program.outputs[program.loss]], set()
    while waiting:
        name = waiting.pop()
        if name in bad and name not in guilty:
            guilty.add(name)
            waiting += reads(name)
    if not guilty:
        return None
    nans = [name for name in guilty if bad[name].isnan().any()]
    first = min(nans or guilty, key=lambda name: position.get(name, -1))
    while causes := reads(first):
        first = min(causes, key=lambda name: position.get(name, -1))
    if first in position:
        return Origin(position[first], rank, _operator(program.instructions[position[first]], bad[first]))
    leaf = capture.values[first]
    return Origin(-1, rank, f"{leaf.kind} {leaf.label}, {_how(bad[first])} before the step")


def _is_bad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())


def _operator(instruction: Instruction, value: Tensor) -> str:
    if instruction.node is None:
        names = ", ".join(moved.label for moved, _ in instruction.moves)
        return f"the redistribution of {names}, {_how(value)}"
    node = instruction.node
    return f"{node.op} in {node.scope or 'the loss function'} ({node.source}), {_how(value)}"


def _how(value: Tensor) -> str:
    nan, infinite = int(value.isnan().sum()), int(value.isinf().sum())
    counts = [f"{count} {kind}" for count, kind in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(counts)} of {value.numel()} entries"
