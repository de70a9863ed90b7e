"""The plan of plain data parallelism: every operator follows the split of the batch through the graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from shardwright.errors import PlanError
from shardwright.graph.ir import Node
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import redistribute
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.plan.pricing.targets import target_of
from shardwright.plan.searching.space import Choice
from shardwright.rules.notation import OpRule, Strategy


def data_parallel(
    graph: RuledGraph, mesh: Mesh, leaves: Mapping[str, Sequence[Layout]], outputs: Mapping[str, Layout]
) -> Choice:
    """Parameters replicated, every other value split as its rows come in.

    An operator whose operands are split takes the strategy under which the fewest bytes of them move forward, which
    is none wherever a factor of it is the batch. Parts may be uneven.
    """
    capture = graph.capture
    layouts = {name: options[0] for name, options in leaves.items()}
    for value in capture.of_kind("parameter"):
        layouts.setdefault(value.name, Layout.replicated(len(value.shape)))
    chosen_leaves = dict(layouts)
    strategies: dict[str, Strategy] = {}
    for node in capture.nodes:
        rule = graph.rules[node.name]
        options = [*dict.fromkeys(_following(node, rule, layouts))]
        if len(options) > 1:
            options.sort(key=lambda s: _forward_bytes(graph, node, s, layouts, mesh))
        strategy = strategies[node.name] = options[0]
        for i, name in enumerate(node.results):
            layouts[name] = rule.result_layout(i, strategy, mesh).normalised(capture.values[name].shape, mesh)
    return Choice(strategies, chosen_leaves)


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
            forward, _ = step.collectives(value.shape, value.dtype.itemsize, mesh)
            total += forward.sent_bytes(mesh) if forward else 0.0
    return total
