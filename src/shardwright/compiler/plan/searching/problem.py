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

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property

import numpy as np

from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.redistribute import possible
from shardwright.compiler.plan.minima.learned import Learned
from shardwright.compiler.plan.minima.narrow import ENOUGH, least
from shardwright.compiler.plan.minima.tables import Indices, Minimum, Table, among, cost_at
from shardwright.compiler.plan.pricing.targets import Target
from shardwright.compiler.plan.searching.known import Known
from shardwright.compiler.plan.searching.space import Space
from shardwright.compiler.rules.notation import Strategy
from shardwright.errors import PlanError

Solution = tuple[float, dict[str, Strategy], dict[str, Layout]]
"""A cost, strategies by operator, layouts by leaf."""


class Problem:
    """The variables and tables of some operators of a space.

    Args:
        nodes: the names of the operators that are variables.
        priced: those of them whose own cost counts; by default all.
        values: whose ways to these operators count; by default those of all that these operators make or read.
    """

    def __init__(
        self,
        space: Space,
        known: Known,
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
        """What values are shared by a hub: the variable, and the targets that its choices stand for."""
        for value in graph.capture.values if values is None else values:
            if value in self.leaf_variables or graph.producers[value][0].name in nodes:
                self._add_transfers(value)
        self.block_variables = {block.name: self._variable(2) for block in space.blocks}
        """Whether the inside of a block is kept, or computed again by the backward."""

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
    ) -> Minimum:
        """The least cost with ``more`` tables over the same variables, and what attains it, by variable.

        What is learned of choices is of use for other tables, as at the next price of a byte; not so with
        ``forbidding`` tables, which hold for this time. A gap of ``enough``, as a share, is worth no further round.

        Raises:
            NothingBelow: where no choice was found that costs less than ``below``.
        """
        learned = self._learned.copied() if forbidding else self._learned
        if self._left is None:
            return least(self.domains, [*self.tables, *more, *forbidding], below=below, enough=enough, learned=learned)
        tables = [*self._tables_left, *among(self._left, [*more, *forbidding], {})]
        found = least([len(of) for of in self._left], tables, below=below, enough=enough, learned=learned)
        return replace(found, picked=[int(of[i]) for of, i in zip(self._left, found.picked, strict=True)])

    @cached_property
    def _learned(self) -> Learned:
        """Return what searches of these variables have learned, to which each adds.

        Cached with the values that are left, which stay the same: `among` makes another.
        """
        return Learned.nothing(self.domains if self._left is None else [len(of) for of in self._left])

    @cached_property
    def _tables_left(self) -> list[Table]:
        """Return the tables for the values that are left.

        Cached with these: tables are added before the first search alone, and `among` makes another.
        """
        return among(self._left, self.tables, {}) if self._left is not None else self.tables

    def among(self, left: Mapping[str, Indices]) -> Problem:
        """The same variables and tables, of which some values alone are searched: of operators those that are ``left``.

        Of what consumers may share that is left which two of them may still demand.
        """
        found = copy.copy(self)
        found.__dict__ = {name: of for name, of in vars(self).items() if name not in ("_learned", "_tables_left")}
        found._left = [np.arange(size) for size in self.domains]
        for name, variable in self.node_variables.items():
            found._left[variable] = left[name]
        for value, (variable, shared) in self.hubs.items():
            options = ({targets[i] for i in found._left[v].tolist()} for v, targets in self.consumers(value))
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
        """What a choice for every variable costs."""
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
        edges = self.known.edges(facts, layouts, [targets for _, targets in consumers])
        hub: tuple[int, ...] = ()
        if edges.hub is not None:
            hub = (self._variable(edges.hub.shape[1]),)
            self.hubs[value] = hub[0], edges.shared
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

    def produced(self, value: str) -> tuple[int, tuple[Layout, ...]]:
        """The variable that decides how a value is made or stored, and the layout under each of its choices."""
        if value in self.leaf_variables:
            return self.leaf_variables[value], tuple(self.space.leaves[value])
        node, index = self.space.graph.producers[value]
        return self.node_variables[node.name], self.known.layouts(node, index, self.space.strategies[node.name])

    def consumers(self, value: str) -> list[tuple[int, tuple[Target, ...]]]:
        """Who reads a value: the variable, and for each of its choices the target that it demands."""
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
