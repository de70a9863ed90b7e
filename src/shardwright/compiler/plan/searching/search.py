"""The search for a plan: first what costs, then what stands beside it.

Rotary tables, masks and position ids are read by every layer, and would tie all layers to each other. They have no
gradient, and whole on every rank they are in every layout by local slices. What makes them stands *beside* the rest: it
is left out at first, as if it cost nothing, and decided when the rest is. The first minimum, with what these operators
cost at least, is a lower bound of every plan's cost; how far the final cost is above it is the gap. Where there is one
and little stands in the way, all is decided at once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from functools import cached_property, partial

from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.plan.minima.exact import TooWide, minimise
from shardwright.compiler.plan.minima.narrow import ENOUGH, NothingBelow, beside
from shardwright.compiler.plan.minima.tables import Indices, Minimum, Table
from shardwright.compiler.plan.pricing.cost import Objective
from shardwright.compiler.plan.pricing.optimizers import OptimizerStates
from shardwright.compiler.plan.pricing.ruled import RuledGraph
from shardwright.compiler.plan.searching.budget import Budget, Priced, fitting
from shardwright.compiler.plan.searching.buffers import WORTH, Buffers, Joined, buffers_of, by_buffers
from shardwright.compiler.plan.searching.dividing import Division, Part, Parts
from shardwright.compiler.plan.searching.known import Known
from shardwright.compiler.plan.searching.problem import Problem, Solution
from shardwright.compiler.plan.searching.space import FEW_AXES, Choice, Space
from shardwright.compiler.plan.searching.weights import Weights
from shardwright.compiler.rules.notation import Strategy
from shardwright.errors import PlanError

# A value from the batch that one operator reads ties nothing together.
MANY_READERS = 2
# A gap that is worth no further round to a minimum that is one of several.
ENOUGH_AMONG = 3e-3
# Gradients that are reduced together count from so much of the budget on.
WORTH_BYTES = 1e-3
# A gap that is worth a search of all at once, where that needs no table of more entries; on more axes a larger one.
CLOSE, TIED, CLOSE_ON_MORE = 1e-6, 1_000_000, 1e-4


def search(
    space: Space,
    objective: Objective,
    budget: Budget | None = None,
    below: float = math.inf,
    known: Known | None = None,
    built: Built | None = None,
) -> Choice:
    """The choice with the least cost, of those that hold no more than ``budget`` where there is one.

    Args:
        below: what a plan costs that is known; the search ends where nothing costs less.
        known: what other searches on this mesh have worked out for this objective.
        built: what other searches of this space, for this objective, have built.

    Raises:
        NothingBelow: where no choice was found that costs less than ``below``.
        OverBudget: where none that was found fits the budget.
        PlanError: where the search would be too large, or nothing is possible.
    """
    built = built or Built(space, objective, known)
    if budget is None:
        return _all_at_once(built.both, built.both.at(below=below)[0])
    return built.within(budget, below)


class Built:
    """What a search of a space is made of, each part when it is asked for first; other searches need the same."""

    def __init__(self, space: Space, objective: Objective, known: Known | None = None) -> None:
        self._space, self._objective, self._known = space, objective, known
        self._weights: dict[OptimizerStates, Weights] = {}  # Cached by a frozen value; the space stays the same

    @cached_property
    def both(self) -> _Both:
        """What is searched first, and what stands beside it.

        Cached, as all of this class: the space and the objective are frozen, and `among` makes another.
        """
        return _Both(self._space, self._objective, self._known)

    def weights(self, optimizer: OptimizerStates) -> Weights:
        """What choices hold, by the optimizer."""
        if optimizer not in self._weights:
            self._weights[optimizer] = Weights(self.both.main, optimizer)
        return self._weights[optimizer]

    @cached_property
    def buffers(self) -> Buffers:
        """The largest buffers of collectives."""
        return buffers_of(self.both.main)

    @cached_property
    def joined(self) -> Joined:
        """What is held together of gradients and of small parameters."""
        return Joined(self.both.main)

    def among(self, left: Mapping[str, Indices]) -> Built:
        """The same for some strategies of operators alone, by their names."""
        found = copy(self)  # what is held depends on the variables and the spaces, which stay the same
        found.__dict__["both"] = self.both.among(left)
        return found

    def within(self, budget: Budget, below: float) -> Choice:
        """The choice with the least cost of those that hold no more than ``budget``."""
        main = self.both.main

        def free() -> Choice:
            found = _free(self.both, budget, below)
            if found.bound is not None and found.bound >= below:
                raise NothingBelow(found.bound)
            return found

        def solve(
            price: float, below: float, *, alone: bool = False, forbidding: Sequence[Table] = ()
        ) -> tuple[list[Choice], float, float]:
            return _Solving(self, budget, price, alone, forbidding).found(below)

        def closer(best: Choice, found: Sequence[Priced], price: float) -> Choice:
            best = budget.beside(best) if budget.beside else best
            parts = Parts(best, solve, budget, Division(main, self.weights(budget.optimizer)), below)
            return parts.divided(Part((), list(found), best.bound or 0.0, price))

        return fitting(free, solve, budget, below, closer if budget.beside else None)


class _Solving:
    """What is asked at a price of a byte, by what a search is made of (`budget.Solve`)."""

    def __init__(self, built: Built, budget: Budget, price: float, alone: bool, forbidding: Sequence[Table]) -> None:
        self._built, self._budget, self._price, self._alone, self._forbidding = built, budget, price, alone, forbidding
        self._weights = built.weights(budget.optimizer)
        self._above_bytes = self._weights.fixed_bytes - budget.limit_bytes
        self._tables = self._weights.at(price)
        self._worth = max(WORTH, 2 * budget.close)  # what smaller buffers may save beside the gap that may be left

    def found(self, below: float) -> tuple[list[Choice], float, float]:
        """The choices that were found, a bound, and by how many bytes the first is above the budget."""
        built, price, weights = self._built, self._price, self._weights
        chosen = partial(self._chosen, below - price * self._above_bytes)
        with beside(price * self._above_bytes):
            found, total = by_buffers(chosen, Buffers(()) if self._alone else built.buffers, price, self._worth)
            picked = found[0][1]
            group, size = built.joined.largest(picked)
            if not self._alone and size > max(WORTH_BYTES * self._budget.limit_bytes, built.buffers.of(picked)):
                one, with_joined, _ = chosen((), built.joined.at(group, price))
                found, total = [one, *found], max(total, with_joined)
        choice, picked = found[0]
        largest = 0.0 if self._alone else max(built.buffers.of(picked), built.joined.largest(picked)[1])
        above = weights.of(picked, choice.again) + largest - self._budget.limit_bytes
        return [choice for choice, _ in found], total + price * self._above_bytes, above

    def _chosen(
        self, to_beat: float, beside_these: Sequence[Table], more: Sequence[Table] = ()
    ) -> tuple[tuple[Choice, list[int]], float, list[int]]:
        out = [*self._forbidding, *beside_these]
        choice, total, picked = self._built.both.at([*self._tables, *more], out, below=to_beat, enough=ENOUGH_AMONG)
        if total >= to_beat:
            raise NothingBelow(total)
        again, recomputed = self._weights.again(self._price, picked), self._weights.recomputing.chosen(picked)
        choice = self._budget.settle(replace(choice, again=again, recomputed=recomputed))
        return (choice, picked), total, picked


def _free(both: _Both, budget: Budget, below: float) -> Choice:
    """The choice with the least cost, settled; where that does not fit the budget, one whose gap may be larger."""
    free = both.at(below=below, enough=max(ENOUGH_AMONG, budget.close))[0]
    settled = budget.settle(free)
    if budget.weigh(settled) > budget.limit_bytes:
        return settled
    closer = budget.settle(_all_at_once(both, _nearer(both, free, budget.close)))
    if budget.weigh(closer) <= budget.limit_bytes:
        return closer
    return replace(settled, bound=max(settled.bound or 0.0, closer.bound or 0.0))


def _nearer(both: _Both, free: Choice, close: float) -> Choice:
    """The same, or what costs less, with a bound that is nearer where the gap is more than ``close``."""
    cost, bound = free.cost or 0.0, free.bound or 0.0
    if cost - bound <= close * cost:
        return free
    try:
        nearer = both.at(below=cost, enough=close)[0]
    except NothingBelow as nothing:
        return replace(free, bound=min(cost, max(bound, nothing.bound)))
    return min(nearer, replace(free, bound=nearer.bound), key=lambda choice: choice.cost or 0.0)


def _all_at_once(both: _Both, free: Choice) -> Choice:
    """The choice with the least cost, or the one that was found where its gap is worth nothing more."""
    if both.beside and (free.cost or 0.0) - (free.bound or 0.0) > both.close * (free.cost or 0.0):
        return both.together() or free
    return free


def least_cost(space: Space, known: Known) -> float:
    """A cost that no choice is below: what the operators cost at least, each by itself."""
    choices, least = {**space.strategies, **_choices_beside(space, operators_beside(space))}, 0.0
    alike: dict[tuple[Hashable, int], float] = {}  # equal lists of strategies are one object
    for node in space.graph.capture.nodes:
        key = space.graph.alike[node.name], id(choices[node.name])
        if key not in alike:
            alike[key] = float(known.operator(node, choices[node.name]).min())
        least += alike[key]
    return least


def floor_of(graph: RuledGraph, objective: Objective, devices: int) -> float:
    """A cost that no choice on any mesh of so many devices is below: `least_cost` is no less there."""
    return sum(objective.floor(graph, node, devices) for node in graph.capture.nodes)


class _Both:
    """What is searched first, and what stands beside it."""

    def __init__(self, space: Space, objective: Objective, known: Known | None = None) -> None:
        self._space, self.beside = space, operators_beside(space)
        self.close = CLOSE if len(space.mesh.axes) <= FEW_AXES else CLOSE_ON_MORE
        self._known = known or Known(space.graph, objective, space.mesh)
        self._left: Mapping[str, Indices] = {}  # of operators some strategies, where not all are searched
        self.main = self._first()

    def _first(self) -> Problem:
        names = {node.name for node in self._space.graph.capture.nodes}
        return Problem(self._space, self._known, names - self.beside)

    def among(self, left: Mapping[str, Indices]) -> _Both:
        """The same for some strategies of operators alone; what stands beside them follows as before."""
        found = copy(self)
        found.__dict__.pop("_without_sums", None)
        found._left, found.main = left, self.main.among(left)
        return found

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
        """The choice with the least cost of all operators at once; None where they tie too much together for that.

        Nor is there one where some strategies alone are searched.
        """
        if self._left:
            return None
        problem = Problem(self._space, self._known, {node.name for node in self._space.graph.capture.nodes})
        try:
            cost, picked = minimise(problem.domains, problem.tables, limit=TIED)
        except PlanError:
            return None
        return Choice(*problem.decided(picked), cost, cost)

    def _following(self, strategies: Mapping[str, Strategy], leaves: Mapping[str, Layout]) -> Solution:
        return self._beside.following(strategies, leaves, self._known).solved()

    @cached_property
    def _beside(self) -> _Beside:
        """Return what is decided when the rest is. Cached: the space is frozen."""
        return _Beside(self._space, self.beside)

    @cached_property
    def _without_sums(self) -> Problem:
        """Return what is searched first where what stands beside it cannot make partial sums.

        Cached with the strategies that are left, which stay the same: `among` makes another.
        """
        problem = self._first()
        problem.demand_no_sums(self.beside)
        return problem.among(self._left) if self._left else problem

    @cached_property
    def _least(self) -> float:
        """What the operators beside the rest cost at least.

        Cached: the space and the objective are frozen.
        """
        nodes = [node for node in self._space.graph.capture.nodes if node.name in self.beside]
        return sum(float(self._known.operator(node, self._beside.choices[node.name]).min()) for node in nodes)


class _Beside:
    """What is left to decide when all but the operators beside the rest is: these follow who reads them."""

    def __init__(self, space: Space, beside: Set[str]) -> None:
        graph, nodes = space.graph, space.graph.capture.nodes
        self._space, self._names = space, beside
        made = (name for node in nodes if node.name in beside for name in (*node.operands, *node.results))
        self._made = dict.fromkeys(made).keys()  # in an order that is the same in every process
        self._readers = {use.node.name for name in self._made for use in graph.uses[name]} - beside
        self._taken = {name for node in nodes if node.name not in beside for name in node.operands}
        self.choices = _choices_beside(space, beside)

    def following(self, decided: Mapping[str, Strategy], leaves: Mapping[str, Layout], known: Known) -> Problem:
        """The problem of these operators where the rest is decided."""
        space = self._space
        strategies = self.choices | {name: known.alone(decided[name]) for name in self._readers}
        free = {
            name: layouts if name not in self._taken else known.alone(leaves[name])
            for name, layouts in space.leaves.items()
            if name in self._made
        }
        within = replace(space, strategies=strategies, leaves=free, blocks=())
        return Problem(within, known, self._names | self._readers, priced=self._names, values=self._made)


def _choices_beside(space: Space, beside: Set[str]) -> dict[str, tuple[Strategy, ...]]:
    """What operators beside the rest may choose, whole on every rank before all else; equal lists are one object."""
    same: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = {}
    found = {}
    for name in beside:
        options = tuple(dict.fromkeys([space.graph.rules[name].replicated(), *space.strategies[name]]))
        found[name] = same.setdefault(options, options)
    return found


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
