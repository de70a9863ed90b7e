"""What a search may choose, and what it chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.pricing.blocks import Block
from shardwright.compiler.plan.pricing.ruled import RuledGraph
from shardwright.compiler.rules.notation import Strategy

FEW_AXES = 2
"""On more axes tables are larger, and what is worth a search on few may not be."""


@dataclass(frozen=True)
class Space:
    """What may be chosen. ``leaves`` holds one layout for a leaf that is fixed, several for one that is free.

    ``blocks`` are those that the backward may compute again, in place of keeping what lies inside; those that are named
    by ``demanded`` it does.
    """

    graph: RuledGraph
    mesh: Mesh
    strategies: Mapping[str, Sequence[Strategy]]
    leaves: Mapping[str, Sequence[Layout]]
    outputs: Mapping[str, Layout]
    blocks: tuple[Block, ...] = ()
    demanded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Choice:
    """What was chosen and, where it was searched, the objective there and a bound that no choice is below.

    ``again`` names the values that the backward gathers again, so that no gathered copy of them is kept, and
    ``recomputed`` the blocks that it computes again. ``price`` is that of a byte at which it was found, where one was.
    """

    strategies: Mapping[str, Strategy]
    leaves: Mapping[str, Layout]
    cost: float | None = None
    bound: float | None = None
    again: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()
    price: float = 0.0
