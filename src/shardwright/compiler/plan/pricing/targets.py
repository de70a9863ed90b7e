"""What an operator demands of an operand, the layout and of which partial sums its gradient comes back, and makes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.mesh.cached_hash import kept_hash
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.pricing.ruled import RuledGraph
from shardwright.compiler.rules.notation import Strategy


@kept_hash
@dataclass(frozen=True)
class Target:
    """What a consumer needs of a value: a layout, and the axes over which the gradient that it returns is partial."""

    layout: Layout
    gradient_partial: tuple[str, ...] = ()


def target_of(graph: RuledGraph, node: Node, index: int, strategy: Strategy, mesh: Mesh) -> Target:
    """What operand ``index`` of ``node`` must be under a strategy, units normalised; once for equal layers."""
    return targets_of(graph, node, index, (strategy,), mesh)[0]


def targets_of(
    graph: RuledGraph, node: Node, index: int, strategies: Sequence[Strategy], mesh: Mesh
) -> tuple[Target, ...]:
    """The same under each of several strategies."""
    rule, value = graph.rules[node.name], graph.capture.values[node.operands[index]]
    known = _known(graph, mesh, ("target", id(rule), index, value.shape, value.needs_gradient))
    found: list[Target] = []
    for strategy in strategies:
        target = known.get(strategy)
        if target is None:
            layout = rule.operand_layout(index, strategy).normalised(value.shape, mesh)
            partial = rule.operand_gradient_partial(index, strategy, mesh) if value.needs_gradient else ()
            target = known[strategy] = the_one(graph, Target(layout, partial), mesh)
        found.append(target)
    return tuple(found)


def made_by(graph: RuledGraph, node: Node, index: int, strategy: Strategy, mesh: Mesh) -> Layout:
    """How result ``index`` of ``node`` is laid out under a strategy, units normalised; once for equal layers."""
    return each_made_by(graph, node, index, (strategy,), mesh)[0]


def each_made_by(
    graph: RuledGraph, node: Node, index: int, strategies: Sequence[Strategy], mesh: Mesh
) -> tuple[Layout, ...]:
    """The same under each of several strategies."""
    rule, shape = graph.rules[node.name], graph.capture.values[node.results[index]].shape
    known = _known(graph, mesh, ("layout", id(rule), index, shape))
    found: list[Layout] = []
    for strategy in strategies:
        layout = known.get(strategy)
        if layout is None:
            layout = known[strategy] = rule.result_layout(index, strategy, mesh).normalised(shape, mesh)
        found.append(layout)
    return tuple(found)


def the_one(graph: RuledGraph, target: Target, mesh: Mesh) -> Target:
    """Of equal targets the one that is the same object."""
    found: Target = _known(graph, mesh, "targets").setdefault(target, target)
    return found


def _known(graph: RuledGraph, mesh: Mesh, of: Hashable) -> dict[Hashable, Any]:
    """What is known of a graph on a mesh; the mesh stays with it, so that its identity is given to no other."""
    key = "on a mesh", id(mesh), of
    if key not in graph.known:
        graph.known[key] = mesh, {}
    found: dict[Hashable, Any] = graph.known[key][1]
    return found
