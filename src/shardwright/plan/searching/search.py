"""The search for a plan: first what costs, then what stands beside it.

Rotary tables, masks and position ids are read by every layer, and would tie all layers to each other. They have no
gradient, and whole on every rank they are in every layout by local slices. What makes them stands *beside* the rest: it
is left out at first, as if it cost nothing, and decided when the rest is. The first minimum, with what these operators
cost at least, is a lower bound of every plan's cost; how far the final cost is above it is the gap. Where there is one
and little stands in the way, all is decided at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cache, cached_property, partial

from shardwright.errors import PlanError
from shardwright.mesh.layout import Layout
from shardwright.plan.pricing.cost import Objective
from shardwright.plan.searching.budget import Budget, fitting
from shardwright.plan.searching.buffers import Buffers, buffers_of, by_buffers
from shardwright.plan.searching.exact import Table, TooWide, minimise
from shardwright.plan.searching.known import Known
from shardwright.plan.searching.narrow import ENOUGH, Minimum, NothingBelow, beside
from shardwright.plan.searching.problem import Problem, Solution
from shardwright.plan.searching.space import FEW_AXES, Choice, Space
from shardwright.plan.searching.weights import Weights
from shardwright.rules.notation import Strategy

# A value from the batch that one operator reads ties nothing together.
MANY_READERS = 2
# A gap that is worth no further round to a minimum that is one of several.
ENOUGH_AMONG = 1e-3
# A gap that is worth a search of all at once, where that needs no table of more entries; on more axes a larger one.
CLOSE, TIED, CLOSE_ON_MORE = 1e-6, 1_000_000, 1e-4


def search(space: Space, objective: Objective, budget: Budget | None = None, below: float = math.inf) -> Choice:
    """The choice with the least cost, of those that hold no more than ``budget`` where there is one.

    Args:
        below: what a plan costs that is known; the search ends where nothing costs less.

    Raises:
        NothingBelow: where no choice was found that costs less than ``below``.
        OverBudget: where none that was found fits the budget.
        PlanError: where the search would be too large, or nothing is possible.
    """
    both = _Both(space, objective)
    free = both.at(below=below)[0]
    if budget is None:
        return _all_at_once(both, free)
    free = _fitting_closer(both, free, budget)
    if free.bound is not None and free.bound >= below:
        raise NothingBelow(free.bound)
    # Neither is needed where the choice without a budget fits.
    weigh = cache(lambda: Weights(both.main, budget.optimizer))
    buffers = cache(lambda: buffers_of(both.main))

    def solve(price: float, below: float, *, alone: bool = False) -> tuple[list[Choice], float]:
        weights = weigh()
        above_bytes = weights.fixed_bytes - budget.limit_bytes
        tables = weights.at(price)

        def chosen(forbidding: Sequence[Table]) -> tuple[Choice, float, list[int]]:
            choice, total, picked = both.at(tables, forbidding, below=below - price * above_bytes, enough=ENOUGH_AMONG)
            again, recomputed = weights.again(price, picked), weights.recomputing.chosen(picked)
            return budget.settle(replace(choice, again=again, recomputed=recomputed)), total, picked

        with beside(price * above_bytes):
            choices, total = by_buffers(chosen, Buffers(()) if alone else buffers(), price)
        return choices, total + price * above_bytes

    return fitting(free, solve, budget, below)


def _fitting_closer(both: _Both, free: Choice, budget: Budget) -> Choice:
    """The choice that was found, settled; or one nearer to the minimum, where that fits the budget as this does."""
    settled = budget.settle(free)
    if budget.weigh(settled) > budget.limit_bytes:
        return settled
    closer = budget.settle(_all_at_once(both, free))
    if budget.weigh(closer) <= budget.limit_bytes:
        return closer
    return replace(settled, bound=max(settled.bound or 0.0, closer.bound or 0.0))


def _all_at_once(both: _Both, free: Choice) -> Choice:
    """The choice with the least cost, or the one that was found where its gap is worth nothing more."""
    if both.beside and (free.cost or 0.0) - (free.bound or 0.0) > both.close * (free.cost or 0.0):
        return both.together() or free
    return free


def least_cost(space: Space, objective: Objective) -> float:
    """A cost that no choice is below: what the operators cost at least, each by itself."""
    known, beside, rules = Known(space.graph, objective, space.mesh), operators_beside(space), space.graph.rules
    total = 0.0
    for node in space.graph.capture.nodes:
        least = float(known.operator(node, space.strategies[node.name]).min())
        if node.name in beside:
            least = min(least, objective.operator(space.graph, node, rules[node.name].replicated(), space.mesh))
        total += least
    return total


class _Both:
    """What is searched first, and what stands beside it."""

    def __init__(self, space: Space, objective: Objective) -> None:
        self._space, self.beside = space, operators_beside(space)
        self.close = CLOSE if len(space.mesh.axes) <= FEW_AXES else CLOSE_ON_MORE
        self._known = Known(space.graph, objective, space.mesh)
        self.main = self._first()

    def _first(self) -> Problem:
        names = {node.name for node in self._space.graph.capture.nodes}
        return Problem(self._space, self._known, names - self.beside)

    def at(
        self,
        more: Sequence[Table] = (),
        forbidding: Sequence[Table] = (),
        *,
        below: float = math.inf,
        enough: float = ENOUGH,
    ) -> tuple[Choice, float, list[int]]:
        """The choice with the least cost with ``more`` tables, a bound of that, and what was picked by variable.

        Raises:
            NothingBelow: where no choice was found that costs less than ``below``.
        """
        asked = partial(self._least_of, more=more, forbidding=forbidding, below=below, enough=enough)
        found = asked(self.main)
        bound, extra = found.bound, 0.0
        strategies, leaves = self.main.decided(found.picked)
        if self.beside:
            try:
                extra, of_beside, their_leaves = self._following(strategies, leaves)
            except TooWide:
                raise
            except PlanError:  # the rest demands partial sums, which what stands beside it cannot make
                found = asked(self._without_sums)
                strategies, leaves = self.main.decided(found.picked)
                extra, of_beside, their_leaves = self._following(strategies, leaves)
            strategies, leaves = strategies | of_beside, leaves | their_leaves
            bound += min(self._least, extra)
        cost = self.main.cost_of(found.picked) if more else found.cost
        return Choice(strategies, leaves, cost + extra, bound), bound, list(found.picked)

    def _least_of(
        self, problem: Problem, *, more: Sequence[Table], forbidding: Sequence[Table], below: float, enough: float
    ) -> Minimum:
        """The minimum of what is searched first; what stands beside it costs at least ``self._least`` more."""
        with beside(self._least):
            return problem.minimum(more, forbidding=forbidding, below=below - self._least, enough=enough)

    def together(self) -> Choice | None:
        """The choice with the least cost of all operators at once; None where they tie too much together for that."""
        problem = Problem(self._space, self._known, {node.name for node in self._space.graph.capture.nodes})
        try:
            cost, picked = minimise(problem.domains, problem.tables, limit=TIED)
        except PlanError:
            return None
        return Choice(*problem.decided(picked), cost, cost)

    def _following(self, strategies: Mapping[str, Strategy], leaves: Mapping[str, Layout]) -> Solution:
        return _beside(self.beside, self._space, self._known, strategies, leaves).solved()

    @cached_property
    def _without_sums(self) -> Problem:
        problem = self._first()
        problem.demand_no_sums(self.beside)
        return problem

    @cached_property
    def _least(self) -> float:
        """What the operators beside the rest cost at least."""
        graph, strategies = self._space.graph, self._space.strategies
        nodes = [node for node in graph.capture.nodes if node.name in self.beside]
        choices = ((node, [graph.rules[node.name].replicated(), *strategies[node.name]]) for node in nodes)
        return sum(float(self._known.operator(node, options).min()) for node, options in choices)


def _beside(
    beside: Set[str], space: Space, known: Known, decided: Mapping[str, Strategy], leaves: Mapping[str, Layout]
) -> Problem:
    """What is left to decide when all but the operators ``beside`` the rest is: these follow who reads them."""
    graph = space.graph
    nodes = graph.capture.nodes
    made = {name for node in nodes if node.name in beside for name in (*node.operands, *node.results)}
    readers = {use.node.name for name in made for use in graph.uses[name]} - beside
    strategies: dict[str, Sequence[Strategy]] = {name: (decided[name],) for name in readers}
    for name in beside:
        strategies[name] = tuple(dict.fromkeys([graph.rules[name].replicated(), *space.strategies[name]]))
    taken = {name for node in nodes if node.name not in beside for name in node.operands}
    free = {name: space.leaves[name] if name not in taken else (leaves[name],) for name in space.leaves if name in made}
    within = replace(space, strategies=strategies, leaves=free)
    return Problem(within, known, beside | readers, priced=beside, values=made)


def operators_beside(space: Space) -> frozenset[str]:
    """The names of the operators that compute, without a gradient, from nothing but numbers, buffers and inputs.

    Of those that are connected either all are beside the rest or none: none where they read an input that is split
    and make nothing that many read.
    """
    capture = space.graph.capture
    group: dict[str, set[str]] = {}  # value -> the operators that it is connected with
    for node in capture.nodes:
        made = [group.get(name) for name in node.operands]
        leaves = [capture.values[name] for name, of in zip(node.operands, made, strict=True) if of is None]
        fits = not space.graph.needs_gradient(node) and node.pin is None
        if fits and all(leaf.kind in ("input", "buffer", "constant") for leaf in leaves):
            joined = {node.name}.union(*(of for of in made if of is not None))
            names = [name for name, of in group.items() if of & joined]
            group.update(dict.fromkeys([*names, *node.results], joined))
    groups = {id(joined): joined for joined in group.values()}.values()
    return frozenset().union(*(joined for joined in groups if _stands_beside(joined, space)))


def _stands_beside(group: set[str], space: Space) -> bool:
    graph = space.graph
    nodes = [node for node in graph.capture.nodes if node.name in group]
    leaves = {name for node in nodes for name in node.operands if name in space.leaves}
    if all(layout.is_replicated for name in leaves for layout in space.leaves[name]):
        return True
    readers = ({use.node.name for use in graph.uses[name]} - group for node in nodes for name in node.results)
    return any(len(names) >= MANY_READERS for names in readers)
