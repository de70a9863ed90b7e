"""The cost of recomputing blocks in the backward (activation checkpointing), as tables of a problem.

Every block has a variable of two values: what lies inside is kept, or computed again. The second one costs the forward
of the block once more, and saves what its operators keep, but not what the block is given (`weights.py`). So the search
decides for each block by itself, at any price of a byte, together with all strategies.

Counted are the operators of the block, and the ways of values that nobody outside of it reads. Ways of others may be
repeated, too: that is left out here, and added to the cost of what was found. So the tables are never above what it
costs, and a bound that is computed with them is one for what is really done.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.plan.pricing.cost import once_more
from shardwright.compiler.plan.pricing.graph import Target
from shardwright.compiler.plan.pricing.memory import Block, SavedTensors, local_bytes, moved_inside
from shardwright.compiler.plan.search.exact import Table, nonzero_tables
from shardwright.compiler.plan.search.min_sum import Costs
from shardwright.compiler.plan.search.problem import Problem


class Recomputing:
    """The blocks of a problem: the variable of each, and what its second value costs."""

    def __init__(self, problem: Problem, kept: SavedTensors) -> None:
        self._problem, self._kept = problem, kept
        self.block_of = {node.name: block for block in problem.space.blocks for node in block.nodes}
        """The block of an operator, by its name."""
        # Cached by all that is read of a value, and by the identity of arrays and lists, which are held.
        self._either: dict[Hashable, Costs] = {}
        self._ways: dict[Hashable, Costs] = {}
        self._held: list[object] = []  # so that no identity is given to another object
        tables = [table for block in problem.space.blocks for table in self._of_block(block)]
        demanded = (problem.block_variables[name] for name in sorted(problem.space.demanded))
        tables += [Table((variable,), np.array([math.inf, 0.0])) for variable in demanded]
        self.tables = nonzero_tables(tables)

    def variable_of(self, node: Node) -> int | None:
        """The variable that decides whether the backward computes an operator again; None where it never does."""
        block = self.block_of.get(node.name)
        return None if block is None else self._problem.block_variables[block.name]

    def chosen(self, picked: Sequence[int]) -> frozenset[str]:
        """The blocks that are computed again."""
        return frozenset(name for name, variable in self._problem.block_variables.items() if picked[variable])

    def either(self, variable: int | None, scope: tuple[int, ...], kept: Costs, again: float = 0.0) -> Table:
        """Costs where a block is kept, and ``again`` times as much where it is computed again; equal ones once."""
        if variable is None:
            return Table(scope, kept)
        key = again, id(kept)
        if key not in self._either:
            self._held.append(kept)
            self._either[key] = np.stack([kept, kept * again if again else np.zeros_like(kept)], axis=-1)
        return Table((*scope, variable), self._either[key])

    def held_again(self, node: Node, value: str) -> float:
        """Return the least share of a saved value that counts where its block is recomputed.

        The backward holds what it has made again of the block that has most of that: no less than all blocks together
        by their number. What the block is given is not made again.
        """
        block, graph = self.block_of.get(node.name), self._problem.space.graph
        if block is None:
            return 0.0
        maker = graph.producers.get(value)
        if maker is None:
            made = {use.node.name for use in graph.uses[value]} <= block.names  # gathered for the block
        else:
            made = maker[0].name in block.names
        return made / len(self._problem.space.blocks)

    def once_more(self, variable: int, scope: tuple[int, ...], costs: Costs) -> Table:
        """Costs where a block is computed again, and none where it is kept; equal ones once."""
        key = "once more", id(costs)
        if key not in self._either:
            self._held.append(costs)
            self._either[key] = np.stack([np.zeros_like(costs), costs], axis=-1)
        return Table((*scope, variable), self._either[key])

    def _of_block(self, block: Block) -> Iterator[Table]:
        problem, variable = self._problem, self._problem.block_variables[block.name]
        for node in block.computed_again(self._kept):
            if node.name in problem.node_variables:
                costs = problem.known.forward(node, problem.space.strategies[node.name])
                yield self.once_more(variable, (problem.node_variables[node.name],), costs)
        for value in dict.fromkeys(name for node in block.nodes for name in node.operands):
            readers = {use.node.name for use in problem.space.graph.uses[value]}
            if readers <= block.names and value not in problem.space.outputs and self._is_made(value):
                yield from self._ways_of(value, block)

    def _is_made(self, value: str) -> bool:
        maker = self._problem.space.graph.producers.get(value)
        return maker is None or maker[0].name in self._problem.node_variables

    def _ways_of(self, value: str, block: Block) -> Iterator[Table]:
        """Yield the cost of bringing a value to the operators of the block once more."""
        problem, variable = self._problem, self._problem.block_variables[block.name]
        producer, layouts = problem.produced(value)
        facts = once_more(problem.space.graph.capture.values[value])
        maker = problem.space.graph.producers.get(value)
        given = maker is None or maker[0].name not in block.names
        if value in problem.hubs:
            hub, shared = problem.hubs[value]
            yield self.once_more(variable, (producer, hub), self._way(facts, layouts, (shared,), given, free=True))
            return
        for reader, targets in problem.consumers(value)[: 1 if value in problem.shared_by_two else None]:
            demanded = problem.ways_to(reader, targets)
            yield self.once_more(variable, (producer, reader), self._way(facts, layouts, demanded, given))

    def _way(
        self,
        value: Value,
        layouts: Sequence[Layout],
        demanded: Sequence[Sequence[Target]],
        given: bool,
        *,
        free: bool = False,
    ) -> Costs:
        """The least cost of some targets each, by layout; with ``free`` there is another target that costs nothing."""
        leaf, of = value.kind != "result", tuple(map(id, demanded))
        key = value.shape, value.dtype, value.of_parameter, value.viewed, leaf, given, free, id(layouts), of
        if key not in self._ways:
            self._held += layouts, *demanded
            pairs = self._problem.known.pairs
            costs = np.minimum.reduce([pairs.costs(value, layouts, targets) for targets in demanded])
            moves = pairs.ways.moves(value.shape, layouts, demanded[0])
            inside = moves.possible & (self._larger(value, layouts, demanded[0]) & moves.copies if given else True)
            self._ways[key] = np.pad(np.where(inside & np.isfinite(costs), costs, 0.0), ((0, 0), (0, int(free))))
        return self._ways[key]

    def _larger(self, value: Value, layouts: Sequence[Layout], targets: Sequence[Target]) -> npt.NDArray[np.bool_]:
        """Return where a block that is given a value moves it itself, by layout and target."""
        mesh = self._problem.space.mesh
        of = {layout: local_bytes(value, layout, mesh) for layout in {*layouts, *(t.layout for t in targets)}}
        return np.array([[moved_inside(value, of[a], of[b.layout]) for b in targets] for a in layouts])
