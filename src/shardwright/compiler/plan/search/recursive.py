"""The search axis by axis: how the first axis is used is decided as if there were no other, then the next, given this.

What MindSpore's recursive programming does when it bisects its devices again and again. An operator has a handful of
choices at each axis, however many axes there are, so that the time grows with the number of axes and not with a power
of it. What is decided for an axis is the best for it alone, not for what follows: no bound comes with the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import numpy as np

from shardwright.compiler.mesh.layout import WHOLE, Layout, Split
from shardwright.compiler.plan.pricing.cost import Objective
from shardwright.compiler.plan.search.budget import Budget
from shardwright.compiler.plan.search.choices import Choice, Space
from shardwright.compiler.plan.search.exact import Indices
from shardwright.compiler.plan.search.problem import CostCache
from shardwright.compiler.plan.search.search import PreparedSearch, search
from shardwright.compiler.rules.notation import Strategy

NEAR = 2e-2
"""Prices of a byte that differ by a smaller share tell an axis nothing that it is worth to know."""
ROUGH = 1e-2
"""A gap that is worth no further price before the last axis, as what follows is not known there."""


def recursive(
    space: Space,
    objective: Objective,
    budget: Budget | None = None,
    below: float = math.inf,
    known: CostCache | None = None,
    built: PreparedSearch | None = None,
) -> Choice:
    """A choice that is the best at every axis, given what was decided for the axes before it.

    The axes to come divide what a device holds by no more than their size, so that at each of them the budget is that
    many times as large, and a byte costs as much as in the end: each costs that many times as much, too.

    Args:
        known: what other searches on this mesh have worked out for this objective.
        built: what searches of all choices of this space have built, of which the last axis is one of some.

    Raises:
        NothingBelow: where what is left to decide for the last axis has no choice that costs less than ``below``.
        OverBudget: where none that was found fits the budget.
        PlanError: where nothing is possible.
    """
    rules = space.graph.rules
    budget = budget and replace(budget, near=NEAR, alternatives=None)
    decided: Mapping[str, Strategy] = {node.name: rules[node.name].replicated() for node in space.graph.capture.nodes}
    choice = None
    for count in range(1, len(space.mesh.axes) + 1):
        to_come = space.mesh.extent(space.mesh.names[count:])
        within, to_beat = budget, below
        if to_come > 1:
            limit_bytes = budget.limit_bytes * to_come if budget else 0
            within = budget and replace(budget, limit_bytes=limit_bytes, once=False, close=ROUGH)
            to_beat = math.inf
        if to_come == 1 and within and built is not None:
            choice = built.among(_left(space, space.mesh.names[:-1], decided)).within(within, to_beat)
        else:
            choice = search(_along(space, space.mesh.names[:count], decided), objective, within, to_beat, known)
        decided = choice.strategies
    return replace(choice, bound=None) if choice else search(space, objective, budget)


def _along(space: Space, axes: Sequence[str], decided: Mapping[str, Strategy]) -> Space:
    """The choices that use these axes alone and split over all but the last of them as was decided."""
    now, before = frozenset(axes), frozenset(axes[:-1])
    alike: dict[tuple[int, Strategy], tuple[Strategy, ...]] = {}  # equal choices are one object, as searches want it
    strategies: dict[str, tuple[Strategy, ...]] = {}
    for node in space.graph.capture.nodes:
        key = id(space.strategies[node.name]), decided[node.name]
        if key not in alike:
            found = (_strategy(s, now) for s in space.strategies[node.name])
            alike[key] = tuple(dict.fromkeys(s for s in found if _strategy(s, before) == decided[node.name]))
        strategies[node.name] = alike[key]
    outputs = {name: _layout(layout, now) for name, layout in space.outputs.items()}
    return replace(space, strategies=strategies, leaves=_leaves(space, now), outputs=outputs)


def _left(space: Space, axes: Sequence[str], decided: Mapping[str, Strategy]) -> dict[str, Indices]:
    """Return which strategies of each operator split over these axes as was decided."""
    before = frozenset(axes)
    alike: dict[tuple[int, Strategy], Indices] = {}
    found = {}
    for node in space.graph.capture.nodes:
        strategies = space.strategies[node.name]
        key = id(strategies), decided[node.name]
        if key not in alike:
            alike[key] = np.array([i for i, s in enumerate(strategies) if _strategy(s, before) == decided[node.name]])
        found[node.name] = alike[key]
    return found


def _leaves(space: Space, axes: Set[str]) -> dict[str, Sequence[Layout]]:
    found: dict[str, Sequence[Layout]] = {}
    same: dict[tuple[Layout, ...], tuple[Layout, ...]] = {}
    for name, layouts in space.leaves.items():
        over = tuple(dict.fromkeys(_layout(layout, axes) for layout in layouts))
        found[name] = same.setdefault(over, over)
    return found


def _strategy(strategy: Strategy, axes: Set[str]) -> Strategy:
    return Strategy(tuple(_kept(of, axes) for of in strategy.axes), _kept(strategy.partial, axes))


def _layout(layout: Layout, axes: Set[str]) -> Layout:
    dims = tuple(Split(kept, dim.unit) if (kept := _kept(dim.axes, axes)) else WHOLE for dim in layout.dims)
    return Layout(dims, _kept(layout.partial, axes))


def _kept(of: Sequence[str], axes: Set[str]) -> tuple[str, ...]:
    return tuple(axis for axis in of if axis in axes)
