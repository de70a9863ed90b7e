"""The decisions of a plan, and what follows from them.

Decided are the strategy of every operator and the layouts of the leaves (parameters, buffers, inputs, constants) and of
the outputs. Everything else follows: `Decisions.layout` of a result from the rule of its operator, and `transfers`, the
redistributions, from the layouts on both ends of an edge. The costs that a search minimises and the program that runs
are both derived from `transfers`, so that nothing is priced that is not run, and nothing run that is not priced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import ClassVar, Self

from shardwright.compiler.capture.ir import Capture, Node, Pin, Value
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import MICROBATCHES, PIPELINE, UNNAMED, Mesh, Stages, TriedStages
from shardwright.compiler.mesh.redistribute import Collective, Step, copies, redistribute
from shardwright.compiler.plan.pricing.graph import RuledGraph, Target, made_by, target_of, the_one
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.memory import (
    ADAMW,
    Block,
    Blocks,
    OptimizerStates,
    SavedTensors,
    local_bytes,
    moved_inside,
    repeatable,
)
from shardwright.compiler.rules.notation import Strategy


@dataclass(frozen=True)
class Transfer:
    """A value on its way to one target, shared by every consumer with that target.

    ``consumers`` are (node name, operand index), or ("", i) for the i-th output of the graph. ``gradient`` says whether
    one comes back: not to a value that has none, nor from an output other than the loss.
    """

    value: str
    target: Target
    steps: tuple[Step, ...]
    consumers: tuple[tuple[str, int], ...]
    gradient: bool


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of the plan: where it comes from, in which direction of the step, and what it moves."""

    cause: str  # the label of the value or the name of the operator
    module: str  # for which it is: its parameter's, or where the value is made
    direction: str  # "forward" or "backward"
    collective: Collective
    bytes: float  # sent by each device


@dataclass(frozen=True)
class Decisions:
    """The decisions of a plan: who computes what, and where it is stored.

    Args:
        mesh: the mesh whose axes are split over.
        named: the mesh as the user wrote it.
        outputs: layouts in which values leave the program: the loss, auxiliary outputs, new buffers.
        cost: the objective of the search, in its unit; None where nothing was searched, or for another graph.
        bound: what no decisions cost less than.
        memory: the bytes that a device may hold, where that was limited.
        again: values that are resharded after the forward: the backward gathers them again, and no copy is kept.
        recomputed: modules with activation checkpointing: the backward recomputes them from their inputs.
        considered: a line on each mesh, where several were searched.
        hardware: the profile that the plan was priced with.
        stages: the pipeline stages, where there are several; ``mesh`` is then that of one stage, and of microbatches.
        tried: the numbers of stages that were tried, where they were looked for.
    """

    graph: RuledGraph = field(repr=False)
    mesh: Mesh
    named: Mesh
    mode: str
    search: str
    strategies: Mapping[str, Strategy]
    leaves: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    cost: float | None = None
    bound: float | None = None
    optimizer: OptimizerStates = ADAMW
    memory: int | None = None
    again: frozenset[str] = frozenset()
    considered: tuple[str, ...] = ()
    hardware: Hardware | None = field(default=None, repr=False)
    recomputed: frozenset[str] = frozenset()
    stages: Stages | None = None
    tried: tuple[TriedStages, ...] = ()

    @property
    def capture(self) -> Capture:
        return self.graph.capture

    @cached_property
    def devices(self) -> Mesh:
        """The mesh of the ranks: that of the plan, or with pipeline stages as `Stages.devices` has it."""
        return self.mesh if self.stages is None else self.stages.devices(self.mesh)

    def on_devices(self, layout: Layout) -> Layout:
        """Return a layout of the plan as ranks have it, who hold all microbatches: of a dim these split, the whole."""
        if self.stages is None:
            return layout
        dims = tuple(Split() if MICROBATCHES in dim.axes else dim for dim in layout.dims)
        return Layout(dims, layout.without(MICROBATCHES).partial)

    @cached_property
    def stored(self) -> Mapping[str, Layout]:
        """The layouts of the leaves on the `devices`.

        With pipeline stages a parameter that one of them computes with is held by that one alone; others are sharded
        over the stages, along the first dim that nothing else shards.
        """
        if self.stages is None:
            return self.leaves
        return {name: self._stored(self.capture.values[name], layout) for name, layout in self.leaves.items()}

    def _stored(self, value: Value, layout: Layout) -> Layout:
        assert self.stages is not None
        if value.name not in self.stages.holders:
            return self.on_devices(layout)
        dims, holder = list(layout.dims), self.stages.holders[value.name]
        if holder is not None:
            return Layout((Split((PIPELINE, *dims[0].axes), dims[0].unit, holder), *dims[1:]))
        for at, (size, dim) in enumerate(zip(value.shape, dims, strict=True)):
            if not dim.axes and size >= self.stages.count:
                dims[at] = Split((PIPELINE,))
                break
        return Layout(tuple(dims))

    @cached_property
    def read_by_stages(self) -> Mapping[str, frozenset[int]]:
        """The groups of ranks that compute with each parameter, and with what follows from parameters alone.

        Cached: the plan is frozen.
        """
        assert self.stages is not None
        return {name: frozenset(map(self.stages.group, stages)) for name, stages in self.needed_in.items()}

    @cached_property
    def needed_in(self) -> Mapping[str, frozenset[int]]:
        """The pipeline stages that compute with each value, or with what follows from it and has no stage of its own.

        Cached: the plan is frozen.
        """
        assert self.stages is not None
        found: dict[str, frozenset[int]] = {}
        for node in reversed(self.capture.nodes):
            if (stage := self.stages.of.get(node.name)) is not None:
                stages = frozenset([stage])
            else:
                stages = frozenset[int]().union(*(found.get(name, frozenset()) for name in node.results))
            for name in node.operands:
                found[name] = found.get(name, frozenset()) | stages
        return {name: found.get(name, frozenset()) for name in self.capture.values}

    @cached_property
    def moved_between_stages(self) -> frozenset[str]:
        """The parameters that groups of ranks send to each other in a step, as several or others compute with them.

        Cached: the plan is frozen.
        """
        if self.stages is None:
            return frozenset()
        readers = self.read_by_stages
        sharded = {name for name, holder in self.stages.holders.items() if holder is None}
        moved = {name for name in sharded if PIPELINE in self.stored[name].split_axes}
        elsewhere = {name for name, at in self.stages.holders.items() if at is not None and readers[name] - {at}}
        return frozenset(moved | elsewhere)

    @property
    def shown_mesh(self) -> Mesh:
        """The mesh as the user named it or, where nobody did, with the names that it was given (`plan.axis_names`)."""
        if self.stages is not None:
            return self.devices if UNNAMED in self.named.names else self.named
        return self.mesh if self.named.is_unnamed and self.mesh.axes else self.named

    def layout(self, value: str) -> Layout:
        """Return how a value is laid out where it is made or stored."""
        if value in self.leaves:
            return self.leaves[value]
        if value not in self._made:
            node, index = self.graph.producers[value]
            self._made[value] = made_by(self.graph, node, index, self.strategies[node.name], self.mesh)
        return self._made[value]

    @cached_property
    def _made(self) -> dict[str, Layout]:
        """Return the layouts of results that are known.

        Cached by the value: graph, strategies and mesh are frozen.
        """
        return {}

    def pin_of(self, node: Node) -> Pin | None:
        """Return the pin that fixes the strategy of an operator; None where nothing was searched, pins or not."""
        return None if self.search == "none" else node.pin

    def batch_rows(self, rank: int, rows: int) -> tuple[int, int]:
        """The rows [start, stop) of a global batch of ``rows`` that ``rank`` is to be given."""
        leaves = self.leaves if self.stages is None else {n: of.without(MICROBATCHES) for n, of in self.leaves.items()}
        split = next((leaves[v.name].dims[0] for v in self.capture.of_kind("input") if v.shape), Split())
        return split.bounds(rows, self.devices, self.devices.coordinates(rank))

    def target(self, node: Node, index: int) -> Target:
        """Return the layout that operand ``index`` of ``node`` must have before the node can run on local parts."""
        return target_of(self.graph, node, index, self.strategies[node.name], self.mesh)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every edge of the graph, one per value and target, in order of execution; many have no steps.

        Raises:
            PlanError: where no sequence of collectives leads from one layout to the other.
        """
        found: dict[tuple[str, int], tuple[Target, list[tuple[str, int]]]] = {}  # equal targets are one object
        for node in self.capture.nodes:
            for index, value in enumerate(node.operands):
                target = self._wanted(node, index, self.entered)
                found.setdefault((value, id(target)), (target, []))[1].append((node.name, index))
        for i, (value, layout) in enumerate(self.outputs.items()):
            target = the_one(self.graph, Target(layout), self.mesh)
            found.setdefault((value, id(target)), (target, []))[1].append(("", i))
        steps = self._shared_steps()
        return tuple(
            Transfer(value, target, steps(value, target), tuple(uses), self._gradient(value, uses))
            for (value, _), (target, uses) in found.items()
        )

    @cached_property
    def entered(self) -> Mapping[str, tuple[str, ...]]:
        """The axes over which gradients are summed before casts and views of parameters, by the names of their results.

        The sum then stands where the parameter is read, in its dtype and in a bucket with others, as if there were no
        cast. It is so where all readers of the result sum its gradient over these axes first of all.
        """
        found: dict[str, tuple[str, ...]] = {}
        for node in reversed(self.capture.nodes):
            for name in node.results:
                if self.capture.values[name].of_parameter and (axes := self._entered_by_all(name, found)):
                    found[name] = axes
        return found

    def _entered_by_all(self, name: str, entered: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Return the axes over which every reader of a value sums its gradient first; none where they differ."""
        value, found = self.capture.values[name], set[tuple[str, ...]]()
        for use in self.graph.uses[name]:
            if self.graph.needs_gradient(use.node):
                steps = self._steps(value.shape, self.layout(name), self._wanted(use.node, use.index, entered))
                found.add(steps[0].axes if steps and steps[0].kind == "enter" else ())
        return found.pop() if len(found) == 1 and name not in self.outputs else ()

    def _wanted(self, node: Node, index: int, entered: Mapping[str, tuple[str, ...]]) -> Target:
        """Return the target of an operand where gradients of casts and views are summed before these."""
        target = self.target(node, index)
        before = entered.get(node.operands[index], ())
        after = entered.get(node.results[0], ()) if node.results else ()
        if not (before or after):
            return target
        partial = self.mesh.ordered({*target.gradient_partial, *after} - set(before))
        return the_one(self.graph, replace(target, gradient_partial=partial), self.mesh)

    @cached_property
    def way(self) -> Mapping[tuple[str, int], Transfer]:
        """The transfer that brings an operator its operand, by the name of the operator and the index."""
        return {use: transfer for transfer in self.transfers for use in transfer.consumers}

    def _gradient(self, value: str, uses: Sequence[tuple[str, int]]) -> bool:
        differentiated = value == self.capture.loss or any(node for node, _ in uses)
        return differentiated and self.capture.values[value].needs_gradient

    def _shared_steps(self) -> Callable[[str, Target], tuple[Step, ...]]:
        """The steps that bring a value to a target, by its name; those of equal layers are one object."""
        known: dict[Hashable, tuple[Step, ...]] = {}  # by the very layouts: quicker to look up than equal ones
        equal = cache(self._steps)

        def steps(value: str, target: Target) -> tuple[Step, ...]:
            shape, layout = self.capture.values[value].shape, self.layout(value)
            key = shape, id(layout), id(target)
            if key not in known:
                known[key] = equal(shape, layout, target)
            return known[key]

        return steps

    def _steps(self, shape: tuple[int, ...], layout: Layout, target: Target) -> tuple[Step, ...]:
        return redistribute(layout, target.layout, target.gradient_partial, shape, self.mesh)

    def collectives(self) -> Iterator[PlannedCollective]:
        """Every collective of one step, before the gradients of replicated parameters are joined into buckets."""
        for transfer in self.transfers:
            yield from self.transfer_collectives(transfer)
        for node in self.capture.nodes:
            forward, backward = self.graph.collectives_inside(node, self.strategies[node.name], self.mesh)
            repeated = forward if node.name in self.computed_again else ()
            for direction, collectives in (("forward", forward), ("backward", (*repeated, *backward))):
                for c in collectives:
                    yield PlannedCollective(node.name, node.scope, direction, c, c.sent_bytes(self.mesh))

    def transfer_collectives(self, transfer: Transfer) -> Iterator[PlannedCollective]:
        """Yield the collectives of a transfer, forward and backward."""
        value = self.capture.values[transfer.value]
        producer = self.graph.producers.get(transfer.value)
        module = producer[0].scope if producer else value.label.rpartition(".")[0] if value.kind == "parameter" else ""
        times = self.repeats(transfer)
        for step in transfer.steps:
            forward, backward = value.collectives(step, self.mesh)
            if forward:
                yield PlannedCollective(value.label, module, "forward", forward, forward.sent_bytes(self.mesh))
                for _ in range(times):
                    yield PlannedCollective(value.label, module, "backward", forward, forward.sent_bytes(self.mesh))
            if backward and transfer.gradient:
                yield PlannedCollective(value.label, module, "backward", backward, backward.sent_bytes(self.mesh))

    @cached_property
    def kept(self) -> SavedTensors:
        """Return the tensors that operators save for the backward."""
        return self.graph.once(SavedTensors)

    @cached_property
    def _nodes(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.capture.nodes}

    def computing_again(self, names: Set[str], again: frozenset[str] | None = None) -> Self:
        """Return the decisions with other modules recomputed, and other values gathered ``again`` if these are given.

        What does not depend on them is not worked out anew.
        """
        found = replace(self, recomputed=frozenset(names), again=self.again if again is None else again)
        for known in self._of_any_recomputed:
            found.__dict__[known] = getattr(self, known)
        return found

    def in_stages(self, stages: Stages) -> Self:
        """Return the decisions with other stages; what does not depend on these is not worked out anew."""
        found = replace(self, stages=stages)
        for known in self._of_any_recomputed:
            if known in self.__dict__:
                found.__dict__[known] = self.__dict__[known]
        return found

    def costing(self, cost: float | None, bound: float | None) -> Self:
        """Return the decisions at another cost; nothing is computed anew."""
        found = replace(self, cost=cost, bound=bound)
        found.__dict__.update({name: of for name, of in self.__dict__.items() if name not in found.__dict__})
        return found

    # None of these reads `recomputed`, `again` or `stages`.
    _of_any_recomputed: ClassVar[tuple[str, ...]] = ("_nodes", "_made", "entered", "transfers", "way", "_moved_inside")

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks whose inside the backward computes again."""
        known = self.graph.once(Blocks)
        found = (known.named(name) for name in sorted(self.recomputed))
        return tuple(block for block in found if block is not None)

    @cached_property
    def block_of(self) -> Mapping[str, str]:
        """The name of an operator -> that of the block which computes it again; the others have none."""
        return {node.name: block.name for block in self.blocks for node in block.nodes}

    @cached_property
    def computed_again(self) -> frozenset[str]:
        """The names of the operators whose work the backward does again."""
        found: list[Node] = []
        for block in self.blocks:
            last = block.nodes[-1]
            communicates = self.graph.collectives_inside(last, self.strategies[last.name], self.mesh)[0]
            found += block.nodes if communicates else block.computed_again(self.kept)
        return frozenset(node.name for node in found)

    def block_of_transfer(self, transfer: Transfer) -> str:
        """The block that a transfer is computed again with, "" where there is none.

        A transfer that others need, too, or that makes what is kept smaller, is done before the block, which is given
        the result.
        """
        block = self.block_of.get(transfer.consumers[0][0], "") if transfer.steps else ""
        if not block:
            return ""
        maker = self.graph.producers.get(transfer.value)
        if maker is not None and self.block_of.get(maker[0].name) == block:
            return block
        alone = all(self.block_of.get(name) == block for name, _ in transfer.consumers)
        return block if alone and copies(transfer.steps) and self._is_moved_inside(transfer) else ""

    def _is_moved_inside(self, transfer: Transfer) -> bool:
        """Return whether a block that is given the value of a transfer moves it itself."""
        first, known = transfer.consumers[0], self._moved_inside
        if first not in known:
            value = self.capture.values[transfer.value]
            layouts = self.layout(value.name), transfer.target.layout
            known[first] = moved_inside(value, *(local_bytes(value, layout, self.mesh) for layout in layouts))
        return known[first]

    @cached_property
    def _moved_inside(self) -> dict[tuple[str, int], bool]:
        """Return the known answers of `_is_moved_inside`.

        Cached by the first consumer of a transfer, which no other one has: layouts and mesh are frozen.
        """
        return {}

    def brought(self, transfer: Transfer) -> Value:
        """Return the value of a transfer, as it is priced: with whether a gradient comes back, and is it read first."""
        read_first = self.graph.read_first_by(transfer.value, {name for name, _ in transfer.consumers})
        value = self.capture.values[transfer.value]
        return replace(value, needs_gradient=transfer.gradient, read_first=read_first)

    def repeats(self, transfer: Transfer) -> int:
        """Return how often the backward repeats the steps of a transfer."""
        return 1 if self.block_of_transfer(transfer) else self.gathers_again(transfer)

    def gathers_again(self, transfer: Transfer) -> int:
        """Return how often the backward repeats a transfer alone: once where it needs the value there, else never."""
        value = self.capture.values[transfer.value]
        if value.name not in self.again or not repeatable(value, transfer.steps) or self.block_of_transfer(transfer):
            return 0
        consumers = [(name, index) for name, index in transfer.consumers if name]
        return int(any(n in self.block_of or self.kept.times(self._nodes[n], index) for n, index in consumers))

    @property
    def gap(self) -> float | None:
        """The share of the cost by which it is above the lower bound; None where no bound is known."""
        if self.cost is None or self.bound is None:
            return None
        return (self.cost - self.bound) / self.cost if self.cost else 0.0

    def moved_bytes(self) -> float:
        """Bytes that each device sends in one step, forward, backward and gradients."""
        return sum(priced.bytes for priced in self.collectives())

    def held_bytes(self, kind: str = "parameter") -> int:
        """Bytes of the leaves of one kind that rank 0 holds, which no rank exceeds."""
        return sum(self.bytes_of(value) for value in self.capture.values.values() if value.kind == kind)

    def bytes_of(self, leaf: Value) -> int:
        """Bytes of a leaf that rank 0 holds, which no rank exceeds."""
        return local_bytes(leaf, self.leaves[leaf.name], self.mesh)

    def in_strategy(self, node: Node) -> tuple[tuple[int, ...], ...]:
        """The number of slices per dim of every operand, as users write it in `shard`; with stages of a microbatch."""
        return tuple(layout.slices(self.mesh) for layout in self.worked_on(node)[0])

    def out_strategy(self, node: Node) -> tuple[tuple[int, ...], ...]:
        """The number of slices per dim of every result; with pipeline stages of a microbatch."""
        return tuple(layout.slices(self.mesh) for layout in self.worked_on(node)[1])

    def worked_on(self, node: Node) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """Return the layouts of the operands and results of an operator; with pipeline stages of a microbatch."""
        rule, strategy = self.graph.rules[node.name], self.strategies[node.name]
        operands = (rule.operand_layout(i, strategy).without(MICROBATCHES) for i in range(len(node.operands)))
        results = (rule.result_layout(i, strategy, self.mesh).without(MICROBATCHES) for i in range(len(node.results)))
        return tuple(operands), tuple(results)

    @cached_property
    def sharers(self) -> Mesh:
        """The mesh of the ranks that may share the work of an operator: all, or with pipeline stages those of one."""
        return Mesh(tuple(axis for axis in self.mesh.axes if axis.name != MICROBATCHES))

    def parts(self, node: Node) -> int:
        """Return how many ranks share the work of an operator."""
        return self.sharers.extent(axis for axis in self.strategies[node.name].used if axis != MICROBATCHES)

    def collectives_of_ranks(self) -> Iterator[PlannedCollective]:
        """Yield every collective among ranks: of a plan with stages those of a stage, for one microbatch."""
        for priced in self.collectives():
            axes = tuple(axis for axis in priced.collective.axes if axis != MICROBATCHES)
            if axes == priced.collective.axes:
                yield priced
            elif axes:
                collective = replace(priced.collective, axes=axes)
                yield replace(priced, collective=collective, bytes=collective.sent_bytes(self.mesh))
