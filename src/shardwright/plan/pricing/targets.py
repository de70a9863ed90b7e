"""What an operator demands of an operand: the layout, and of which partial sums its gradient comes back."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.graph.ir import Node
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.rules.notation import Strategy


@dataclass(frozen=True)
class Target:
    """What a consumer needs of a value: a layout, and the axes over which the gradient that it returns is partial."""

    layout: Layout
    gradient_partial: tuple[str, ...] = ()


def target_of(graph: RuledGraph, node: Node, index: int, strategy: Strategy, mesh: Mesh) -> Target:
    """What operand ``index`` of ``node`` must be under a strategy, units normalised."""
    rule = graph.rules[node.name]
    value = graph.capture.values[node.operands[index]]
    layout = rule.operand_layout(index, strategy).normalised(value.shape, mesh)
    partial = rule.operand_gradient_partial(index, strategy, mesh) if value.needs_gradient else ()
    return Target(layout, partial)
