"""What choices hold in memory, as tables beside those of what they cost.

    bytes(choices) = sum over parameters:               part, gradient, states of the optimizer
                   + sum over operators:                results that they keep themselves, and what they make inside
                   + sum over operands that are kept:   the memory in which the operand lies

What is gathered for operators need not be kept so: the backward can gather it again, for what that costs. Such an
operand counts what is less at a price: its bytes, or those that it is gathered from and the second gathering.

Several operands may lie in the same memory, which is held once. Each then counts a share of it, such that the shares of
all that can lie together make one: where choices keep them apart after all, the sum is below what is held, and never
above. So a bound that is computed with these tables is one for what is really held.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.graph.ir import Node, Value
from shardwright.mesh.layout import Layout
from shardwright.plan.pricing.memory import Kept, local_bytes
from shardwright.plan.pricing.optimizers import OptimizerStates
from shardwright.plan.pricing.ruled import Use
from shardwright.plan.pricing.targets import Target
from shardwright.plan.searching.exact import Costs, Table
from shardwright.plan.searching.problem import Problem
from shardwright.rules.notation import Strategy


@dataclass(frozen=True)
class Gathering:
    """What is held of an operand that the backward gathers again, and what that costs; infinite where it cannot."""

    bytes: Costs
    costs: Costs


class Weights:
    """The bytes that the choices of a problem hold: tables over its variables, of which equal ones are one array."""

    def __init__(self, problem: Problem, optimizer: OptimizerStates) -> None:
        self._problem, self._optimizer = problem, optimizer
        self._graph = problem.space.graph
        self._kept = Kept(self._graph)
        self._known: dict[Hashable, Costs] = {}
        self._gatherings: dict[Hashable, Gathering] = {}
        self._held: list[object] = []  # so that no identity is given to another object
        self._priced: dict[tuple[int, int, float], Costs] = {}
        self.fixed_bytes = 0
        """What all choices hold: inputs, buffers and constants."""
        self.tables = [table for table in (*self._leaves(), *self._operators()) if table.costs.any()]
        self.gathered = list(self._operands())
        """Values that operators keep, with the bytes that this takes, and what it is to gather them again."""

    def at(self, price: float) -> list[Table]:
        """The tables at so much for a byte."""
        found = []
        for table in self.tables:
            key = id(table.costs), 0, price
            if key not in self._priced:
                self._priced[key] = table.costs * price
            found.append(Table(table.scope, self._priced[key]))
        for _, table, again in self.gathered:
            key = id(table.costs), id(again.costs), price
            if key not in self._priced:
                self._priced[key] = np.minimum(table.costs * price, again.bytes * price + again.costs)
            found.append(Table(table.scope, self._priced[key]))
        return found

    def again(self, price: float, picked: Sequence[int]) -> tuple[frozenset[str], float]:
        """The values that are better gathered again than kept at a price of a byte, and what that costs."""
        saved: Counter[str] = Counter()
        costs: Counter[str] = Counter()
        for name, table, again in self.gathered:
            at = tuple(picked[v] for v in table.scope)
            if math.isfinite(again.costs[at]):
                saved[name] += table.costs[at] - again.bytes[at]
                costs[name] += again.costs[at]
        chosen = frozenset(name for name in saved if saved[name] * price > costs[name])
        return chosen, float(sum(costs[name] for name in chosen))

    def of(self, picked: Sequence[int]) -> float:
        """The bytes of one choice for every variable, where nothing is gathered again."""
        tables = [*self.tables, *(table for _, table, _ in self.gathered)]
        return self.fixed_bytes + sum(float(t.costs[tuple(picked[v] for v in t.scope)]) for t in tables)

    def _leaves(self) -> list[Table]:
        found = []
        mesh = self._problem.space.mesh
        for name, layouts in self._problem.space.leaves.items():
            value = self._graph.capture.values[name]
            parts = [local_bytes(value, layout, mesh) for layout in layouts]
            if value.kind != "parameter":
                self.fixed_bytes += min(parts)
            elif value.needs_gradient:
                parts = [2 * part + self._optimizer.bytes_for(part) for part in parts]
            if value.kind == "parameter":
                array = self._known.setdefault(("leaf", tuple(parts)), np.array(parts, dtype=float))
                found.append(Table((self._problem.leaf_variables[name],), array))
        return found

    def _operators(self) -> list[Table]:
        found = []
        for node in self._graph.capture.nodes:
            saved = self._kept.saved[node.name]
            variable = self._problem.node_variables.get(node.name)
            if variable is None or not (saved.results or saved.beside):
                continue
            strategies = self._problem.space.strategies[node.name]
            facts = tuple((v.shape, v.dtype) for v in map(self._value, (*node.operands, *node.results)))
            key = node.op, saved, facts, self._identity(strategies)
            if key not in self._known:
                self._known[key] = np.array([self._inside(node, strategy) for strategy in strategies], dtype=float)
            found.append(Table((variable,), self._known[key]))
        return found

    def _inside(self, node: Node, strategy: Strategy) -> int:
        """What an operator keeps of its results and beside them."""
        rule, mesh = self._graph.rules[node.name], self._problem.space.mesh
        layouts = {name: rule.operand_layout(i, strategy) for i, name in enumerate(node.operands)}
        layouts |= {name: rule.result_layout(i, strategy, mesh) for i, name in enumerate(node.results)}
        made = {node.results[i] for i in self._kept.saved[node.name].results or ()}
        results = sum(local_bytes(self._value(name), layouts[name], mesh) for name in made)
        return results + self._kept.beside(node, layouts.__getitem__, mesh)

    def _operands(self) -> Iterator[tuple[str, Table, Gathering]]:
        """What is kept of the operands, by the variables of who makes and who keeps them."""
        root = self._roots()
        uses = [
            Use(node, i)
            for node in self._graph.capture.nodes
            if node.name in self._problem.node_variables
            for i in dict.fromkeys(self._kept.saved[node.name].operands or ())
        ]
        once = {(use.node.name, use.node.operands[use.index]): use for use in uses}
        sharing = Counter(root[name] for _, name in once)
        kept_by_makers = {
            node.results[i] for node in self._graph.capture.nodes for i in self._kept.saved[node.name].results or ()
        }
        for (_, name), use in once.items():
            of = self._value(root[name])
            in_place = (
                0.0 if of.kind != "result" or of.name in kept_by_makers else min(1.0, _size(of, self._value(name)))
            )
            shares = in_place / sharing[of.name], 1 / sharing[of.name]
            table = self._operand(name, use, *shares)
            if table is not None and table.costs.any():
                yield name, table, self._gathering(name, use, *shares)

    def _gathering(self, name: str, use: Use, in_place: float, moved: float) -> Gathering:
        """What it is to gather an operand again, by the choices of who makes and who keeps it."""
        problem, value = self._problem, self._value(name)
        layouts = problem.produced(name)[1]
        targets = problem.known.targets(use, problem.space.strategies[use.node.name])
        key = (
            value.shape,
            value.dtype,
            value.kind == "parameter",
            value.needs_gradient,
            in_place,
            moved,
            layouts,
            self._identity(targets),
        )
        if key not in self._gatherings:
            costs = self._again(value, layouts, targets) * moved
            sizes = in_place * self._parts(value, layouts)
            self._gatherings[key] = Gathering(sizes[:, None].repeat(len(targets), axis=1), costs)
        return self._gatherings[key]

    def _again(self, value: Value, layouts: Sequence[Layout], targets: Sequence[Target]) -> Costs:
        """What it costs to move a value once more, without its gradient; infinite where that would sum once more."""
        pairs = self._problem.known.pairs
        costs = pairs.costs(replace(value, needs_gradient=False), layouts, targets)
        moves = pairs.moves(value.shape, layouts, targets)
        again = moves.alone & (value.kind == "parameter" or value.needs_gradient)
        costs[moves.possible & moves.copies & ~again] = math.inf
        costs[~moves.possible] = 0.0
        return costs

    def _operand(self, name: str, use: Use, in_place: float, moved: float) -> Table | None:
        """The bytes of an operand where it is kept as it was made, and where it is moved first, by shares of each."""
        problem, value = self._problem, self._value(name)
        made = name in problem.leaf_variables or self._graph.producers[name][0].name in problem.node_variables
        if not made:
            return None
        producer, layouts = problem.produced(name)
        targets = problem.known.targets(use, problem.space.strategies[use.node.name])
        key = value.shape, value.dtype, in_place, moved, layouts, self._identity(targets)
        if key not in self._known:
            moves = problem.known.pairs.moves(value.shape, layouts, targets)
            there = moved * self._parts(value, [target.layout for target in targets])
            here = in_place * self._parts(value, layouts)
            self._known[key] = np.where(moves.possible, np.where(moves.copies, there[None], here[:, None]), 0.0)
        return Table((producer, problem.node_variables[use.node.name]), self._known[key])

    def _parts(self, value: Value, layouts: Sequence[Layout]) -> Costs:
        """The bytes that a device holds of a value in each layout."""
        sizes = {layout: local_bytes(value, layout, self._problem.space.mesh) for layout in dict.fromkeys(layouts)}
        return np.array([sizes[layout] for layout in layouts], dtype=float)

    def _roots(self) -> Mapping[str, str]:
        """Value -> the value in whose memory it lies as long as nothing is moved."""
        root = {name: name for name in self._graph.capture.values}
        for node in self._graph.capture.nodes:
            if node.name in self._kept.views:
                root.update(dict.fromkeys(node.results, root[node.operands[0]]))
        return root

    def _value(self, name: str) -> Value:
        return self._graph.capture.values[name]

    def _identity(self, kept: object) -> int:
        self._held.append(kept)
        return id(kept)


def _size(of: Value, value: Value) -> float:
    """The part that a value is of another, in entries: a view that was expanded has more than its memory."""
    return math.prod(of.shape) / max(math.prod(value.shape), 1)
