"""The search for a plan as a problem over discrete variables, and its solution.

Variables: the strategy of every operator, the layout of every leaf that is free, and for every value with several
consumers a *shared target*: the redistribution that those consumers have in common and that is made once.

    minimise   sum over operators n:            operator(n, s_n)
             + sum over values v, consumers c:  transfer(layout of v, target of c), unless that is v's shared target
             + sum over values v:               transfer(layout of v, shared target of v)
             + sum over leaves l:               leaf(layout of l)

The first two lines alone would charge the gradient reduction of a transformer's hidden state three times, for q, k
and v. A value that would share two different targets is charged too much for the second: the objective is then an
upper bound of the plan's cost, else it is equal to it.

Rotary tables, masks and position ids are read by every layer, and would tie all layers to each other. They have no
gradient, and whole on every rank they are in every layout by local slices. What makes them stands *beside* the rest: it
is left out at first, as if it cost nothing, and decided when the rest is. The first minimum, with what these operators
cost at least, is a lower bound of every plan's cost; how far the final cost is above it is the gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwright.errors import PlanError
from shardwright.graph.ir import Node, Value
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import possible, redistribute
from shardwright.plan.cost import Objective
from shardwright.plan.decisions import Target, target_of
from shardwright.plan.exact import Costs, Table, TooWide, minimise
from shardwright.plan.ruled import RuledGraph, Use
from shardwright.rules.notation import Strategy

# A value from the batch that one operator reads ties nothing together.
MANY_READERS = 2
# Larger three-way tables are not worth their sharing: the consumers of such a value are charged singly.
SHARING_LIMIT = 4_000_000


@dataclass(frozen=True)
class Space:
    """What may be chosen. ``leaves`` holds one layout for a leaf that is fixed, several for one that is free."""

    graph: RuledGraph
    mesh: Mesh
    strategies: Mapping[str, Sequence[Strategy]]
    leaves: Mapping[str, Sequence[Layout]]
    outputs: Mapping[str, Layout]


@dataclass(frozen=True)
class Choice:
    """What was chosen and, where it was searched, the objective there and a bound that no choice is below."""

    strategies: Mapping[str, Strategy]
    leaves: Mapping[str, Layout]
    cost: float | None = None
    bound: float | None = None


def search(space: Space, objective: Objective) -> Choice:
    """The choice with the least cost.

    Raises:
        PlanError: where the search would be too large, or nothing is possible.
    """
    beside = operators_beside(space)
    known = _Known(space.graph, objective, space.mesh)
    others = {node.name for node in space.graph.capture.nodes} - beside
    cost, strategies, leaves = _Problem(space, known, others).solved()
    if not beside:
        return Choice(strategies, leaves, cost, cost)
    bound = cost
    try:
        more, of_beside, their_leaves = _beside(beside, space, known, strategies, leaves).solved()
    except TooWide:
        raise
    except PlanError:  # the rest demands partial sums, which what stands beside it cannot make
        problem = _Problem(space, known, others)
        problem.demand_no_sums(beside)
        cost, strategies, leaves = problem.solved()
        more, of_beside, their_leaves = _beside(beside, space, known, strategies, leaves).solved()
    least = sum(
        float(known.operator(node, [space.graph.rules[node.name].replicated(), *space.strategies[node.name]]).min())
        for node in space.graph.capture.nodes
        if node.name in beside
    )
    return Choice(strategies | of_beside, leaves | their_leaves, cost + more, bound + min(least, more))


def _beside(
    beside: Set[str], space: Space, known: _Known, decided: Mapping[str, Strategy], leaves: Mapping[str, Layout]
) -> _Problem:
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
    return _Problem(within, known, beside | readers, priced=beside, values=made)


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


class _Known:
    """What costs and layouts were worked out, by the facts that they follow from: equal layers share whole arrays.

    Rules and lists of strategies are told apart by identity, as equal ones are one object in a `RuledGraph` and a
    `Space`.
    """

    def __init__(self, graph: RuledGraph, objective: Objective, mesh: Mesh) -> None:
        self.graph, self.objective, self.mesh = graph, objective, mesh
        self._kept: list[object] = []  # so that no identity is given to another object
        self._operators: dict[Hashable, Costs] = {}
        self._layouts: dict[Hashable, tuple[Layout, ...]] = {}
        self._targets: dict[Hashable, tuple[Target, ...]] = {}
        self._single: dict[Hashable, dict[tuple[Layout, Target], float]] = {}
        self._arrays: dict[Hashable, Costs] = {}
        self._edges: dict[Hashable, _Edges] = {}

    def operator(self, node: Node, strategies: Sequence[Strategy]) -> Costs:
        """What an operator costs under each strategy."""
        values = self.graph.capture.values
        facts = tuple(
            (values[n].shape, values[n].dtype, values[n].needs_gradient) for n in node.operands + node.results
        )
        names = list(dict.fromkeys(node.operands))  # an operand that is read twice counts once
        repeated = tuple(names.index(name) for name in node.operands)
        key = node.op, node.args, node.kwargs, repeated, facts, self._identity(strategies)
        if key not in self._operators:
            costs = [self.objective.operator(self.graph, node, s, self.mesh) for s in strategies]
            self._operators[key] = np.array(costs)
        return self._operators[key]

    def layouts(self, node: Node, index: int, strategies: Sequence[Strategy]) -> tuple[Layout, ...]:
        """The layout of a result under each strategy."""
        rule, shape = self.graph.rules[node.name], self.graph.capture.values[node.results[index]].shape
        key = self._identity(rule), self._identity(strategies), index, shape
        if key not in self._layouts:
            made = (rule.result_layout(index, s, self.mesh).normalised(shape, self.mesh) for s in strategies)
            self._layouts[key] = tuple(made)
        return self._layouts[key]

    def targets(self, use: Use, strategies: Sequence[Strategy]) -> tuple[Target, ...]:
        """What an operand must be under each strategy of its operator."""
        rule, value = self.graph.rules[use.node.name], self.graph.capture.values[use.node.operands[use.index]]
        key = self._identity(rule), self._identity(strategies), use.index, value.shape, value.needs_gradient
        if key not in self._targets:
            self._targets[key] = tuple(target_of(self.graph, use.node, use.index, s, self.mesh) for s in strategies)
        return self._targets[key]

    def edges(self, facts: Value, layouts: tuple[Layout, ...], demanded: Sequence[tuple[Target, ...]]) -> _Edges:
        """What a value's way from each layout to each target costs; ``demanded`` has the targets of each consumer."""
        key = _alike(facts), self._identity(layouts), tuple(self._identity(targets) for targets in demanded)
        if key not in self._edges:
            kinds, targets = tuple(dict.fromkeys(layouts)), tuple(dict.fromkeys(itertools.chain(*demanded)))
            costs = self.array(facts, kinds, targets)[[kinds.index(layout) for layout in layouts]]
            self._edges[key] = _edges(costs, targets, demanded)
        return self._edges[key]

    def array(self, facts: Value, layouts: tuple[Layout, ...], targets: tuple[Target, ...]) -> Costs:
        """What it costs to bring a value from each layout to each target."""
        table = self._arrays.get((_alike(facts), layouts, targets))
        if table is None:
            known = self._single.setdefault(_alike(facts), {})
            for pair in itertools.product(layouts, targets):
                if pair not in known:
                    known[pair] = self._cost(facts, *pair)
            table = np.array([[known[layout, target] for target in targets] for layout in layouts])
            self._arrays[_alike(facts), layouts, targets] = table
        return table

    def _cost(self, facts: Value, layout: Layout, target: Target) -> float:
        if not possible(layout, target.layout):
            return math.inf
        steps = redistribute(layout, target.layout, target.gradient_partial, facts.shape, self.mesh)
        return self.objective.transfer(facts, steps, self.mesh)

    def _identity(self, kept: object) -> int:
        self._kept.append(kept)
        return id(kept)


def _alike(facts: Value) -> Hashable:
    """What the cost of a transfer reads of a value."""
    return facts.shape, facts.dtype, facts.needs_gradient, facts.kind == "parameter"


@dataclass(frozen=True)
class _Edges:
    """The tables of a value: over its producer and each consumer, and where a target is shared, over the hub, too.

    Consumers cannot see which target another demands. A variable between them, the hub, settles which target is paid
    for once; who demands that one pays nothing, every other pays for itself.
    """

    hub: Costs | None  # producer x hub; the hub's last choice: nothing is shared
    consumers: tuple[Costs, ...]  # producer x consumer, or producer x consumer x hub


def _edges(costs: Costs, targets: Sequence[Target], demanded: Sequence[tuple[Target, ...]]) -> _Edges:
    """The tables for a value whose way to each target costs ``costs``, by the producer's choices."""
    column = {target: at for at, target in enumerate(targets)}
    columns = [np.array([column[target] for target in of]) for of in demanded]
    shared = _shareable(costs, columns)
    if not shared:
        return _Edges(None, tuple(costs[:, at] for at in columns))
    free = [np.array([[s == c for s in [*shared, -1]] for c in at]) for at in columns]  # consumer x hub
    cubes = (np.where(f[None], 0.0, costs[:, at][:, :, None]) for at, f in zip(columns, free, strict=True))
    return _Edges(np.concatenate([costs[:, shared], np.zeros((len(costs), 1))], axis=1), tuple(cubes))


def _shareable(costs: Costs, columns: Sequence[npt.NDArray[np.intp]]) -> list[int]:
    """The columns of targets that at least two consumers may demand and that may cost something."""
    demanded = [int(at) for consumer in columns for at in dict.fromkeys(consumer.tolist())]
    finite = np.where(np.isfinite(costs), costs, 0.0).max(axis=0)
    shared = [at for at in dict.fromkeys(demanded) if demanded.count(at) > 1 and finite[at] > 0]
    widest = max((len(consumer) for consumer in columns), default=0)
    return shared if len(costs) * widest * (len(shared) + 1) <= SHARING_LIMIT else []


class _Problem:
    """The variables and tables of some operators of a space.

    Args:
        nodes: the names of the operators that are variables.
        priced: those of them whose own cost counts; by default all.
        values: whose ways to these operators count; by default those of all that these operators make or read.
    """

    def __init__(
        self,
        space: Space,
        known: _Known,
        nodes: Set[str],
        *,
        priced: Set[str] | None = None,
        values: Set[str] | None = None,
    ) -> None:
        self.space = space
        self.known = known
        self.tables: list[Table] = []
        self.domains: list[int] = []
        graph = space.graph
        chosen = [node for node in graph.capture.nodes if node.name in nodes]
        self.node_variables = {node.name: self._variable(len(space.strategies[node.name])) for node in chosen}
        self.leaf_variables = {name: self._variable(len(layouts)) for name, layouts in space.leaves.items()}
        for node in chosen:
            if priced is None or node.name in priced:
                costs = known.operator(node, space.strategies[node.name])
                self.tables.append(Table((self.node_variables[node.name],), costs))
        for name, layouts in space.leaves.items():
            leaf = [known.objective.leaf(graph.capture.values[name], layout, space.mesh) for layout in layouts]
            self.tables.append(Table((self.leaf_variables[name],), np.array(leaf)))
        for value in graph.capture.values if values is None else values:
            if value in self.leaf_variables or graph.producers[value][0].name in nodes:
                self._add_transfers(value)

    def solved(self) -> tuple[float, dict[str, Strategy], dict[str, Layout]]:
        """The least cost, and the strategies and layouts that attain it."""
        cost, picked = minimise(self.domains, self.tables)
        return (
            cost,
            {name: self.space.strategies[name][picked[i]] for name, i in self.node_variables.items()},
            {name: self.space.leaves[name][picked[i]] for name, i in self.leaf_variables.items()},
        )

    def demand_no_sums(self, makers: Set[str]) -> None:
        """Forbid choices that need what other operators make, which are no variables here, as partial sums."""
        graph = self.space.graph
        for value, (maker, _) in graph.producers.items():
            if maker.name in makers:
                whole = Layout.replicated(len(graph.capture.values[value].shape))
                for variable, targets in self._consumers(value):
                    costs = [0.0 if possible(whole, target.layout) else math.inf for target in targets]
                    self.tables.append(Table((variable,), np.array(costs)))

    def _variable(self, size: int) -> int:
        if size == 0:
            raise PlanError("an operator or leaf has no possible choice")
        self.domains.append(size)
        return len(self.domains) - 1

    def _add_transfers(self, value: str) -> None:
        producer, layouts = self._produced(value)
        if value in self.space.outputs:
            self._add_output(value, producer, layouts)
        consumers = self._consumers(value)
        if not consumers:
            return
        facts = self.space.graph.capture.values[value]
        edges = self.known.edges(facts, layouts, [targets for _, targets in consumers])
        hub: tuple[int, ...] = ()
        if edges.hub is not None:
            hub = (self._variable(edges.hub.shape[1]),)
            self.tables.append(Table((producer, *hub), edges.hub))
        for (variable, _), costs in zip(consumers, edges.consumers, strict=True):
            self.tables.append(Table((producer, variable, *hub), costs))

    def _add_output(self, value: str, producer: int, layouts: tuple[Layout, ...]) -> None:
        """A value that leaves the program is brought to its layout; a gradient comes back to the loss alone."""
        capture = self.space.graph.capture
        facts = capture.values[value]
        if value != capture.loss:
            facts = replace(facts, needs_gradient=False)
        costs = self.known.array(facts, layouts, (Target(self.space.outputs[value]),))
        self.tables.append(Table((producer,), costs[:, 0]))

    def _produced(self, value: str) -> tuple[int, tuple[Layout, ...]]:
        """The variable that decides how a value is made or stored, and the layout under each of its choices."""
        if value in self.leaf_variables:
            return self.leaf_variables[value], tuple(self.space.leaves[value])
        node, index = self.space.graph.producers[value]
        return self.node_variables[node.name], self.known.layouts(node, index, self.space.strategies[node.name])

    def _consumers(self, value: str) -> list[tuple[int, tuple[Target, ...]]]:
        """Who reads a value: the variable, and for each of its choices the target that it demands."""
        found: dict[tuple[int, tuple[Target, ...]], None] = {}  # an operator that reads a value twice alike pays once
        for use in self.space.graph.uses[value]:
            if use.node.name in self.node_variables:
                targets = self.known.targets(use, self.space.strategies[use.node.name])
                found[self.node_variables[use.node.name], targets] = None
        return list(found)
