"""The choices of a search and the choice that it made; and the choice of data parallelism, which needs no search."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.capture.facts import flops
from shardwright.compiler.capture.ir import Node
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import redistribute
from shardwright.compiler.plan.pricing.graph import RuledGraph, target_of
from shardwright.compiler.plan.pricing.joined import SMALL_WHOLE_BYTES
from shardwright.compiler.plan.pricing.memory import Block
from shardwright.compiler.rules.notation import OpRule, Strategy
from shardwright.compiler.rules.table import row_of
from shardwright.errors import PlanError

FEW_AXES = 2
"""On more axes tables are larger, and what is worth a search on few may not be."""


@dataclass(frozen=True)
class Space:
    """The choices of a search: ``leaves`` holds one layout for a leaf that is fixed, several for one that is free.

    ``blocks`` are those that the backward may compute again, in place of keeping what lies inside; those that are named
    by ``demanded`` it does.
    """

    graph: RuledGraph
    mesh: Mesh
    strategies: Mapping[str, Sequence[Strategy]]
    leaves: Mapping[str, Sequence[Layout]]
    outputs: Mapping[str, Layout]
    blocks: tuple[Block, ...] = ()
    demanded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Choice:
    """A choice and, where it was searched, its objective and a bound that no choice is below.

    ``again`` names the values that the backward gathers again, so that no gathered copy of them is kept, and
    ``recomputed`` the blocks that it computes again. ``price`` is that of a byte at which it was found, where one was.
    """

    strategies: Mapping[str, Strategy]
    leaves: Mapping[str, Layout]
    cost: float | None = None
    bound: float | None = None
    again: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()
    price: float = 0.0


# How many times as large as all that its lookups read and give a parameter is at least, if each rank makes all of them.
_MUCH_LARGER = 4


class OverBudget(PlanError):
    """Nothing that was found fits the budget.

    ``least_bytes`` are those of what was found to hold least, and ``bound`` is what nothing that fits costs less than.
    With ``by_transient`` something was found that would fit without transient tensors, which no search counts: another
    way to plan may find what does with them.
    """

    def __init__(self, message: str, least_bytes: int = 0, bound: float = 0.0, *, by_transient: bool = False) -> None:
        super().__init__(message)
        self.least_bytes, self.bound, self.by_transient = least_bytes, bound, by_transient


def data_parallel(
    graph: RuledGraph,
    mesh: Mesh,
    leaves: Mapping[str, Sequence[Layout]],
    outputs: Mapping[str, Layout],
    whole_lookups: bool = False,
) -> Choice:
    """Parameters replicated, every other value split as its rows come in.

    An operator whose operands are split takes the strategy under which the fewest bytes of them move forward, which
    is none wherever a factor of it is the batch. Parts may be uneven.

    Args:
        whole_lookups: whether each rank looks up the rows of all in parameters that are much larger than those, such as
            embeddings of many words: the gradients of what was looked up are gathered in place of the parameter's,
            which has few entries that are not zero, and with which the backward ends.
    """
    capture = graph.capture
    layouts = {name: options[0] for name, options in leaves.items()}
    for value in capture.of_kind("parameter"):
        layouts.setdefault(value.name, Layout.replicated(len(value.shape)))
    chosen_leaves = dict(layouts)
    strategies: dict[str, Strategy] = {}
    known: dict[Hashable, Strategy] = {}  # Cached by an operator's rule and tensors, and the layouts that these have
    for node in capture.nodes:
        rule = graph.rules[node.name]
        key = graph.alike[node.name], *(layouts[name] for name in node.operands)
        if key not in known:
            options = [*dict.fromkeys(_following(node, rule, layouts))]
            if len(options) > 1:
                options.sort(key=lambda s: _forward_bytes(graph, node, s, layouts, mesh))
            known[key] = options[0]
        strategy = strategies[node.name] = known[key]
        if whole_lookups and strategy.used and _looks_up_little(graph, node):
            strategies[node.name] = rule.replicated()  # what follows is split as if it were, and takes its part of all
        for i, name in enumerate(node.results):
            layouts[name] = rule.result_layout(i, strategy, mesh).normalised(capture.values[name].shape, mesh)
    return Choice(strategies, chosen_leaves)


def casting_shards(
    graph: RuledGraph, mesh: Mesh, strategies: Mapping[str, Strategy], leaves: Mapping[str, Layout]
) -> dict[str, Strategy]:
    """Return the strategies with which a sharded parameter is cast to a narrower dtype before it is gathered.

    So half as many bytes are gathered under autocast, and the gathered cast can be gathered again by the backward. A
    search may choose to gather first, where that costs it nothing. Small parameters are left, which programs gather
    together.
    """
    found, values = dict(strategies), graph.capture.values
    for node in graph.capture.nodes:
        if not (row_of(node.op).casts and node.operands[0] in leaves and node.pin is None):
            continue
        source, made = values[node.operands[0]], values[node.results[0]]
        layout, rule = leaves[source.name], graph.rules[node.name]
        narrower = made.of_parameter and made.dtype.itemsize < source.dtype.itemsize
        if narrower and layout.split_axes and source.bytes > SMALL_WHOLE_BYTES:
            cut = zip(rule.operands[0], layout.dims, strict=True)
            strategy = rule.strategy({dim[0]: split.axes for dim, split in cut if split and dim})
            if rule.operand_layout(0, strategy).normalised(source.shape, mesh) == layout:
                found[node.name] = strategy
    return found


def _following(node: Node, rule: OpRule, layouts: Mapping[str, Layout]) -> Iterator[Strategy]:
    """Strategies that split one factor as some operand is split, or keep it partial; then the replicated one."""
    for index, name in enumerate(node.operands):
        layout = layouts[name]
        for dim, split in zip(rule.operands[index], layout.dims, strict=True):
            if split and dim and any(rule.factors[i].name == dim[0] for i in rule.splittable):
                yield rule.strategy({dim[0]: split.axes})
        if layout.partial and index in rule.linear_operands:
            yield rule.strategy({}, partial=layout.partial)
    yield rule.replicated()


def _looks_up_little(graph: RuledGraph, node: Node) -> bool:
    """Return whether an operator computes nothing, and touches little besides a trained parameter."""
    values = graph.capture.values
    read = [values[name] for name in node.operands]
    parameters = [value for value in read if value.kind == "parameter" and value.needs_gradient]
    others = [value for value in read if value not in parameters]
    if len(parameters) != 1 or any(value.needs_gradient for value in others) or flops(node, graph.capture):
        return False
    beside = sum(value.bytes for value in (*others, *(values[name] for name in node.results)))
    return beside * _MUCH_LARGER <= parameters[0].bytes


def _forward_bytes(
    graph: RuledGraph, node: Node, strategy: Strategy, layouts: Mapping[str, Layout], mesh: Mesh
) -> float:
    total = 0.0
    for index, name in enumerate(node.operands):
        value = graph.capture.values[name]
        target = target_of(graph, node, index, strategy, mesh)
        try:
            steps = redistribute(layouts[name], target.layout, (), value.shape, mesh)
        except PlanError:
            return math.inf
        for step in steps:
            forward, _ = value.collectives(step, mesh)
            total += forward.sent_bytes(mesh) if forward else 0.0
    return total
