"""Whether decisions that were read can be those of a plan for its graph: an edited file may have any."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.plan.decided.decisions import Decisions
from shardwright.errors import PlanError

_MOST_DEVICES = 1 << 24


def refuse_impossible(plan: Decisions) -> None:
    """Raise `PlanError` where a decision is lacking, is no one of this graph, or contradicts another."""
    _refuse_numbers(plan)
    _refuse_incomplete(plan)
    for name, axes in _axes(plan):
        _refuse_axes(plan, name, axes)
    for name, layout in (*plan.leaves.items(), *plan.outputs.items()):
        _refuse_layout(plan, name, layout)
    _refuse_recomputed(plan)


def _refuse_numbers(plan: Decisions) -> None:
    """Refuse figures that none of the planner's can be: whatever goes through all devices would not end."""
    if plan.mesh.size > _MOST_DEVICES or plan.mesh.size != plan.named.size:
        sizes = " and ".join(str(mesh) for mesh in (plan.mesh, plan.named))
        raise PlanError(f"the plan has the meshes {sizes[:200]}, which are not of the same devices; plan again")
    figures = {"cost": plan.cost, "bound": plan.bound, "memory": plan.memory}
    figures |= {"per_entry": plan.optimizer.per_entry, "per_parameter_bytes": plan.optimizer.per_parameter_bytes}
    for name, figure in figures.items():
        if figure is not None and not (math.isfinite(figure) and figure >= 0):
            raise PlanError(f"{name} of the plan is {figure}, expected a number from 0 on; plan again")
    for link in (axis.link for axis in (*plan.mesh.axes, *plan.named.axes)):
        if link is not None and not (math.isfinite(link.latency_s) and 0 < link.bandwidth < math.inf):
            raise PlanError(f"the mesh of the plan has a {link}, expected seconds and bytes per second; plan again")


def _refuse_incomplete(plan: Decisions) -> None:
    """Refuse a plan that lacks a decision of its graph, or has one of another."""
    capture = plan.capture
    decided: dict[str, tuple[Collection[str], Collection[str]]] = {
        "strategies": (plan.strategies, {node.name for node in capture.nodes}),
        "leaves": (plan.leaves, {value.name for value in capture.values.values() if value.kind != "result"}),
        "outputs": (plan.outputs, {capture.loss, *capture.aux, *capture.mutations.values()}),
        "values": ({*plan.again, *capture.values}, capture.values),
    }
    for kind, (found, needed) in decided.items():
        if differing := sorted(set(found) ^ set(needed)):
            raise PlanError(f"the {kind} of the plan lack or add {', '.join(differing[:5])}; plan again")
    for node in capture.nodes:
        rule, axes = plan.graph.rules[node.name], plan.strategies[node.name].axes
        if len(axes) != len(rule.factors) or not {i for i, cut in enumerate(axes) if cut} <= set(rule.splittable):
            raise PlanError(f"the plan was made with another rule of {node.op} than {rule}; plan again")


def _axes(plan: Decisions) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the axes of each decision, with what it is of."""
    for name, layout in (*plan.leaves.items(), *plan.outputs.items()):
        yield name, (*(axis for split in layout.dims for axis in split.axes), *layout.partial)
    for name, strategy in plan.strategies.items():
        yield name, (*(axis for axes in strategy.axes for axis in axes), *strategy.partial)


def _refuse_axes(plan: Decisions, name: str, axes: tuple[str, ...]) -> None:
    if unknown := sorted(set(axes) - set(plan.mesh.names)):
        raise PlanError(f"the plan splits over {', '.join(unknown)}, which its mesh ({plan.mesh}) has not; plan again")
    if len(set(axes)) < len(axes):
        raise PlanError(f"the plan splits {name} over an axis more than once ({', '.join(axes)}); plan again")


def _refuse_layout(plan: Decisions, name: str, layout: Layout) -> None:
    shape = plan.capture.values[name].shape
    if len(layout.dims) != len(shape):
        raise PlanError(
            f"the plan has {len(layout.dims)} dims of {name}, which has the shape {list(shape)}; plan again"
        )
    if any(split.unit < 1 or size % split.unit for split, size in zip(layout.dims, shape, strict=True)):
        raise PlanError(f"the plan cuts {name} of the shape {list(shape)} into other units ({layout}); plan again")
    if layout.partial and name in plan.leaves:
        raise PlanError(f"the plan stores {name} as a sum over {', '.join(layout.partial)}; plan again")


def _refuse_recomputed(plan: Decisions) -> None:
    if len(plan.block_of) < sum(len(block.nodes) for block in plan.blocks):
        raise PlanError("the plan computes modules again that lie in one another; plan again")
    if without := sorted(plan.recomputed - {block.name for block in plan.blocks}):
        raise PlanError(f"the plan computes {', '.join(without[:5])} again, of which nothing is kept; plan again")
