"""The search for a plan: first the main problem, then its side operators.

Rotary tables, masks and position ids are read by every layer, and would tie all layers to each other. They have no
gradient, and replicated they are in every layout by local slices. The operators that make them are *side operators*:
left out of the *main problem*, as if they cost nothing, and decided after it. The main minimum, with the least cost of
the side operators, is a lower bound of every plan's cost; how far the final cost is above it is the gap. Where there
is one and all operators are not tied together too much, all are decided at once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from functools import cached_property, partial

from shardwright.common.stages import in_stage
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.plan.pricing.cost import Objective
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.memory import OptimizerStates
from shardwright.compiler.plan.search.branching import Branch, BranchAndBound, Branching
from shardwright.compiler.plan.search.budget import Budget, PricedChoice, fitting
from shardwright.compiler.plan.search.buffers import WORTH, JoinedBuffers, LargestBuffers, buffers_of, by_buffers
from shardwright.compiler.plan.search.choices import FEW_AXES, Choice, Space
from shardwright.compiler.plan.search.exact import Indices, Minimum, Table, TooWide, minimise
from shardwright.compiler.plan.search.narrow import ENOUGH, NothingBelow, plus
from shardwright.compiler.plan.search.problem import CostCache, Problem, Solution
from shardwright.compiler.plan.search.weights import Weights
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
    known: CostCache | None = None,
    built: PreparedSearch | None = None,
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
    built = built or PreparedSearch(space, objective, known)
    if budget is None:
        return _all_at_once(built.both, built.both.at(below=below)[0])
    return built.within(budget, below)


class PreparedSearch:
    """The parts of a search of a space, each made when it is first needed; other searches share them."""

    def __init__(self, space: Space, objective: Objective, known: CostCache | None = None) -> None:
        self._space, self._objective, self._known = space, objective, known
        self._weights: dict[OptimizerStates, Weights] = {}  # Cached by a frozen value; the space stays the same

    @cached_property
    def both(self) -> _TwoStages:
        """The main problem and the side operators.

        Cached, as all of this class: the space and the objective are frozen, and `among` makes another.
        """
        return _TwoStages(self._space, self._objective, self._known)

    def weights(self, optimizer: OptimizerStates) -> Weights:
        """Return the bytes that choices hold, by the optimizer."""
        if optimizer not in self._weights:
            self._weights[optimizer] = Weights(self.both.main, optimizer)
        return self._weights[optimizer]

    @cached_property
    def buffers(self) -> LargestBuffers:
        """The largest buffers of collectives."""
        return buffers_of(self.both.main)

    @cached_property
    def joined(self) -> JoinedBuffers:
        """The joined buffers of gradients and of small parameters."""
        return JoinedBuffers(self.both.main)

    def among(self, left: Mapping[str, Indices]) -> PreparedSearch:
        """Return the search among some strategies of operators alone, by their names."""
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
            return _AtPrice(self, budget, price, alone, forbidding).found(below)

        def closer(best: Choice, found: Sequence[PricedChoice], price: float) -> Choice:
            best = budget.alternatives(best) if budget.alternatives else best
            parts = BranchAndBound(best, solve, budget, Branching(main, self.weights(budget.optimizer)), below)
            return parts.divided(Branch((), list(found), best.bound or 0.0, price))

        return fitting(free, solve, budget, below, closer if budget.alternatives else None)


class _AtPrice:
    """The minimum at a price of a byte, by the parts of a prepared search (`budget.Solve`)."""

    def __init__(
        self, built: PreparedSearch, budget: Budget, price: float, alone: bool, forbidding: Sequence[Table]
    ) -> None:
        self._built, self._budget, self._price, self._alone, self._forbidding = built, budget, price, alone, forbidding
        self._weights = built.weights(budget.optimizer)
        self._above_bytes = self._weights.fixed_bytes - budget.limit_bytes
        self._tables = self._weights.at(price)
        self._worth = max(WORTH, 2 * budget.close)  # what smaller buffers may save beside the gap that may be left

    def found(self, below: float) -> tuple[list[Choice], float, float]:
        """The choices that were found, a bound, and by how many bytes the first is above the budget."""
        built, price, weights = self._built, self._price, self._weights
        to_beat = below - price * self._above_bytes
        chosen = partial(self._chosen, to_beat)
        with plus(price * self._above_bytes):
            buffers = LargestBuffers(()) if self._alone else built.buffers
            found, total = by_buffers(chosen, buffers, price, self._worth, to_beat)
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
        self, to_beat: float, within_buffers: Sequence[Table], more: Sequence[Table] = ()
    ) -> tuple[tuple[Choice, list[int]], float, list[int]]:
        out = [*self._forbidding, *within_buffers]
        choice, total, picked = self._built.both.at(
            [*self._tables, *more], out, below=to_beat, enough=ENOUGH_AMONG, messages_first=self._budget.once
        )
        if total >= to_beat:
            raise NothingBelow(total)
        again, recomputed = self._weights.again(self._price, picked), self._weights.recomputing.chosen(picked)
        choice = self._budget.settle(replace(choice, again=again, recomputed=recomputed))
        return (choice, picked), total, picked


def _free(both: _TwoStages, budget: Budget, below: float) -> Choice:
    """The choice with the least cost, settled; where that does not fit the budget, one whose gap may be larger."""
    free = both.at(below=below, enough=budget.close)[0]
    settled = budget.settle(free)
    if budget.weigh(settled) > budget.limit_bytes:
        return settled
    closer = budget.settle(_all_at_once(both, free))
    if budget.weigh(closer) <= budget.limit_bytes:
        return closer
    return replace(settled, bound=max(settled.bound or 0.0, closer.bound or 0.0))


def _all_at_once(both: _TwoStages, free: Choice) -> Choice:
    """The choice with the least cost, or the one that was found where its gap is worth nothing more."""
    if both.side and (free.cost or 0.0) - (free.bound or 0.0) > both.close * (free.cost or 0.0):
        return both.together() or free
    return free


@in_stage("bounds")
def least_cost(space: Space, known: CostCache) -> float:
    """A cost that no choice is below: what the operators cost at least, each by itself."""
    choices, least = {**space.strategies, **_side_choices(space, side_operators(space))}, 0.0
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


class _TwoStages:
    """The main problem, and the side operators that are decided after it."""

    def __init__(self, space: Space, objective: Objective, known: CostCache | None = None) -> None:
        self._space, self.side = space, side_operators(space)
        self.close = CLOSE if len(space.mesh.axes) <= FEW_AXES else CLOSE_ON_MORE
        self._known = known or CostCache(space.graph, objective, space.mesh)
        self._left: Mapping[str, Indices] = {}  # of operators some strategies, where not all are searched
        self.main = self._first()

    def _first(self) -> Problem:
        names = {node.name for node in self._space.graph.capture.nodes}
        return Problem(self._space, self._known, names - self.side)

    def among(self, left: Mapping[str, Indices]) -> _TwoStages:
        """Return the stages among some strategies of operators alone; side operators follow as before."""
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
        messages_first: bool = False,
    ) -> tuple[Choice, float, list[int]]:
        """The choice with the least cost with ``more`` tables, a bound of that, and what was picked by variable.

        The other arguments are those of `Problem.minimum`.

        Raises:
            NothingBelow: where no choice was found that costs less than ``below``.
        """

        def least_of(problem: Problem) -> Minimum:  # the side operators cost at least ``self._least`` more
            of_main = below - self._least
            with plus(self._least):
                return problem.minimum(
                    more, forbidding=forbidding, below=of_main, enough=enough, messages_first=messages_first
                )

        found = least_of(self.main)
        bound, extra = found.bound, 0.0
        strategies, leaves = self.main.decided(found.picked)
        if self.side:
            try:
                extra, of_side, their_leaves = self._following(strategies, leaves)
            except TooWide:
                raise
            except PlanError:  # the main problem demands partial sums, which side operators cannot make
                found = least_of(self._without_sums)
                strategies, leaves = self.main.decided(found.picked)
                extra, of_side, their_leaves = self._following(strategies, leaves)
            strategies, leaves = strategies | of_side, leaves | their_leaves
            bound += min(self._least, extra)
        cost = self.main.cost_of(found.picked) if more else found.cost
        return Choice(strategies, leaves, cost + extra, bound), bound, list(found.picked)

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
        return self._side_operators.following(strategies, leaves, self._known).solved()

    @cached_property
    def _side_operators(self) -> _SideOperators:
        """Return what is decided when the rest is. Cached: the space is frozen."""
        return _SideOperators(self._space, self.side)

    @cached_property
    def _without_sums(self) -> Problem:
        """Return the main problem where side operators cannot make partial sums.

        Cached with the strategies that are left, which stay the same: `among` makes another.
        """
        problem = self._first()
        problem.demand_no_sums(self.side)
        return problem.among(self._left) if self._left else problem

    @cached_property
    def _least(self) -> float:
        """The least cost of the side operators.

        Cached: the space and the objective are frozen.
        """
        nodes = [node for node in self._space.graph.capture.nodes if node.name in self.side]
        return sum(float(self._known.operator(node, self._side_operators.choices[node.name]).min()) for node in nodes)


class _SideOperators:
    """The decision about the side operators once all others are decided: they follow their readers."""

    def __init__(self, space: Space, plus: Set[str]) -> None:
        graph, nodes = space.graph, space.graph.capture.nodes
        self._space, self._names = space, plus
        made = (name for node in nodes if node.name in plus for name in (*node.operands, *node.results))
        self._made = dict.fromkeys(made).keys()  # in an order that is the same in every process
        self._readers = {use.node.name for name in self._made for use in graph.uses[name]} - plus
        self._taken = {name for node in nodes if node.name not in plus for name in node.operands}
        self.choices = _side_choices(space, plus)

    def following(self, decided: Mapping[str, Strategy], leaves: Mapping[str, Layout], known: CostCache) -> Problem:
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


def _side_choices(space: Space, plus: Set[str]) -> dict[str, tuple[Strategy, ...]]:
    """Return the choices of the side operators, replicated before all else; equal lists are one object."""
    same: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = {}
    found = {}
    for name in plus:
        options = tuple(dict.fromkeys([space.graph.rules[name].replicated(), *space.strategies[name]]))
        found[name] = same.setdefault(options, options)
    return found


def side_operators(space: Space) -> frozenset[str]:
    """The names of the operators that compute, without a gradient, from nothing but numbers, buffers and inputs.

    Of those that are connected either all are side operators or none: none where they read an input that is split
    and make nothing that many read.
    """
    return frozenset().union(*(names for names in space.graph.once(_without_gradient) if _is_side_group(names, space)))


def _without_gradient(graph: RuledGraph) -> list[set[str]]:
    """Return the operators that compute so, those that are connected together."""
    capture = graph.capture
    group: dict[str, set[str]] = {}  # value -> the operators that it is connected with
    for node in capture.nodes:
        made = [group.get(name) for name in node.operands]
        leaves = [capture.values[name] for name, of in zip(node.operands, made, strict=True) if of is None]
        fits = not graph.needs_gradient(node) and node.pin is None
        if fits and all(leaf.kind in ("input", "buffer", "constant") for leaf in leaves):
            joined = {node.name}.union(*(of for of in made if of is not None))
            names = [name for name, of in group.items() if of & joined]
            group.update(dict.fromkeys([*names, *node.results], joined))
    return [*{id(joined): joined for joined in group.values()}.values()]


def _is_side_group(group: set[str], space: Space) -> bool:
    graph = space.graph
    nodes = [node for node in graph.capture.nodes if node.name in group]
    leaves = {name for node in nodes for name in node.operands if name in space.leaves}
    if all(layout.is_replicated for name in leaves for layout in space.leaves[name]):
        return True
    readers = ({use.node.name for use in graph.uses[name]} - group for node in nodes for name in node.results)
    return any(len(names) >= MANY_READERS for names in readers)
