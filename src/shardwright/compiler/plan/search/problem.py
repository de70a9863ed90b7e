"""The problem of `shardwright.compiler.plan` as tables over discrete variables, and a cache of their costs.

Besides the strategy of every operator and the layout of every free leaf, each value with more than two readers has a
*shared target*: the redistribution that they have in common and that is made once. Transfers alone would charge the
gradient reduction of a transformer's hidden state three times, for q, k and v. A value that would share two different
targets is charged too much for the second: the objective is then an upper bound of the plan's cost, else it is equal to
it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardwright.common.stages import in_stage
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.capture.reduced import is_cast_or_view
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import possible
from shardwright.compiler.plan.pricing.cost import Objective, largest_inside
from shardwright.compiler.plan.pricing.graph import RuledGraph, Target, Use, each_made_by, targets_of, the_one
from shardwright.compiler.plan.pricing.pairs import Flags, pairs_on
from shardwright.compiler.plan.search.bounds import WarmStart
from shardwright.compiler.plan.search.choices import Space
from shardwright.compiler.plan.search.exact import Indices, Minimum, Table, among, cost_at
from shardwright.compiler.plan.search.min_sum import Costs
from shardwright.compiler.plan.search.narrow import ENOUGH, least
from shardwright.compiler.rules.notation import Strategy
from shardwright.errors import PlanError

# Larger three-way tables are not worth their sharing: the consumers of such a value are charged singly.
SHARING_LIMIT = 4_000_000

T = TypeVar("T")
AxisNames = tuple[str, ...]


class StillCosts:
    """The part of a `CostCache` that stays the same for objectives which differ in what they hide alone.

    What is large is no part of it: it is soon made of the rest.
    """

    def __init__(self) -> None:
        # Cached as `CostCache` says.
        self.kept: dict[int, object] = {}  # so that no identity is given to another object
        self.layouts: dict[Hashable, tuple[Layout, ...]] = {}
        self.targets: dict[Hashable, tuple[Target, ...]] = {}
        self.same: dict[tuple[Target, ...], tuple[Target, ...]] = {}
        self.leaves: dict[Hashable, Costs] = {}
        self.arrays: dict[Hashable, Costs] = {}
        self.summing: dict[Hashable, tuple[Target, ...]] = {}
        self.entered: dict[Hashable, Mapping[AxisNames, Flags]] = {}
        self.buffers: dict[Hashable, Costs] = {}
        self.alone: dict[Any, Any] = {}


class CostCache:
    """A cache of costs and layouts by the facts that they follow from: equal layers share whole arrays.

    All searches on one mesh for one objective share it, whatever each may choose: none prices again what another has.
    Those for other objectives that hide more or less of what `overlaps` share the part that stays the same, ``still``.

    Rules and lists of strategies are told apart by identity, as equal ones are one object in a `RuledGraph` and a
    `Space`, and held, so that no other object has theirs. Cached by these and by what else the function reads that is
    called where nothing is known: of an operator the number of those that are alike, of a value shape, dtype, whether
    it has a gradient and whether it is a parameter.
    """

    def __init__(self, graph: RuledGraph, objective: Objective, mesh: Mesh, still: StillCosts | None = None) -> None:
        self.graph, self.objective, self.mesh = graph, objective, mesh
        self.pairs = pairs_on(objective, mesh)
        self.still = still or StillCosts()
        self._operators: dict[Hashable, Costs] = {}
        self._prices: dict[Hashable, dict[Strategy, float]] = {}
        # By whether it is of parameters, which may overlap.
        self._arrays: dict[bool, dict[Hashable, Costs]] = {False: self.still.arrays, True: {}}
        self._edges: dict[Hashable, EdgeTables] = {}

    def alone(self, choice: T) -> tuple[T, ...]:
        """A list of choices that has one alone: equal ones are one object."""
        found: tuple[T, ...] = self.still.alone.setdefault(choice, (choice,))
        return found

    def operator(self, node: Node, strategies: Sequence[Strategy]) -> Costs:
        """Return the cost of an operator under each strategy."""
        return self._operator(self.objective.operator, node, strategies)

    def forward(self, node: Node, strategies: Sequence[Strategy]) -> Costs:
        """Return the cost of one more forward of an operator under each strategy."""
        return self._operator(self.objective.forward, node, strategies)

    def largest_inside(self, node: Node, strategies: Sequence[Strategy]) -> Costs:
        """The bytes of the largest buffer that an operator communicates inside itself, under each strategy."""
        return self._operator(_largest_inside, node, strategies)

    def _operator(self, cost: Callable[..., float], node: Node, strategies: Sequence[Strategy]) -> Costs:
        key = cost.__name__, self.graph.alike[node.name], self._identity(strategies)
        if key not in self._operators:
            prices = self._prices.setdefault(key[:2], {})
            found = [prices.get(strategy) for strategy in strategies]
            for at, strategy in enumerate(strategies):
                if found[at] is None:
                    found[at] = prices[strategy] = cost(self.graph, node, strategy, self.mesh)
            self._operators[key] = np.array(found)
        return self._operators[key]

    def layouts(self, node: Node, index: int, strategies: Sequence[Strategy]) -> tuple[Layout, ...]:
        """The layout of a result under each strategy."""
        rule, shape = self.graph.rules[node.name], self.graph.capture.values[node.results[index]].shape
        key = self._identity(rule), self._identity(strategies), index, shape
        if key not in self.still.layouts:
            self.still.layouts[key] = each_made_by(self.graph, node, index, strategies, self.mesh)
        return self.still.layouts[key]

    def targets(self, use: Use, strategies: Sequence[Strategy]) -> tuple[Target, ...]:
        """Return what an operand must be under each strategy of its operator."""
        rule, value = self.graph.rules[use.node.name], self.graph.capture.values[use.node.operands[use.index]]
        key = self._identity(rule), self._identity(strategies), use.index, value.shape, value.needs_gradient
        if key not in self.still.targets:
            made = targets_of(self.graph, use.node, use.index, strategies, self.mesh)
            self.still.targets[key] = self.still.same.setdefault(made, made)  # equal ones are one object
        return self.still.targets[key]

    def leaf(self, value: Value, layouts: Sequence[Layout]) -> Costs:
        """Return the cost of holding a leaf in each layout."""
        key = value.kind, _alike(value), self._identity(layouts)
        if key not in self.still.leaves:
            self.still.leaves[key] = np.array([self.objective.leaf(value, layout, self.mesh) for layout in layouts])
        return self.still.leaves[key]

    def summing(self, targets: tuple[Target, ...], before: Sequence[AxisNames]) -> tuple[Target, ...]:
        """Return each target of a cast's or view's operand with each list of axes that its gradient is summed over too.

        Axes that split the target are left out: nothing is summed over those.
        """
        key = self._identity(targets), before
        if key not in self.still.summing:
            made = tuple(self._summing(target, axes) for target in targets for axes in before)
            self.still.summing[key] = self.still.same.setdefault(made, made)
        return self.still.summing[key]

    def _summing(self, target: Target, axes: AxisNames) -> Target:
        if not axes or set(axes) & (target.layout.split_axes | set(target.layout.partial)):
            return target
        partial = self.mesh.ordered({*target.gradient_partial, *axes})
        return the_one(self.graph, replace(target, gradient_partial=partial), self.mesh)

    def entered(
        self, shape: tuple[int, ...], layouts: tuple[Layout, ...], targets: tuple[Target, ...]
    ) -> Mapping[AxisNames, Flags]:
        """Return what `Ways.entered` does, for the different layouts and targets."""
        key = shape, layouts, targets
        if key not in self.still.entered:
            self.still.entered[key] = self.pairs.ways.entered(shape, layouts, targets)
        return self.still.entered[key]

    def edges(
        self,
        facts: Value,
        layouts: tuple[Layout, ...],
        demanded: Sequence[tuple[Target, ...]],
        *,
        differ: bool,
        first: int | None = None,
        before: Sequence[AxisNames] = (),
        sizes: Sequence[tuple[int, ...]] = (),
    ) -> EdgeTables:
        """Return the cost of a value from each layout to each target, of which each consumer has some ``demanded``.

        Args:
            differ: whether no consumer is another, too, which demands two targets.
            first: the consumer, by its number, for which the value is read first (`Value.read_first`).
            before: of a cast or view, over which axes its gradient may be summed before it; the producer's choices are
                then each of its layouts with each of these.
            sizes: of each consumer the numbers of its choices, by variable, where it is such an operator itself.
        """
        of_targets = tuple(self._identity(targets) for targets in demanded)
        key = _alike(facts), self._identity(layouts), of_targets, differ, first, before, sizes
        if key not in self._edges:
            kinds, targets = tuple(dict.fromkeys(layouts)), tuple(dict.fromkeys(itertools.chain(*demanded)))
            at = {layout: i for i, layout in enumerate(kinds)}
            rows = [at[layout] for layout in layouts]
            costs = self._of_ways(replace(facts, read_first=False), kinds, targets, rows, before, len(demanded))
            exposed = None if first is None else self._of_ways(facts, kinds, targets, rows, before, len(demanded))
            found = _edges(costs, targets, demanded, differ, exposed, first)
            self._edges[key] = found.divided((len(layouts), len(before)) if before else (len(layouts),), sizes)
        return self._edges[key]

    def _of_ways(
        self,
        facts: Value,
        kinds: tuple[Layout, ...],
        targets: tuple[Target, ...],
        rows: Sequence[int],
        before: Sequence[AxisNames],
        readers: int,
    ) -> Costs:
        """Return the cost of each way from these rows of the layouts, by what is summed ``before`` where it may be.

        What is summed before the value is what all readers sum first of all: of several readers one cannot tell what
        the others do, and sums behind the value where nothing else is said.
        """
        if not before:
            return self.array(facts, kinds, targets)[rows]
        found, entered = [], self.entered(facts.shape, kinds, targets)
        for axes in before:
            rest = (self.mesh.ordered(set(target.gradient_partial) - set(axes)) for target in targets)
            left = tuple(
                the_one(self.graph, replace(target, gradient_partial=of), self.mesh)
                for target, of in zip(targets, rest, strict=True)
            )
            costs = self.array(facts, kinds, left)
            if axes or readers == 1:
                costs = np.where(entered.get(axes, False), costs, math.inf)
            found.append(costs[rows])
        return np.stack(found, axis=1).reshape(-1, len(targets))

    def array(self, facts: Value, layouts: tuple[Layout, ...], targets: tuple[Target, ...]) -> Costs:
        """Return the cost of bringing a value from each layout to each target."""
        key = _alike(facts), layouts, targets
        known = self._arrays[facts.of_parameter]
        if key not in known:
            known[key] = self.pairs.costs(facts, layouts, targets)
        return known[key]

    def largest_buffers(self, facts: Value, layouts: tuple[Layout, ...], targets: tuple[Target, ...]) -> Costs:
        """The bytes of the largest buffer on a value's way from each layout to each target."""
        key = _alike(facts), self._identity(layouts), self._identity(targets)
        if key not in self.still.buffers:
            self.still.buffers[key] = self.pairs.buffers(facts, layouts, targets)
        return self.still.buffers[key]

    def _identity(self, kept: object) -> int:
        self.still.kept[id(kept)] = kept
        return id(kept)


def _largest_inside(graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
    return largest_inside(graph, node, strategy, mesh)


def _alike(facts: Value) -> Hashable:
    """Return what the cost of a transfer reads of a value."""
    kind = facts.of_parameter, facts.reduced_in, facts.read_first, facts.viewed
    return facts.shape, facts.dtype, facts.needs_gradient, *kind


@dataclass(frozen=True)
class EdgeTables:
    """The tables of a value: over its producer and each consumer, and where a target is shared, over more.

    Of two consumers one table sees both: where they demand the same target, it is paid for once. Of more, none can
    see which target another demands. A variable between them, the hub, settles which target is paid for once; who
    demands that one pays nothing, every other pays for itself.
    """

    consumers: tuple[Costs, ...]  # producer x consumer, or producer x consumer x hub
    both: Costs | None = None  # producer x consumer x other consumer: what the other pays beside the first
    hub: Costs | None = None  # producer x hub; the hub's last choice: nothing is shared
    shared: tuple[Target, ...] = ()  # what each choice of the hub but the last stands for

    def divided(self, made: tuple[int, ...], read: Sequence[tuple[int, ...]]) -> EdgeTables:
        """Return the tables with a dim for each variable of who makes and who reads the value."""
        if len(made) == 1 and all(len(sizes) == 1 for sizes in read):
            return self
        hub = None if self.hub is None else self.hub.reshape(*made, -1)
        shared = () if hub is None else hub.shape[-1:]
        consumers = tuple(of.reshape(*made, *sizes, *shared) for of, sizes in zip(self.consumers, read, strict=False))
        both = None if self.both is None else self.both.reshape(*made, *itertools.chain(*read))
        return replace(self, consumers=consumers, both=both, hub=hub)


def _edges(
    costs: Costs,
    targets: Sequence[Target],
    demanded: Sequence[tuple[Target, ...]],
    differ: bool,
    exposed: Costs | None = None,
    first: int | None = None,
) -> EdgeTables:
    """The tables for a value whose way to each target costs ``costs``, by the producer's choices.

    To what the ``first`` consumer demands, whoever else does, it costs ``exposed``, which is no less.
    """
    column = {target: at for at, target in enumerate(targets)}
    columns = [np.array([column[target] for target in of]) for of in demanded]
    own = [costs if exposed is None or i != first else exposed for i in range(len(columns))]
    shared = _shareable(costs if exposed is None else exposed, columns)
    if shared and differ and len(columns) == 2 and len(costs) * math.prod(map(len, columns)) <= SHARING_LIMIT:
        one, other = columns
        alike = one[:, None] == other  # consumer x other consumer
        paid, others = own[0][:, one, None], own[1][:, None, other]
        beside = np.maximum(others - np.where(np.isfinite(paid), paid, 0.0), 0.0)
        return EdgeTables((own[0][:, one],), np.where(alike, beside, others))
    widest = max((len(consumer) for consumer in columns), default=0)
    if not shared or len(costs) * widest * (len(shared) + 1) > SHARING_LIMIT:
        return EdgeTables(tuple(of[:, at] for of, at in zip(own, columns, strict=True)))
    free = [at[:, None] == np.array([*shared, -1]) for at in columns]  # consumer x hub
    # The hub pays ``costs``: where the first consumer shares a target, it adds what is exposed.
    more = [np.subtract(of, costs, out=np.zeros_like(costs), where=np.isfinite(costs)) for of in own]
    cubes = (
        np.where(f[None], m[:, at][:, :, None], of[:, at][:, :, None])
        for of, m, at, f in zip(own, more, columns, free, strict=True)
    )
    hub = np.concatenate([costs[:, shared], np.zeros((len(costs), 1))], axis=1)
    return EdgeTables(tuple(cubes), None, hub, tuple(targets[at] for at in shared))


def _shareable(costs: Costs, columns: Sequence[npt.NDArray[np.intp]]) -> list[int]:
    """The columns of targets that at least two consumers may demand and that may cost something."""
    demanded = [int(at) for consumer in columns for at in dict.fromkeys(consumer.tolist())]
    finite = np.where(np.isfinite(costs), costs, 0.0).max(axis=0)
    return [at for at in dict.fromkeys(demanded) if demanded.count(at) > 1 and finite[at] > 0]


Solution = tuple[float, dict[str, Strategy], dict[str, Layout]]
"""A cost, strategies by operator, layouts by leaf."""


class Problem:
    """The variables and tables of some operators of a space.

    Args:
        nodes: the names of the operators that are variables.
        priced: those of them whose own cost counts; by default all.
        values: whose ways to these operators count; by default those of all that these operators make or read.
    """

    @in_stage("tables")
    def __init__(
        self,
        space: Space,
        known: CostCache,
        nodes: Set[str],
        *,
        priced: Set[str] | None = None,
        values: Set[str] | None = None,
    ) -> None:
        self.space = space
        self.known = known
        self.tables: list[Table] = []
        self.domains: list[int] = []
        self._left: list[Indices] | None = None  # of each variable, where not all of its values are searched
        self._read_by: dict[str, list[tuple[int, tuple[Target, ...]]]] = {}
        graph = space.graph
        chosen = [node for node in graph.capture.nodes if node.name in nodes]
        self.node_variables = {node.name: self._variable(len(space.strategies[node.name])) for node in chosen}
        self.leaf_variables = {name: self._variable(len(layouts)) for name, layouts in space.leaves.items()}
        for node in chosen:
            if priced is None or node.name in priced:
                costs = known.operator(node, space.strategies[node.name])
                self.tables.append(Table((self.node_variables[node.name],), costs))
        for name, layouts in space.leaves.items():
            costs = known.leaf(graph.capture.values[name], layouts)
            self.tables.append(Table((self.leaf_variables[name],), costs))
        self.hubs: dict[str, tuple[int, tuple[Target, ...]]] = {}
        """The hubs by the values that they share: the variable, and the targets that its choices stand for."""
        self.shared_by_two: set[str] = set()
        """The values whose two consumers pay once where they demand the same target."""
        counted = graph.capture.values.keys() if values is None else values
        self._entering: dict[int, tuple[int, tuple[AxisNames, ...]]] = {}
        """By the variable of a cast or view of a parameter another one, and the axes over which the gradient is summed
        before the operator under each of its choices."""
        for node in reversed(chosen):
            if self._may_sum_before(node) and counted >= {node.operands[0], node.results[0]}:
                self._add_entering(node)
        for value in counted:
            if value in self.leaf_variables or graph.producers[value][0].name in nodes:
                self._add_transfers(value)
        self.block_variables = {block.name: self._variable(2) for block in space.blocks}
        """The variables of blocks, by name: the inside of a block is saved for the backward, or recomputed by it."""

    def solved(self) -> Solution:
        """The least cost, and the strategies and layouts that attain it."""
        found = self.minimum()
        return found.cost, *self.decided(found.picked)

    def minimum(
        self,
        more: Sequence[Table] = (),
        *,
        forbidding: Sequence[Table] = (),
        below: float = math.inf,
        enough: float = ENOUGH,
        messages_first: bool = False,
    ) -> Minimum:
        """The least cost with ``more`` tables over the same variables, and what attains it, by variable.

        What is learned of choices is of use for other tables, as at the next price of a byte; not so with
        ``forbidding`` tables, which hold for this time. A gap of ``enough``, as a share, is worth no further round.
        With ``messages_first`` most likely nothing costs less than ``below``.

        Raises:
            NothingBelow: where no choice was found that costs less than ``below``.
        """
        learned = self._learned.copied() if forbidding else self._learned
        least_of = partial(least, below=below, enough=enough, learned=learned, messages_first=messages_first)
        if self._left is None:
            return least_of(self.domains, [*self.tables, *more, *forbidding])
        tables = [*self._tables_left, *among(self._left, [*more, *forbidding], {})]
        found = least_of([len(of) for of in self._left], tables)
        return replace(found, picked=[int(of[i]) for of, i in zip(self._left, found.picked, strict=True)])

    @cached_property
    def _learned(self) -> WarmStart:
        """Return what searches of these variables have learned, to which each adds.

        Cached with the values that are left, which stay the same: `among` makes another.
        """
        return WarmStart.nothing(self.domains if self._left is None else [len(of) for of in self._left])

    @cached_property
    def _tables_left(self) -> list[Table]:
        """Return the tables for the values that are left.

        Cached with these: tables are added before the first search alone, and `among` makes another.
        """
        return among(self._left, self.tables, {}) if self._left is not None else self.tables

    def among(self, left: Mapping[str, Indices]) -> Problem:
        """Return the problem with some values alone: of operators those that are ``left``.

        Of what consumers may share that is left which two of them may still demand.
        """
        found = copy.copy(self)
        found.__dict__ = {name: of for name, of in vars(self).items() if name not in ("_learned", "_tables_left")}
        found._left = [np.arange(size) for size in self.domains]
        for name, variable in self.node_variables.items():
            found._left[variable] = left[name]
        for value, (variable, shared) in self.hubs.items():
            options = (
                {target for i in found._left[v].tolist() for target in targets[i]}
                for v, targets in self._demanded(value)
            )
            demanded = Counter(target for of in options for target in of)
            two = [i for i, target in enumerate(shared) if demanded[target] > 1]
            found._left[variable] = np.array([*two, len(shared)])
        return found

    def picked(self, strategies: Mapping[str, Strategy], leaves: Mapping[str, Layout], blocks: Set[str]) -> list[int]:
        """The values of the variables under decisions; of those between consumers of a value the first."""
        found = [0] * len(self.domains)
        for name, variable in self.node_variables.items():
            found[variable] = self.space.strategies[name].index(strategies[name])
        for name, variable in self.leaf_variables.items():
            found[variable] = self.space.leaves[name].index(leaves[name])
        for name, variable in self.block_variables.items():
            found[variable] = int(name in blocks)
        return found

    def cost_of(self, picked: Sequence[int]) -> float:
        """Return the cost of a choice for every variable."""
        return cost_at(self.tables, picked)

    def decided(self, picked: Sequence[int]) -> tuple[dict[str, Strategy], dict[str, Layout]]:
        """The strategies and layouts that were picked."""
        strategies = {name: self.space.strategies[name][picked[i]] for name, i in self.node_variables.items()}
        return strategies, {name: self.space.leaves[name][picked[i]] for name, i in self.leaf_variables.items()}

    def demand_no_sums(self, makers: Set[str]) -> None:
        """Forbid choices that need what other operators make, which are no variables here, as partial sums."""
        graph = self.space.graph
        for value, (maker, _) in graph.producers.items():
            if maker.name in makers:
                whole = Layout.replicated(len(graph.capture.values[value].shape))
                for variable, targets in self.consumers(value):
                    costs = [0.0 if possible(whole, target.layout) else math.inf for target in targets]
                    self.tables.append(Table((variable,), np.array(costs)))

    def _variable(self, size: int) -> int:
        if size == 0:
            raise PlanError("an operator or leaf has no possible choice")
        self.domains.append(size)
        return len(self.domains) - 1

    def _add_transfers(self, value: str) -> None:
        producer, layouts = self.produced(value)
        if value in self.space.outputs:
            self._add_output(value, producer, layouts)
        consumers = self.consumers(value)
        if not consumers:
            return
        facts = self.space.graph.capture.values[value]
        variables = [variable for variable, _ in consumers]
        differ = len({*variables, producer}) == len(variables) + 1
        first = 0 if self.space.graph.read_first_by(value, self.node_variables) else None  # in order of execution
        scopes = [self._choosing(variable) for variable in variables]
        sizes = tuple(tuple(self.domains[v] for v in scope) for scope in scopes)
        demanded = [self._with_sums(*consumer) for consumer in consumers]
        makers: tuple[int, ...] = (producer,)
        before: tuple[AxisNames, ...] = ()
        if producer in self._entering:
            entering, before = self._entering[producer]
            makers = producer, entering
        edges = self.known.edges(facts, layouts, demanded, differ=differ, first=first, before=before, sizes=sizes)
        is_loose = not before and all(len(scope) == 1 for scope in scopes)
        if edges.both is not None:
            self.shared_by_two.add(value)
            loose = (variables[1], variables[0]) if is_loose else None
            self.tables.append(Table((*makers, *scopes[0], *scopes[1]), edges.both, loose))
        hub: tuple[int, ...] = ()
        if edges.hub is not None:
            hub = (self._variable(edges.hub.shape[-1]),)
            self.hubs[value] = hub[0], edges.shared
            self.tables.append(Table((*makers, *hub), edges.hub))
        for scope, costs in zip(scopes, edges.consumers, strict=edges.both is None):
            loose = (scope[0], hub[0]) if hub and is_loose else None
            self.tables.append(Table((*makers, *scope, *hub), costs, loose))

    def _may_sum_before(self, node: Node) -> bool:
        """Return whether an operator casts or views a parameter, and the sum of its gradient may stand before it."""
        graph, values = self.space.graph, self.space.graph.capture.values
        made = values[node.results[0]] if node.results else None
        if made is None or not made.of_parameter or not is_cast_or_view(node) or made.name in self.space.outputs:
            return False
        uses = graph.uses[made.name]
        return all(use.node.name in self.node_variables and graph.needs_gradient(use.node) for use in uses)

    def _add_entering(self, node: Node) -> None:
        value, found = node.results[0], dict[AxisNames, None]()
        shape, layouts = self.space.graph.capture.values[value].shape, self.produced(value)[1]
        for consumer in self.consumers(value):
            demanded = dict.fromkeys(self._with_sums(*consumer))
            found |= dict.fromkeys(self.known.entered(shape, tuple(dict.fromkeys(layouts)), tuple(demanded)))
        if found.keys() - {()}:
            axes = tuple({(): None} | found)
            self._entering[self.node_variables[node.name]] = self._variable(len(axes)), axes

    def _choosing(self, variable: int) -> tuple[int, ...]:
        """Return the variables of a consumer: its own, and that of where gradients are summed."""
        entering = self._entering.get(variable)
        return (variable,) if entering is None else (variable, entering[0])

    def _with_sums(self, variable: int, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        """Return what a consumer demands under each choice of its variables."""
        entering = self._entering.get(variable)
        return targets if entering is None else self.known.summing(targets, entering[1])

    def _demanded(self, value: str) -> Iterator[tuple[int, list[tuple[Target, ...]]]]:
        """Yield the readers of a value: the variable, and for each of its choices the targets that it may demand."""
        for variable, targets in self.consumers(value):
            demanded = self._with_sums(variable, targets)
            several = len(demanded) // len(targets)
            yield variable, [demanded[i * several : (i + 1) * several] for i in range(len(targets))]

    def ways_to(self, variable: int, targets: tuple[Target, ...]) -> tuple[tuple[Target, ...], ...]:
        """Return what a consumer may demand under each choice, one by one for the places where gradients are summed."""
        if variable not in self._entering:
            return (targets,)
        return tuple(self.known.summing(targets, (axes,)) for axes in self._entering[variable][1])

    def _add_output(self, value: str, producer: int, layouts: tuple[Layout, ...]) -> None:
        """A value that leaves the program is brought to its layout; a gradient comes back to the loss alone."""
        capture = self.space.graph.capture
        facts = capture.values[value]
        if value != capture.loss:
            facts = replace(facts, needs_gradient=False, read_first=False)
        costs = self.known.array(facts, layouts, (Target(self.space.outputs[value]),))
        self.tables.append(Table((producer,), costs[:, 0]))

    def produced(self, value: str) -> tuple[int, tuple[Layout, ...]]:
        """The variable that decides how a value is made or stored, and the layout under each of its choices."""
        if value in self.leaf_variables:
            return self.leaf_variables[value], tuple(self.space.leaves[value])
        node, index = self.space.graph.producers[value]
        return self.node_variables[node.name], self.known.layouts(node, index, self.space.strategies[node.name])

    def consumers(self, value: str) -> list[tuple[int, tuple[Target, ...]]]:
        """Return the readers of a value: the variable, and for each of its choices the target that it demands."""
        if value not in self._read_by:
            self._read_by[value] = self._consumers(value)
        return self._read_by[value]

    def _consumers(self, value: str) -> list[tuple[int, tuple[Target, ...]]]:
        # An operator that reads a value twice alike pays once; equal targets are one object.
        found: dict[tuple[int, int], tuple[int, tuple[Target, ...]]] = {}
        for use in self.space.graph.uses[value]:
            if use.node.name in self.node_variables:
                targets = self.known.targets(use, self.space.strategies[use.node.name])
                variable = self.node_variables[use.node.name]
                found[variable, id(targets)] = variable, targets
        return list(found.values())
