"""From a capture and a request to a plan.

Where the mode searches nothing, every operator follows the split of the batch (`data.py`). Else the row of the search
says which strategies are choices and what is minimised over them (`searches.py`); `search.py` finds the minimum, and
`recursive.py` what is the best axis by axis. `meshes.py` says on which meshes, `weighing.py` what choices hold and cost
there, and `others.py` what stands beside a search that leaves a gap.

Where the hardware hides the reduction of gradients behind the backward, several searches are made (`hidden.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from shardwright.common.words import in_bytes
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.boundary import fixed_leaves, output_layouts
from shardwright.compiler.plan.meshes import Meshes
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.ruled import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.searches import MODES, SEARCHES, Search
from shardwright.compiler.plan.searching.budget import OverBudget
from shardwright.compiler.plan.searching.data import data_parallel
from shardwright.compiler.plan.searching.hidden import cheapest_with_hidden
from shardwright.compiler.plan.searching.space import Space
from shardwright.compiler.plan.spaces import blocks_for
from shardwright.compiler.plan.weighing import Weighing


def make_plan(capture: Capture, request: PlanRequest) -> Plan:
    """Decide the layout of every value and the strategy of every operator.

    Raises:
        UsageError: where the inputs do not fit the batch or the mesh.
        StrategyError: where a pin cannot be fulfilled.
        PlanError: where no plan exists.
    """
    with _uncollected():
        return _made(RuledGraph.of(capture), request)


def _made(graph: RuledGraph, request: PlanRequest) -> Plan:
    if request.searched is None:
        return _following_the_batch(graph, request)
    row = SEARCHES[request.searched]
    _refuse_what_cannot_fit(graph, request)
    objective = row.objective(request.hardware, request.optimizer)
    if isinstance(objective, Seconds) and request.hardware.hides_gradients:
        return cheapest_with_hidden(
            lambda of: _searched(graph, request, replace(row, objective=lambda *_: of)), objective
        )
    return _searched(graph, request, row)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, Python looks for no cycles: searches make none of what is large, and each look goes through the graph."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def _searched(graph: RuledGraph, request: PlanRequest, row: Search) -> Plan:
    """The plan that costs least of those that a search finds."""
    meshes = Meshes(graph, request, row)
    if request.axes:
        meshes.look_at([meshes.weighing(request.axes)])
    else:
        meshes.look()
    return meshes.found()


def _refuse_what_cannot_fit(graph: RuledGraph, request: PlanRequest) -> None:
    """Refuse, before a search, what no plan can hold: parameters cut over all devices, their gradients and states."""
    devices, parameters = request.mesh.size, graph.capture.of_kind("parameter")
    trained = sum(value.bytes for value in parameters if value.needs_gradient)
    kinds = sum(value.bytes for value in parameters), trained, request.optimizer.bytes_for(trained)
    floor, each = sum(kinds), [in_bytes(size / devices) for size in kinds]
    if request.memory is not None and floor > devices * request.memory:
        raise OverBudget(
            f"no plan was found under which a device holds {in_bytes(request.memory)} or less, and there is none: "
            f"however they are split, the parameters ({each[0]}), their gradients ({each[1]}) and the states of "
            f"{request.optimizer.name} ({each[2]}) take {in_bytes(floor / devices)} on each of {devices} devices, and "
            f"a step keeps more; type a larger memory= (--memory), at least {-(-floor // request.memory)} devices, a "
            "smaller dtype, or an optimizer that keeps less"
        )


def _following_the_batch(graph: RuledGraph, request: PlanRequest) -> Plan:
    """The plan without a search.

    It takes one axis, which cuts a batch that does not divide as loaders do: ceil-sized parts first; unless the slices
    of the inputs are asked for, which may need several.
    """
    one_axis = Mesh.of(ranks=request.mesh.size).without_ones()
    mesh = request.axes or (request.mesh.atomic() if isinstance(request.inputs, Mapping) else one_axis)
    inputs = request.inputs if MODES[request.mode].splits else "whole"
    # A rank without rows keeps its place: the batch is cut over all of them, however few rows there are.
    leaves = fixed_leaves(graph.capture, mesh, inputs, request.storage, every_rank=True)
    outputs = output_layouts(graph.capture, mesh, leaves)
    space = Space(graph, mesh, {}, {}, outputs, *blocks_for(graph, request))
    weighing = Weighing(mesh, request, space, Seconds(request.hardware, request.optimizer))
    between_hosts = request.hardware.ranks_per_host is not None
    choice = weighing.settle(data_parallel(graph, mesh, leaves, outputs, whole_lookups=between_hosts))
    plan = weighing.plan(choice)
    if request.memory is not None and plan.held.total > request.memory:
        if (within := weighing.fewest(choice, request.memory)) is not None:
            return weighing.plan(replace(within, cost=None))
        over = weighing.refusal([choice], 0.0)
        raise OverBudget(f"{over}; or mode='auto', which splits parameters too", over.least_bytes)
    return plan
