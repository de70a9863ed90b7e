"""What operators and ways between layouts cost, worked out once for all that are alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.minima.tables import Costs
from shardwright.compiler.plan.pricing.cost import Objective, operator_collectives
from shardwright.compiler.plan.pricing.pairs import pairs_on
from shardwright.compiler.plan.pricing.ruled import RuledGraph, Use
from shardwright.compiler.plan.pricing.targets import Target, each_made_by, targets_of
from shardwright.compiler.rules.notation import Strategy

# Larger three-way tables are not worth their sharing: the consumers of such a value are charged singly.
SHARING_LIMIT = 4_000_000

T = TypeVar("T")


class Known:
    """What costs and layouts were worked out, by the facts that they follow from: equal layers share whole arrays.

    All searches on one mesh for one objective share it, whatever each may choose: none prices again what another has.

    Rules and lists of strategies are told apart by identity, as equal ones are one object in a `RuledGraph` and a
    `Space`, and held, so that no other object has theirs. Cached by these and by what else the function reads that is
    called where nothing is known: of an operator the number of those that are alike, of a value shape, dtype, whether
    it has a gradient and whether it is a parameter.
    """

    def __init__(self, graph: RuledGraph, objective: Objective, mesh: Mesh) -> None:
        self.graph, self.objective, self.mesh = graph, objective, mesh
        self.pairs = pairs_on(objective, mesh)
        self._kept: dict[int, object] = {}  # so that no identity is given to another object
        self._operators: dict[Hashable, Costs] = {}
        self._prices: dict[Hashable, dict[Strategy, float]] = {}
        self._layouts: dict[Hashable, tuple[Layout, ...]] = {}
        self._targets: dict[Hashable, tuple[Target, ...]] = {}
        self._same: dict[tuple[Target, ...], tuple[Target, ...]] = {}
        self._leaves: dict[Hashable, Costs] = {}
        self._arrays: dict[Hashable, Costs] = {}
        self._edges: dict[Hashable, Edges] = {}
        self._buffers: dict[Hashable, Costs] = {}
        self._alone: dict[Any, Any] = {}

    def alone(self, choice: T) -> tuple[T, ...]:
        """A list of choices that has one alone: equal ones are one object."""
        found: tuple[T, ...] = self._alone.setdefault(choice, (choice,))
        return found

    def operator(self, node: Node, strategies: Sequence[Strategy]) -> Costs:
        """What an operator costs under each strategy."""
        return self._operator(self.objective.operator, node, strategies)

    def forward(self, node: Node, strategies: Sequence[Strategy]) -> Costs:
        """What the forward of an operator costs once more under each strategy."""
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
        if key not in self._layouts:
            self._layouts[key] = each_made_by(self.graph, node, index, strategies, self.mesh)
        return self._layouts[key]

    def targets(self, use: Use, strategies: Sequence[Strategy]) -> tuple[Target, ...]:
        """What an operand must be under each strategy of its operator."""
        rule, value = self.graph.rules[use.node.name], self.graph.capture.values[use.node.operands[use.index]]
        key = self._identity(rule), self._identity(strategies), use.index, value.shape, value.needs_gradient
        if key not in self._targets:
            made = targets_of(self.graph, use.node, use.index, strategies, self.mesh)
            self._targets[key] = self._same.setdefault(made, made)  # equal ones are one object
        return self._targets[key]

    def leaf(self, value: Value, layouts: Sequence[Layout]) -> Costs:
        """What it costs to hold a leaf in each layout."""
        key = _alike(value), self._identity(layouts)
        if key not in self._leaves:
            self._leaves[key] = np.array([self.objective.leaf(value, layout, self.mesh) for layout in layouts])
        return self._leaves[key]

    def edges(self, facts: Value, layouts: tuple[Layout, ...], demanded: Sequence[tuple[Target, ...]]) -> Edges:
        """What a value's way from each layout to each target costs; ``demanded`` has the targets of each consumer."""
        key = _alike(facts), self._identity(layouts), tuple(self._identity(targets) for targets in demanded)
        if key not in self._edges:
            kinds, targets = tuple(dict.fromkeys(layouts)), tuple(dict.fromkeys(itertools.chain(*demanded)))
            at = {layout: i for i, layout in enumerate(kinds)}
            costs = self.array(facts, kinds, targets)[[at[layout] for layout in layouts]]
            self._edges[key] = _edges(costs, targets, demanded)
        return self._edges[key]

    def array(self, facts: Value, layouts: tuple[Layout, ...], targets: tuple[Target, ...]) -> Costs:
        """What it costs to bring a value from each layout to each target."""
        key = _alike(facts), layouts, targets
        if key not in self._arrays:
            self._arrays[key] = self.pairs.costs(facts, layouts, targets)
        return self._arrays[key]

    def largest_buffers(self, facts: Value, layouts: tuple[Layout, ...], targets: tuple[Target, ...]) -> Costs:
        """The bytes of the largest buffer on a value's way from each layout to each target."""
        key = _alike(facts), self._identity(layouts), self._identity(targets)
        if key not in self._buffers:
            self._buffers[key] = self.pairs.buffers(facts, layouts, targets)
        return self._buffers[key]

    def _identity(self, kept: object) -> int:
        self._kept[id(kept)] = kept
        return id(kept)


def _largest_inside(graph: RuledGraph, node: Node, strategy: Strategy, mesh: Mesh) -> float:
    return max((c.bytes for c in operator_collectives(graph, node, strategy, mesh)), default=0)


def _alike(facts: Value) -> Hashable:
    """What the cost of a transfer reads of a value."""
    return facts.shape, facts.dtype, facts.needs_gradient, facts.kind == "parameter"


@dataclass(frozen=True)
class Edges:
    """The tables of a value: over its producer and each consumer, and where a target is shared, over the hub, too.

    Consumers cannot see which target another demands. A variable between them, the hub, settles which target is paid
    for once; who demands that one pays nothing, every other pays for itself.
    """

    hub: Costs | None  # producer x hub; the hub's last choice: nothing is shared
    consumers: tuple[Costs, ...]  # producer x consumer, or producer x consumer x hub
    shared: tuple[Target, ...] = ()  # what each choice of the hub but the last stands for


def _edges(costs: Costs, targets: Sequence[Target], demanded: Sequence[tuple[Target, ...]]) -> Edges:
    """The tables for a value whose way to each target costs ``costs``, by the producer's choices."""
    column = {target: at for at, target in enumerate(targets)}
    columns = [np.array([column[target] for target in of]) for of in demanded]
    shared = _shareable(costs, columns)
    if not shared:
        return Edges(None, tuple(costs[:, at] for at in columns))
    free = [at[:, None] == np.array([*shared, -1]) for at in columns]  # consumer x hub
    cubes = (np.where(f[None], 0.0, costs[:, at][:, :, None]) for at, f in zip(columns, free, strict=True))
    hub = np.concatenate([costs[:, shared], np.zeros((len(costs), 1))], axis=1)
    return Edges(hub, tuple(cubes), tuple(targets[at] for at in shared))


def _shareable(costs: Costs, columns: Sequence[npt.NDArray[np.intp]]) -> list[int]:
    """The columns of targets that at least two consumers may demand and that may cost something."""
    demanded = [int(at) for consumer in columns for at in dict.fromkeys(consumer.tolist())]
    finite = np.where(np.isfinite(costs), costs, 0.0).max(axis=0)
    shared = [at for at in dict.fromkeys(demanded) if demanded.count(at) > 1 and finite[at] > 0]
    widest = max((len(consumer) for consumer in columns), default=0)
    return shared if len(costs) * widest * (len(shared) + 1) <= SHARING_LIMIT else []
