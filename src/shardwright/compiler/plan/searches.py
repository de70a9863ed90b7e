"""The modes and the searches: what `parallelize`, the command line and configurations choose from.

A search is one row: what it minimises, and over which choices. To add one, name it in `SearchName` and give it a row;
what it needs beside, a cost or a choice of strategies, is a file of its own. This file imports no torch, for which
``shardwright --help`` would have to wait.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules.notation import OpRule, Strategy
from shardwright.errors import UsageError

if TYPE_CHECKING:
    from shardwright.compiler.plan.pricing.cost import Objective
    from shardwright.compiler.plan.pricing.hardware import Hardware
    from shardwright.compiler.plan.pricing.memory import OptimizerStates

MindSporeName = Literal["sharding_propagation", "recursive_programming", "dynamic_programming"]
SearchName = Literal["propagation", "recursive", "exact", MindSporeName]
MindSporeMode = Literal["stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel"]
Mode = Literal["single", "data", "semi-auto", "auto"]


@dataclass(frozen=True)
class Search:
    """One way to decide what is not pinned.

    Args:
        objective: what is minimised, on given hardware and for an optimizer.
        unit: in what that is counted, seconds or bytes.
        keeps: whether a strategy of an operator is among the choices.
        first_axes: on how many axes it plans at first, unless pins need more.
        most_axes: on how many axes it then looks for what costs less. Strategies grow with the power of the axes: 216
            for a linear layer on three, which take seconds where those on two take tenths of them.
        by_axes: whether one axis is decided after the other, each as the best for itself, or all together.
    """

    objective: Callable[[Hardware, OptimizerStates], Objective]
    unit: Literal["s", "B"]
    keeps: Callable[[Strategy, OpRule, Mesh], bool]
    first_axes: int
    most_axes: int
    by_axes: bool = False


@dataclass(frozen=True)
class ModeRow:
    """A mode: how much the planner decides.

    Args:
        search: the usual search; None where nothing is searched, and every operator follows the split of the batch.
        splits: whether there is anything to split at all.
        captured: whether the model must be captured; where not, torch's DistributedDataParallel can do as much.
    """

    search: SearchName | None
    splits: bool = True
    captured: bool = True


def _uses_every_axis(strategy: Strategy, rule: OpRule, mesh: Mesh) -> bool:
    """Return whether no axis is left that some factor would admit."""
    for axis in set(mesh.names) - strategy.used:
        for i in rule.splittable:
            if rule.divides(i, [*strategy.axes[i], axis], mesh):
                return False
    return True


def _everything(strategy: Strategy, rule: OpRule, mesh: Mesh) -> bool:
    return True


def _bytes(hardware: Hardware, optimizer: OptimizerStates) -> Objective:
    from shardwright.compiler.plan.pricing.cost import Bytes  # imports torch

    return Bytes()


def _seconds(hardware: Hardware, optimizer: OptimizerStates) -> Objective:
    from shardwright.compiler.plan.pricing.cost import Seconds  # imports torch

    return Seconds(hardware, optimizer)


_ROWS: Mapping[SearchName, Search] = {
    # The fewest bytes over choices that leave no device idle: as pins demand, and fast.
    "propagation": Search(_bytes, "B", _uses_every_axis, first_axes=3, most_axes=3),
    # Few seconds, found axis by axis: in a fraction of the time that all choices take.
    "recursive": Search(_seconds, "s", _everything, first_axes=3, most_axes=3, by_axes=True),
    # The least seconds over all choices.
    "exact": Search(_seconds, "s", _everything, first_axes=2, most_axes=3),
}

# MindSpore's names, and ours for the same.
MINDSPORE: Mapping[MindSporeName, SearchName] = {
    "sharding_propagation": "propagation",
    "recursive_programming": "recursive",
    "dynamic_programming": "exact",
}

SEARCHES: Mapping[SearchName, Search] = {**_ROWS, **{theirs: _ROWS[ours] for theirs, ours in MINDSPORE.items()}}

MODES: Mapping[Mode, ModeRow] = {
    "single": ModeRow(None, splits=False, captured=False),
    "data": ModeRow(None, captured=False),
    "semi-auto": ModeRow("propagation"),
    "auto": ModeRow("exact"),
}

# MindSpore's names of its parallel modes, and ours for the same.
MINDSPORE_MODES: Mapping[str, Mode] = {
    "stand_alone": "single",
    "data_parallel": "data",
    "semi_auto_parallel": "semi-auto",
    "auto_parallel": "auto",
}


def mode_called(name: str) -> Mode:
    """Return the mode of a name, which may be MindSpore's.

    >>> mode_called("semi_auto_parallel"), mode_called("auto")
    ('semi-auto', 'auto')

    Raises:
        UsageError: where there is none of that name, with those that are near.
    """
    named: Mapping[str, Mode] = {**{mode: mode for mode in MODES}, **MINDSPORE_MODES}
    if isinstance(name, str) and name in named:
        return named[name]
    near = difflib.get_close_matches(str(name).replace("_", "-"), MODES, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if name == "hybrid_parallel":
        hint = "; pin operators (pins=, sw.shard) with mode='semi-auto', which places the collectives between them"
    raise UsageError(f"mode={name!r} is unknown; choose one of {', '.join(map(repr, MODES))}{hint}")
