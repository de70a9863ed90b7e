"""What an operator demands of an operand, the layout and of which partial sums its gradient comes back, and makes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

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
    """What operand ``index`` of ``node`` must be under a strategy, units normalised; once for equal layers."""
    rule, known = graph.rules[node.name], _known(graph, mesh)
    value = graph.capture.values[node.operands[index]]
    key = id(rule), index, strategy, value.shape, value.needs_gradient
    if key not in known:
        layout = rule.operand_layout(index, strategy).normalised(value.shape, mesh)
        partial = rule.operand_gradient_partial(index, strategy, mesh) if value.needs_gradient else ()
        known[key] = the_one(graph, Target(layout, partial), mesh)
    found: Target = known[key]
    return found


def made_by(graph: RuledGraph, node: Node, index: int, strategy: Strategy, mesh: Mesh) -> Layout:
    """How result ``index`` of ``node`` is laid out under a strategy, units normalised; once for equal layers."""
    rule, known, shape = graph.rules[node.name], _known(graph, mesh), graph.capture.values[node.results[index]].shape
    key = id(rule), index, strategy, shape
    if key not in known:
        known[key] = rule.result_layout(index, strategy, mesh).normalised(shape, mesh)
    found: Layout = known[key]
    return found


def the_one(graph: RuledGraph, target: Target, mesh: Mesh) -> Target:
    """Of equal targets the one that is the same object."""
    found: Target = _known(graph, mesh).setdefault(target, target)
    return found


def _known(graph: RuledGraph, mesh: Mesh) -> dict[Hashable, Any]:
    """What is known of a graph on a mesh; the mesh stays with it, so that its identity is given to no other."""
    found: dict[Hashable, Any] = graph.known.setdefault(("targets", id(mesh)), (mesh, {}))[1]
    return found
