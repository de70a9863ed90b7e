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
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.errors import PlanError
from shardwright.graph.ir import Node, Value
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import possible, redistribute
from shardwright.plan.cost import Objective
from shardwright.plan.decisions import Target, target_of
from shardwright.plan.exact import Costs, Table, minimise
from shardwright.plan.ruled import RuledGraph
from shardwright.rules.notation import Strategy

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
    """What was chosen, and the value of the objective there."""

    strategies: Mapping[str, Strategy]
    leaves: Mapping[str, Layout]
    cost: float


def search(space: Space, objective: Objective) -> Choice:
    """The choice with the least cost.

    Raises:
        PlanError: where the search would be too large, or nothing is possible.
    """
    problem = _Problem(space, objective)
    cost, picked = minimise(problem.domains, problem.tables)
    return Choice(
        {name: space.strategies[name][picked[i]] for name, i in problem.node_variables.items()},
        {name: space.leaves[name][picked[i]] for name, i in problem.leaf_variables.items()},
        cost,
    )


class _Consumer:
    """A variable that reads a value: for each of its choices the target that it demands."""

    def __init__(self, variable: int, targets: Sequence[Target]) -> None:
        self.variable = variable
        self.targets = targets


class _Problem:
    def __init__(self, space: Space, objective: Objective) -> None:
        self.space = space
        self.objective = objective
        self.tables: list[Table] = []
        self.domains: list[int] = []
        self.known: dict[Hashable, dict[tuple[Layout, Target], float]] = {}  # by the facts that a transfer's cost reads
        self.transfers: dict[Hashable, Costs] = {}  # whole arrays of the same, which identical layers share
        graph = space.graph
        self.node_variables = {
            node.name: self._variable(len(space.strategies[node.name])) for node in graph.capture.nodes
        }
        self.leaf_variables = {name: self._variable(len(layouts)) for name, layouts in space.leaves.items()}
        for node in graph.capture.nodes:
            costs = [objective.operator(graph, node, s, space.mesh) for s in space.strategies[node.name]]
            self.tables.append(Table((self.node_variables[node.name],), np.array(costs)))
        for name, layouts in space.leaves.items():
            costs = [objective.leaf(graph.capture.values[name], layout, space.mesh) for layout in layouts]
            self.tables.append(Table((self.leaf_variables[name],), np.array(costs)))
        for value in graph.capture.values:
            self._add_transfers(value)

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
        targets = list(dict.fromkeys(t for consumer in consumers for t in consumer.targets))
        if not targets:
            return
        kinds = list(dict.fromkeys(layouts))
        costs = self._costs(self.space.graph.capture.values[value], tuple(kinds), tuple(targets))
        row = {layout: i for i, layout in enumerate(kinds)}
        rows = np.array([row[layout] for layout in layouts])
        column = {target: i for i, target in enumerate(targets)}
        # Consumers cannot see which target another demands. A variable between them, the hub, settles which target is
        # paid for once; who demands that one pays nothing, every other pays for itself.
        shared = self._shareable(consumers, costs, column, len(layouts))
        if shared:
            hub = self._variable(len(shared) + 1)  # the last choice: nothing is shared
            table = np.concatenate([costs[rows][:, shared], np.zeros((len(rows), 1))], axis=1)
            self.tables.append(Table((producer, hub), table))
        for consumer in consumers:
            columns = np.array([column[target] for target in consumer.targets])
            table = costs[rows][:, columns]
            if not shared:
                self.tables.append(Table((producer, consumer.variable), table))
            else:
                free = np.array([[s == c for s in [*shared, -1]] for c in columns])  # consumer x hub
                cube = np.where(free[None], 0.0, table[:, :, None])
                self.tables.append(Table((producer, consumer.variable, hub), cube))

    def _add_output(self, value: str, producer: int, layouts: Sequence[Layout]) -> None:
        """A value that leaves the program is brought to its layout; a gradient comes back to the loss alone."""
        capture = self.space.graph.capture
        facts = capture.values[value]
        if value != capture.loss:
            facts = replace(facts, needs_gradient=False)
        costs = self._costs(facts, tuple(layouts), (Target(self.space.outputs[value]),))
        self.tables.append(Table((producer,), costs[:, 0]))

    def _produced(self, value: str) -> tuple[int, list[Layout]]:
        """The variable that decides how a value is made or stored, and the layout under each of its choices."""
        if value in self.leaf_variables:
            return self.leaf_variables[value], list(self.space.leaves[value])
        graph, mesh = self.space.graph, self.space.mesh
        node, index = graph.producers[value]
        shape = graph.capture.values[value].shape
        rule = graph.rules[node.name]
        made = [rule.result_layout(index, s, mesh).normalised(shape, mesh) for s in self.space.strategies[node.name]]
        return self.node_variables[node.name], made

    def _consumers(self, value: str) -> list[_Consumer]:
        graph = self.space.graph
        found: list[_Consumer] = []
        seen: set[tuple[int, tuple[Target, ...]]] = set()
        for use in graph.uses[value]:
            targets = tuple(self._targets(use.node, use.index))
            variable = self.node_variables[use.node.name]
            if (variable, targets) not in seen:  # an operator that reads a value twice in the same way pays once
                seen.add((variable, targets))
                found.append(_Consumer(variable, targets))
        return found

    def _targets(self, node: Node, index: int) -> list[Target]:
        space = self.space
        return [target_of(space.graph, node, index, s, space.mesh) for s in space.strategies[node.name]]

    def _costs(self, facts: Value, layouts: tuple[Layout, ...], targets: tuple[Target, ...]) -> Costs:
        """What it costs to bring a value from each layout to each target. Values of equal facts share their tables."""
        alike = (facts.shape, facts.dtype, facts.needs_gradient, facts.kind == "parameter")
        table = self.transfers.get((alike, layouts, targets))
        if table is None:
            known = self.known.setdefault(alike, {})
            for pair in itertools.product(layouts, targets):
                if pair not in known:
                    known[pair] = self._cost(facts, *pair)
            table = np.array([[known[layout, target] for target in targets] for layout in layouts])
            self.transfers[alike, layouts, targets] = table
        return table

    def _cost(self, facts: Value, layout: Layout, target: Target) -> float:
        if not possible(layout, target.layout):
            return math.inf
        steps = redistribute(layout, target.layout, target.gradient_partial, facts.shape, self.space.mesh)
        return self.objective.transfer(facts, steps, self.space.mesh)

    def _shareable(
        self, consumers: Sequence[_Consumer], costs: Costs, column: Mapping[Target, int], rows: int
    ) -> list[int]:
        """The columns of targets that at least two consumers may demand and that may cost something."""
        demanded = [column[target] for consumer in consumers for target in set(consumer.targets)]
        finite = np.where(np.isfinite(costs), costs, 0.0).max(axis=0)
        shared = [at for at in dict.fromkeys(demanded) if demanded.count(at) > 1 and finite[at] > 0]
        widest = max((len(consumer.targets) for consumer in consumers), default=0)
        return shared if rows * widest * (len(shared) + 1) <= SHARING_LIMIT else []
