"""The plans that people know by name, for any graph: data parallel, tensor parallel, fully sharded.

They stand beside the plan that a search found, under the same costs (`compiler/report/plans/comparison.py`), and can
be run as any other. No plan here knows names of modules or operators: what the batch is, the plan that follows it
tells; what the weights are, the graph tells. Pins and a limit of memory are not obeyed, so that a table
shows what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardwright.compiler.plan.axis_names import with_axis_names
from shardwright.compiler.plan.make import data_parallel_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.joined import SMALL_WHOLE_BYTES
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import Space, casting_shards
from shardwright.compiler.plan.search.search import search
from shardwright.compiler.plan.spaces import fixed_leaves, in_parts, output_layouts, tensor_space


def data_parallel(graph: RuledGraph, request: PlanRequest) -> Plan:
    """Every device has all parameters and its rows of the batch; gradients are added up."""
    return with_axis_names(_data_parallel(graph, request))


def fully_sharded(graph: RuledGraph, request: PlanRequest) -> Plan:
    """Data parallel, but each parameter is sharded over all devices and all-gathered at its use (FSDP, ZeRO-3).

    It is resharded after the forward and gathered again by the backward, unless it is so small that this saves nothing.
    """
    plan, parameters = _data_parallel(graph, request), graph.capture.of_kind("parameter")
    stored = {value.name: in_parts(value, plan.mesh) for value in parameters}
    gathered = (value for value in graph.capture.values.values() if value.of_parameter)  # or their casts are
    again = frozenset(value.name for value in gathered if value.bytes > SMALL_WHOLE_BYTES)
    strategies = casting_shards(graph, plan.mesh, plan.strategies, stored)
    return with_axis_names(replace(plan, leaves={**plan.leaves, **stored}, again=again, strategies=strategies))


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
    settled = Space(graph, mesh, {}, leaves, outputs)
    space = tensor_space(graph, mesh, _data_parallel(graph, request).strategies, settled)
    choice = search(space, Seconds(request.hardware, request.optimizer))
    made = choice.strategies, choice.leaves, outputs
    plan = Plan(graph, mesh, request.mesh, "auto", "none", *made, optimizer=request.optimizer)
    return with_axis_names(replace(plan, hardware=request.hardware))


BASELINES: Mapping[str, Callable[[RuledGraph, PlanRequest], Plan]] = {
    "data parallel": data_parallel,
    "tensor parallel": tensor_parallel,
    "fully sharded": fully_sharded,
}


def _data_parallel(graph: RuledGraph, request: PlanRequest) -> Plan:
    """Return the data parallel plan on as many devices, whatever is stored already and however much it holds."""
    free = replace(request, mode="data", search=None, storage={}, axes=None, memory=None)
    return data_parallel_plan(graph, free)
