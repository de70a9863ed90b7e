"""The plans that people know by name, for any graph: data parallel, tensor parallel, fully sharded.

They stand beside the plan that a search found, under the same costs (`report/comparison.py`), and can be run as any
other. No plan here knows names of modules or operators: what the batch is, the plan that follows it tells; what the
weights are, the graph tells. Pins and a limit of memory are not obeyed, so that a table shows what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from shardwright.graph.ir import Node, Value
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh
from shardwright.plan.boundary import fixed_leaves, output_layouts
from shardwright.plan.make import make_plan
from shardwright.plan.plan import Plan
from shardwright.plan.pricing.cost import Seconds
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.plan.request import PlanRequest
from shardwright.plan.searching.search import search
from shardwright.plan.searching.space import Space
from shardwright.plan.spaces import with_parameters
from shardwright.rules.notation import OpRule, Strategy


def data_parallel(graph: RuledGraph, request: PlanRequest) -> Plan:
    """Every device has all parameters and its rows of the batch; gradients are added up."""
    return make_plan(graph.capture, _free(request))


def fully_sharded(graph: RuledGraph, request: PlanRequest) -> Plan:
    """As data parallel, but each parameter is stored in as many parts as there are devices, and gathered at its use.

    The backward gathers it again, as that of FSDP does.
    """
    plan = data_parallel(graph, request)
    stored = {value.name: _in_parts(value, plan.mesh) for value in graph.capture.of_kind("parameter")}
    return replace(plan, leaves={**plan.leaves, **stored}, again=frozenset(stored))


def tensor_parallel(graph: RuledGraph, request: PlanRequest) -> Plan:
    """Weights are split over the last axis of the mesh and the batch over the others, in the manner of Megatron-LM.

    Over the last axis every operator that has a matrix of weights splits it where it can, the others follow, and the
    batch is whole; among such plans it is the one that takes the least seconds.
    """
    mesh = request.mesh.without_ones()
    if not mesh.axes:
        return data_parallel(graph, request)
    leaves = fixed_leaves(graph.capture, mesh, request.inputs, {}, every_rank=False)
    outputs = output_layouts(graph.capture, mesh, leaves)
    following = data_parallel(graph, request).strategies
    # Equal choices are one object, which a search asks for.
    alike: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = {}
    strategies = {}
    for node in graph.capture.nodes:
        found = tuple(_over_weights(node, graph, following[node.name], mesh))
        strategies[node.name] = alike.setdefault(found, found)
    space = Space(graph, mesh, strategies, with_parameters(graph, mesh, strategies, leaves), outputs)
    choice = search(space, Seconds(request.hardware))
    made = choice.strategies, choice.leaves, outputs
    return Plan(graph, mesh, request.mesh, "auto", "none", *made, optimizer=request.optimizer)


KNOWN_PLANS: Mapping[str, Callable[[RuledGraph, PlanRequest], Plan]] = {
    "data parallel": data_parallel,
    "tensor parallel": tensor_parallel,
    "fully sharded": fully_sharded,
}


def _free(request: PlanRequest) -> PlanRequest:
    """The request of data parallelism on as many devices, whatever is stored already and however much it holds."""
    return replace(request, mode="data", search=None, storage={}, axes=None, memory=None)


def _in_parts(value: Value, mesh: Mesh) -> Layout:
    """Cut the first dim that gives every device as much, else the first that gives every device something."""
    fits = [dim for dim, size in enumerate(value.shape) if size % mesh.size == 0]
    fits += [dim for dim, size in enumerate(value.shape) if size >= mesh.size]
    return Layout.split(len(value.shape), dict.fromkeys(fits[:1], mesh.names))


def _over_weights(node: Node, graph: RuledGraph, following: Strategy, mesh: Mesh) -> Iterator[Strategy]:
    """The batch over all axes but the last; over the last the weights, where there are any, else what there is."""
    rule = graph.rules[node.name]
    *others, last = mesh.names
    batch = {factor.name: tuple(others) for factor, axes in zip(rule.factors, following.axes, strict=True) if axes}
    partial = tuple(others) if following.partial else ()
    splittable = [rule.factors[i].name for i in rule.splittable]
    free = [name for name in splittable if name not in batch and rule.sizes[name] % mesh.sizes[last] == 0]
    weights = [name for name in free if name in _of_weights(node, graph, rule)]
    if not weights:
        yield rule.strategy(batch, partial)
        if rule.linear_operands and not any(factor.kind == "sum" for factor in rule.factors):
            yield rule.strategy(batch, (*partial, last))
    for name in weights or free:
        yield rule.strategy(batch | {name: (last,)}, partial)


def _of_weights(node: Node, graph: RuledGraph, rule: OpRule) -> set[str]:
    """The factors that are dims of a matrix of parameters which the operator reads."""
    values = [graph.capture.values[name] for name in node.operands]
    matrices = [dims for value, dims in zip(values, rule.operands, strict=True) if value.kind == "parameter"]
    return {dim[0] for dims in matrices if len(dims) > 1 for dim in dims if dim}
