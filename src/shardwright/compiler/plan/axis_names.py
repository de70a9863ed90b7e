"""Names for the mesh axes of a plan that nobody named, by what the plan does along them.

An axis is named by the operators that read parameters, each with the weight of its flops: ``tp`` (tensor parallel)
where most of them split a dim of the parameter over it, ``dp`` (data parallel) where most split the first dim of the
activations, the batch, or another dim over the axis that the rows of the batch are split over, ``cp`` (context
parallel) where most split another dim of these, and ``ep`` (expert parallel) where most split experts, whether tokens
are sent to them or not. Where most bytes of the parameters are stored split over a ``dp`` axis, to be gathered for
their use, it is ``fsdp`` (fully sharded). Axes of one role are numbered, ``dp.0`` and ``dp.1``. An axis over which
nothing is split keeps its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Axis, Mesh
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import work_of
from shardwright.compiler.rules.notation import Strategy


def with_axis_names(plan: Plan) -> Plan:
    """Return the same plan, its axes named by what it does along them unless the user has named them."""
    if not plan.mesh.is_unnamed:
        return plan
    names = dict(zip(plan.mesh.names, _numbered(axis_roles(plan)), strict=True))
    axes = tuple(Axis(names[axis.name], axis.size, axis.link) for axis in plan.mesh.axes)
    # Equal strategies and layouts of a plan are mostly one object, and stay one.
    strategies = {strategy: _strategy(strategy, names) for strategy in set(plan.strategies.values())}
    layouts = {layout: _layout(layout, names) for layout in {*plan.leaves.values(), *plan.outputs.values()}}
    return replace(
        plan,
        mesh=Mesh(axes),
        strategies={name: strategies[strategy] for name, strategy in plan.strategies.items()},
        leaves={name: layouts[layout] for name, layout in plan.leaves.items()},
        outputs={name: layouts[layout] for name, layout in plan.outputs.items()},
    )


def axis_roles(plan: Plan) -> tuple[str, ...]:
    """Return the role of each axis of the mesh, in its order: "dp", "fsdp", "tp", "cp" or "ep"; else its name."""
    flops: dict[str, Counter[str]] = {axis: Counter() for axis in plan.mesh.names}
    weights = {value.name for value in plan.capture.of_kind("parameter")}
    inputs = [plan.leaves[value.name] for value in plan.capture.of_kind("input")]
    of_rows = {axis for layout in inputs for dim in layout.dims[:1] for axis in dim.axes}
    for node in plan.capture.nodes:
        if node.operands and weights.issuperset(node.operands):  # a view or a cast of parameters
            weights.update(node.results)
        elif not weights.isdisjoint(node.operands):
            for axis, role in _roles(plan, node, weights):
                role = "dp" if role == "cp" and axis in of_rows else role
                flops[axis][role] += work_of(plan.graph, node).flops + 1
    sharded = _sharded_bytes(plan)
    return tuple(_role(axis, flops[axis], sharded[axis], sharded[""]) for axis in plan.mesh.names)


def _role(axis: str, flops: Counter[str], sharded: int, parameters: int) -> str:
    role = flops.most_common(1)[0][0] if flops else ""
    if role in ("dp", "") and 2 * sharded > parameters:
        return "fsdp"
    return role or axis


def _roles(plan: Plan, node: Node, weights: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each axis over which an operator that reads parameters is split, and as what."""
    rule, strategy = plan.graph.rules[node.name], plan.strategies[node.name]
    tensors = [(dims, name in weights) for name, dims in zip(node.operands, rule.operands, strict=True)]
    tensors += [(dims, False) for dims in rule.results]
    of_weights = {factor for dims, is_weight in tensors if is_weight for dim in dims for factor in dim}
    batch = {factor for dims, is_weight in tensors if not is_weight for dim in dims[:1] for factor in dim}
    experts = {axis for at in rule.along if rule.factors[at].kind == "sum" for axis in strategy.axes[at]}
    yield from ((axis, "ep") for axis in experts)
    for factor, axes in zip(rule.factors, strategy.axes, strict=True):
        role = "tp" if factor.name in of_weights else "dp" if factor.name in batch else "cp"
        yield from ((axis, role) for axis in axes if axis not in experts)


def _sharded_bytes(plan: Plan) -> Counter[str]:
    """Return the bytes of the parameters that are split over each axis, and under "" those of all."""
    found: Counter[str] = Counter()
    for value in plan.capture.of_kind("parameter"):
        found.update(dict.fromkeys(["", *plan.leaves[value.name].split_axes], value.bytes))
    return found


def _numbered(roles: Sequence[str]) -> Iterator[str]:
    """Yield different names: a role that several axes have is numbered."""
    for at, role in enumerate(roles):
        yield role if roles.count(role) == 1 else f"{role}.{roles[:at].count(role)}"


def _strategy(strategy: Strategy, names: Mapping[str, str]) -> Strategy:
    return Strategy(tuple(_renamed(axes, names) for axes in strategy.axes), _renamed(strategy.partial, names))


def _layout(layout: Layout, names: Mapping[str, str]) -> Layout:
    dims = tuple(replace(dim, axes=_renamed(dim.axes, names)) for dim in layout.dims)
    return Layout(dims, _renamed(layout.partial, names))


def _renamed(axes: Sequence[str], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names[axis] for axis in axes)
