"""The memory that choices hold, as tables over the variables of a problem.

Parameters count their shard, its gradient and the optimizer's states; operators count the results that they save and
what they make inside; operands that are saved count the memory in which they lie.

What is gathered for operators need not be kept so: the backward can gather it again, for what that costs. Such an
operand counts what is less at a price: its bytes, or those that it is gathered from and the second gathering.

Several operands may lie in the same memory, which is held once. Each then counts a share of it, such that the shares of
all that can lie together make one: where choices keep them apart after all, the sum is below what is held, and never
above. So a bound that is computed with these tables is one for what is really held. What one operator cuts a memory
into, as the queries, keys and values of one product, is apart from the beginning.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.common.stages import in_stage
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.plan.pricing.cost import once_more
from shardwright.compiler.plan.pricing.graph import Target, Use
from shardwright.compiler.plan.pricing.memory import Block, OptimizerStates, SavedTensors, local_bytes
from shardwright.compiler.plan.pricing.pairs import MoveFlags
from shardwright.compiler.plan.search.exact import Table, cost_at, nonzero_tables
from shardwright.compiler.plan.search.min_sum import Costs
from shardwright.compiler.plan.search.problem import Problem
from shardwright.compiler.plan.search.recomputing import Recomputing
from shardwright.compiler.rules.notation import Strategy


@dataclass(frozen=True)
class Regathering:
    """The bytes of a saved operand that the backward gathers again, and the cost; infinite where it cannot."""

    bytes: Costs
    costs: Costs


@dataclass(frozen=True)
class KeptOperand:
    """A value that an operator keeps, by the variables of who makes and who keeps it.

    ``block`` is the variable of the block that it is in, and ``made_again`` the part of it that counts all the same
    where that is computed again.
    """

    value: str
    kept: Table
    again: Regathering
    block: int | None
    made_again: float

    def is_recomputed(self, picked: Sequence[int]) -> bool:
        """Return whether nothing is saved, as the block is recomputed."""
        return self.block is not None and bool(picked[self.block])


class Weights:
    """The bytes that the choices of a problem hold: tables over its variables, of which equal ones are one array."""

    @in_stage("tables")
    def __init__(self, problem: Problem, optimizer: OptimizerStates) -> None:
        self._problem, self._optimizer = problem, optimizer
        self._graph = problem.space.graph
        self._kept = self._graph.once(SavedTensors)
        # Cached by all that is read of operators and values, and by the identity of lists, which are held.
        self._known: dict[Hashable, Costs] = {}
        self._gatherings: dict[Hashable, Regathering] = {}
        self._held: list[object] = []  # so that no identity is given to another object
        self._priced: dict[tuple[int, int, float], Costs] = {}
        self.fixed_bytes = 0
        """The bytes that all choices hold: inputs, buffers and constants."""
        self.recomputing = Recomputing(problem, self._kept)
        self._root = self._roots()
        self._kept_by_makers = {
            node.results[i] for node in self._graph.capture.nodes for i in self._kept.saved[node.name].results or ()
        }
        self._uses = self._kept_uses()
        given = [name for block in problem.space.blocks for _, name in self._given_to(block)]
        self._memory = self._memories([*(use.node.operands[use.index] for use in self._uses), *given])
        self._keepers: dict[str, Counter[Hashable]] = defaultdict(Counter)  # by the memory: who keeps how many operands
        for use in self._uses:
            self._keepers[self._memory[use.node.operands[use.index]]][self._keeper(use)] += 1
        tables = (*self._leaves(), *self._operators(), *self._given())
        self.tables = nonzero_tables(tables)
        self.gathered = list(self._operands())
        """The values that operators save, with the bytes that this takes, and the cost of gathering them again."""

    @in_stage("tables")
    def at(self, price: float) -> list[Table]:
        """The tables at so much for a byte."""
        found = []
        for table in self.tables:
            key = id(table.costs), 0, price
            if key not in self._priced:
                self._priced[key] = table.costs * price
            found.append(Table(table.scope, self._priced[key]))
        for of in self.gathered:
            key = id(of.kept.costs), id(of.again.costs), price
            if key not in self._priced:
                least = np.minimum(of.kept.costs * price, of.again.bytes * price + of.again.costs)
                self._priced[key] = least
            found.append(self.recomputing.either(of.block, of.kept.scope, self._priced[key], of.made_again))
        return [*found, *self.recomputing.tables]

    def again(self, price: float, picked: Sequence[int]) -> frozenset[str]:
        """The values that are better gathered again than kept at a price of a byte."""
        saved: Counter[str] = Counter()
        costs: Counter[str] = Counter()
        for of in self.gathered:
            at = tuple(picked[v] for v in of.kept.scope)
            if math.isfinite(of.again.costs[at]) and not of.is_recomputed(picked):
                saved[of.value] += of.kept.costs[at] - of.again.bytes[at]
                costs[of.value] += of.again.costs[at]
        return frozenset(name for name in saved if saved[name] * price > costs[name])

    def of(self, picked: Sequence[int], again: Set[str] = frozenset()) -> float:
        """The bytes of one choice for every variable, where these values are gathered again."""
        total = self.fixed_bytes + cost_at(self.tables, picked)
        for of in self.gathered:
            size, at = of.kept.at(picked), tuple(picked[v] for v in of.kept.scope)
            if of.value in again and math.isfinite(of.again.costs[at]):
                size = min(size, float(of.again.bytes[at]))
            total += size * (of.made_again if of.is_recomputed(picked) else 1.0)
        return total

    def of_each(self, variable: int, picked: Sequence[int]) -> Costs:
        """Return the bytes of each value of a variable, without what does not depend on it, the others as picked."""
        found = np.zeros(self._problem.domains[variable])
        for table, part in self._touching[variable]:
            others = tuple(slice(None) if v == variable else picked[v] for v in table.scope)
            found = found + table.costs[others] * (part.made_again if part and part.is_recomputed(picked) else 1.0)
        return found

    @cached_property
    def _touching(self) -> Mapping[int, list[tuple[Table, KeptOperand | None]]]:
        """By variable the tables that mention it, and which operands are theirs.

        Cached: the tables are made before it is first asked for, and stay the same.
        """
        found: dict[int, list[tuple[Table, KeptOperand | None]]] = defaultdict(list)
        tables: list[tuple[Table, KeptOperand | None]] = [(table, None) for table in self.tables]
        for table, of in [*tables, *((of.kept, of) for of in self.gathered)]:
            for v in table.scope:
                found[v].append((table, of))
        return found

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
            if variable is None or not (saved.results or saved.internal):
                continue
            strategies = self._problem.space.strategies[node.name]
            key = self._graph.alike[node.name], saved, self._identity(strategies)
            if key not in self._known:
                self._known[key] = np.array([self._inside(node, strategy) for strategy in strategies], dtype=float)
            block = self.recomputing.variable_of(node)
            again = self.recomputing.held_again(node, node.results[0])
            found.append(self.recomputing.either(block, (variable,), self._known[key], again))
        return found

    def _inside(self, node: Node, strategy: Strategy) -> int:
        """Return the bytes that an operator saves of its results, and of tensors that it makes inside."""
        rule, mesh = self._graph.rules[node.name], self._problem.space.mesh
        layouts = {name: rule.operand_layout(i, strategy) for i, name in enumerate(node.operands)}
        layouts |= {name: rule.result_layout(i, strategy, mesh) for i, name in enumerate(node.results)}
        made = {node.results[i] for i in self._kept.saved[node.name].results or ()}
        results = sum(local_bytes(self._value(name), layouts[name], mesh) for name in made)
        return results + self._kept.internal_bytes(node, layouts.__getitem__, mesh)

    def _kept_uses(self) -> list[Use]:
        """The operands that operators keep, of each operator every value once."""
        uses = [
            Use(node, i)
            for node in self._graph.capture.nodes
            if node.name in self._problem.node_variables
            for i in dict.fromkeys(self._kept.saved[node.name].operands or ())
        ]
        return list({(use.node.name, use.node.operands[use.index]): use for use in uses}.values())

    def _keeper(self, use: Use) -> Hashable:
        """Return what saves an operand: its operator, or the block of that, which saves less where it is recomputed."""
        block = self.recomputing.block_of.get(use.node.name)
        return block.name if block is not None else (use.node.name, use.index)

    def _share(self, use: Use) -> float:
        """The share of an operand in the memory in which it lies."""
        keepers = self._keepers[self._memory[use.node.operands[use.index]]]
        return 1 / len(keepers) / keepers[self._keeper(use)]

    def _in_place(self, value: str) -> float:
        """The part of the memory in which a value lies as it is made that it counts; none where another counts it."""
        of = self._value(self._root[value])
        if of.kind != "result" or of.name in self._kept_by_makers:
            return 0.0
        return min(1.0, _size(self._value(self._memory[value]), self._value(value)))

    def _operands(self) -> Iterator[KeptOperand]:
        """Yield what is saved of the operands, by the variables of who makes and who saves them."""
        for use in self._uses:
            name = use.node.operands[use.index]
            shares = self._in_place(name) * self._share(use), self._share(use)
            table = self._table(name, use, shares)
            if table is not None and table.costs.any():
                again = self._gathering(name, use, *shares)
                block = self.recomputing.variable_of(use.node)
                yield KeptOperand(name, table, again, block, self.recomputing.held_again(use.node, name))
            if (viewed := self._moved_for_view(name, use)) is not None:
                yield viewed

    def _moved_for_view(self, name: str, use: Use) -> KeptOperand | None:
        """Return what is saved of a parameter whose view an operator saves: what was moved for the view, if anything.

        It depends on the operator, too: where that moves the view once more, it keeps no part of this.
        """
        problem, maker = self._problem, self._graph.producers.get(name)
        if maker is None or maker[0].name not in self._kept.views or maker[0].name not in problem.node_variables:
            return None
        view, parameter = maker[0], self._value(maker[0].operands[0])
        if parameter.kind != "parameter":
            return None
        leaf, layouts = problem.produced(parameter.name)
        of_view = problem.known.targets(Use(view, 0), problem.space.strategies[view.name])
        there = problem.ways_to(problem.node_variables[view.name], of_view)
        made = problem.produced(name)[1]
        kept = problem.known.targets(use, problem.space.strategies[use.node.name])
        # What is moved is the whole parameter, of which a memory may be a part.
        share = self._share(use) * _size(self._value(self._memory[name]), parameter)
        shapes = parameter.shape, self._value(name).shape
        key = "view", *shapes, parameter.dtype, *map(self._identity, (layouts, made, kept, *there)), share
        if key not in self._gatherings:
            stays = problem.known.pairs.ways.moves(self._value(name).shape, made, kept)
            self._gatherings[key] = self._for_view(parameter, layouts, there, stays, share)
        scope = leaf, problem.node_variables[view.name], problem.node_variables[use.node.name]
        found = self._gatherings[key]
        block, again = self.recomputing.variable_of(use.node), self.recomputing.held_again(use.node, parameter.name)
        nothing = self._known.setdefault(("nothing", found.bytes.shape), np.zeros(found.bytes.shape))
        return KeptOperand(parameter.name, Table(scope, found.bytes), Regathering(nothing, found.costs), block, again)

    def _for_view(
        self,
        parameter: Value,
        layouts: Sequence[Layout],
        there: Sequence[Sequence[Target]],
        on: MoveFlags,
        share: float,
    ) -> Regathering:
        """The bytes of what is moved for a view and kept, and what it costs at least to move it again."""
        targets = there[0]  # the others are laid out alike
        moves = self._problem.known.pairs.ways.moves(parameter.shape, layouts, targets)
        stays = (on.possible & ~on.copies)[None]
        sizes = np.where(moves.possible & moves.copies, self._parts(parameter, [t.layout for t in targets]), 0.0)
        costs = np.minimum.reduce([self._again(parameter, layouts, of) for of in there])
        kept, again = (np.where(stays, of[:, :, None] * share, 0.0) for of in (sizes, costs))
        return Regathering(kept, again)

    def _given(self) -> Iterator[Table]:
        """Yield what is kept of the inputs of recomputed blocks: of each memory one value."""
        given = {(block.name, self._memory[of]): use for block in self._problem.space.blocks
                 for use, of in self._given_to(block)}  # fmt: skip
        blocks = Counter(memory for _, memory in given)
        for (block, memory), use in given.items():
            share = self._share_of_given(block, memory, blocks[memory])
            name = use.node.operands[use.index]
            if table := self._table(name, use, (share * self._in_place(name), 0.0), least=True):
                yield self.recomputing.once_more(self._problem.block_variables[block], table.scope, table.costs)

    def _share_of_given(self, block: str, memory: str, blocks: int) -> float:
        """The share of a block in the memory of what it is given, which so many blocks are."""
        keepers = self._keepers.get(memory)
        if keepers is None:
            return 1 / blocks
        return 1 / len(keepers) if block in keepers else 0.0

    def _given_to(self, block: Block) -> Iterator[tuple[Use, str]]:
        """Yield where a block reads a result that it does not make."""
        for node in block.nodes:
            for i, name in enumerate(node.operands):
                maker = self._graph.producers.get(name)
                if maker is not None and maker[0].name not in block.names and node.name in self._problem.node_variables:
                    yield Use(node, i), name

    def _gathering(self, name: str, use: Use, in_place: float, moved: float) -> Regathering:
        """Return the bytes and the cost of gathering an operand again, by the choices of who makes and who saves it."""
        problem, value = self._problem, self._value(name)
        layouts = problem.produced(name)[1]
        targets = problem.known.targets(use, problem.space.strategies[use.node.name])
        key = (
            value.shape,
            value.dtype,
            value.kind == "parameter",
            value.of_parameter,
            value.viewed,
            value.needs_gradient,
            in_place,
            moved,
            self._identity(layouts),
            self._identity(targets),
        )
        if key not in self._gatherings:
            costs = self._again(value, layouts, targets) * moved
            sizes = in_place * self._parts(value, layouts)
            self._gatherings[key] = Regathering(sizes[:, None].repeat(len(targets), axis=1), costs)
        return self._gatherings[key]

    def _again(self, value: Value, layouts: Sequence[Layout], targets: Sequence[Target]) -> Costs:
        """Return the cost of moving a value again, without its gradient; infinite where that would sum again."""
        pairs = self._problem.known.pairs
        costs = pairs.costs(once_more(value), layouts, targets)
        moves = pairs.ways.moves(value.shape, layouts, targets)
        again = moves.alone & (value.kind == "parameter" or value.needs_gradient)
        costs[moves.possible & moves.copies & ~again] = math.inf
        costs[~moves.possible] = 0.0
        return costs

    def _table(self, name: str, use: Use, shares: tuple[float, float], *, least: bool = False) -> Table | None:
        """The bytes of an operand where it is kept as it was made, and where it is moved first, by shares of each.

        None where its maker has no choice. With ``least`` it is what a block is given at least: that is moved before
        the block where this makes it smaller, and in the block else.
        """
        problem, value = self._problem, self._value(name)
        made = name in problem.leaf_variables or self._graph.producers[name][0].name in problem.node_variables
        if not made:
            return None
        producer, layouts = problem.produced(name)
        targets = problem.known.targets(use, problem.space.strategies[use.node.name])
        key = value.shape, value.dtype, least, *shares, self._identity(layouts), self._identity(targets)
        if key not in self._known:
            moves = problem.known.pairs.ways.moves(value.shape, layouts, targets)
            there = self._parts(value, [target.layout for target in targets])[None]
            here = self._parts(value, layouts)[:, None]
            moved = np.minimum(here, there) * shares[0] if least else there * shares[1]
            self._known[key] = np.where(moves.possible & moves.copies, moved, here * shares[0])
            self._known[key][~moves.possible] = 0.0
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

    def _memories(self, counting: Sequence[str]) -> Mapping[str, str]:
        """Value -> the memory that it shares with others: that of its root, or a part of it.

        Parts are what a view with several results cuts it into, where all that is ``counting`` lies in one of those.
        """
        cut: dict[str, tuple[str, str]] = {}  # value -> the operator that cut its root, and the part
        for node in self._graph.capture.nodes:
            if node.name in self._kept.views:
                several = len(node.results) > 1 and node.operands[0] not in cut
                for name in node.results:
                    if several:
                        cut[name] = node.name, name
                    elif node.operands[0] in cut:
                        cut[name] = cut[node.operands[0]]
        cutting: dict[str, set[str]] = defaultdict(set)  # root -> the operators that cut it, "" for none
        for name in counting:
            cutting[self._root[name]].add(cut[name][0] if name in cut else "")
        whole = {root for root, names in cutting.items() if len(names) > 1}
        return {name: cut[name][1] if name in cut and root not in whole else root for name, root in self._root.items()}

    def _value(self, name: str) -> Value:
        return self._graph.capture.values[name]

    def _identity(self, kept: object) -> int:
        self._held.append(kept)
        return id(kept)


def _size(of: Value, value: Value) -> float:
    """The part that a value is of another, in entries: a view that was expanded has more than its memory."""
    return math.prod(of.shape) / max(math.prod(value.shape), 1)
