"""The planner: from a capture and a request to a plan.

Where the mode searches nothing, every operator follows the split of the batch (`choices.data_parallel`), and no search
is imported. Else `hidden.searched_plan` searches, by the row that `searches.py` has for the search.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from shardwright.common.stages import stage
from shardwright.common.words import in_bytes
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.mesh.mesh import PIPELINE, SEARCHED_STAGES, UNNAMED, Mesh
from shardwright.compiler.plan.axis_names import with_axis_names
from shardwright.compiler.plan.plan import Plan, plan_of
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.memory import OptimizerStates
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import Choice, OverBudget, Space, data_parallel
from shardwright.compiler.plan.searches import MODES
from shardwright.compiler.plan.spaces import blocks_for, fixed_leaves, output_layouts
from shardwright.errors import UsageError


def make_plan(capture: Capture, request: PlanRequest) -> Plan:
    """Decide the layout of every value and the strategy of every operator.

    Raises:
        UsageError: where the inputs do not fit the batch or the mesh.
        StrategyError: where a pin cannot be fulfilled.
        PlanError: where no plan exists.
    """
    with _garbage_collection_paused(), stage(search=request.searched):
        graph = RuledGraph.of(capture)
        plan = _staged(graph, request) if PIPELINE in request.mesh.names else _with_stages_or_without(graph, request)
        return plan if request.axes is not None else with_axis_names(plan)  # an earlier plan has named them


def _made(graph: RuledGraph, request: PlanRequest, *, on_few_axes: bool = False) -> Plan:
    for name in ("microbatches", "schedule"):
        if (given := getattr(request, name)) is not None:
            raise UsageError(
                f"{name}={given!r} goes with stages, which the mesh {request.mesh} lacks; type "
                f"mesh='{PIPELINE}=2,...' (--mesh)"
            )
    if request.searched is None:
        return data_parallel_plan(graph, request)
    from shardwright.compiler.plan.hidden import searched_plan  # modes that search nothing load no search

    _refuse_what_cannot_fit(graph, request)
    return searched_plan(graph, request, request.searched, on_few_axes=on_few_axes)


def _staged(graph: RuledGraph, request: PlanRequest) -> Plan:
    from shardwright.compiler.plan.pipeline.staged import staged_plan  # loaded where a mesh has stages

    return staged_plan(graph, request, _made)


def _with_stages_or_without(graph: RuledGraph, request: PlanRequest) -> Plan:
    """Return a plan without pipeline stages, or one with them, where it is quicker or nothing else fits.

    Whether one is quicker is looked for where the request says so.

    Raises:
        PlanError: where no plan fits.
    """
    wanted = request.search_stages
    if wanted and not request.mesh.is_unnamed:
        raise UsageError(f"{SEARCHED_STAGES} divides devices without names, and the mesh is {request.mesh}")
    without = replace(request, search_stages=False, microbatches=None, schedule=None) if wanted else request
    error: OverBudget | None = None
    plan: Plan | None
    try:
        plan = _made(graph, without)
        if not wanted:
            return plan
    except OverBudget as over:
        if not (wanted or _may_have_stages(graph, request)):
            raise
        error, plan = over, None
    from shardwright.compiler.plan.pipeline.search import best_in_stages  # loaded where stages are looked for

    found = best_in_stages(graph, request, partial(_made, on_few_axes=True), plan)  # beside the axis of stages
    if found is None:
        assert error is not None
        raise error
    return found


def _may_have_stages(graph: RuledGraph, request: PlanRequest) -> bool:
    """Return whether devices may be divided into stages where nobody has said how they are."""
    free = request.mesh.is_unnamed and request.inputs == "split" and not request.storage and request.axes is None
    fits = request.memory is not None and sum(fixed_bytes(graph.capture, request.optimizer)) <= (
        request.mesh.size * request.memory
    )
    return free and fits and request.searched == "exact" and bool(graph.capture.loss)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause the collection of cycles: a search makes none of what is large, and each pass walks the whole graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def fixed_bytes(capture: Capture, optimizer: OptimizerStates) -> tuple[int, int, int]:
    """Return the bytes of the parameters, of their gradients, and of the states of the optimizer, on all devices."""
    parameters = capture.of_kind("parameter")
    trained = sum(value.bytes for value in parameters if value.needs_gradient)
    return sum(value.bytes for value in parameters), trained, optimizer.bytes_for(trained)


def _refuse_what_cannot_fit(graph: RuledGraph, request: PlanRequest) -> None:
    """Refuse, before a search, what no plan can hold: parameters split over all devices, their gradients and states."""
    devices, kinds = request.mesh.size, fixed_bytes(graph.capture, request.optimizer)
    floor, each = sum(kinds), [in_bytes(size / devices) for size in kinds]
    if request.memory is not None and floor > devices * request.memory:
        raise OverBudget(
            f"no plan was found under which a device holds {in_bytes(request.memory)} or less, and there is none: "
            f"however they are split, the parameters ({each[0]}), their gradients ({each[1]}) and the states of "
            f"{request.optimizer.name} ({each[2]}) take {in_bytes(floor / devices)} on each of {devices} devices, and "
            f"a step keeps more; type a larger memory= (--memory), at least {-(-floor // request.memory)} devices, a "
            "smaller dtype, or an optimizer that keeps less"
        )


def data_parallel_plan(graph: RuledGraph, request: PlanRequest) -> Plan:
    """Return the plan without a search: every operator follows the split of the batch.

    It takes one axis, which splits a batch that does not divide as loaders do, ceil-sized parts first; unless the
    slices of the inputs are given, which may need several.
    """
    one_axis = Mesh.of(**{UNNAMED: request.mesh.size}).without_ones()
    mesh = request.axes or (request.mesh.atomic() if isinstance(request.inputs, Mapping) else one_axis)
    inputs = request.inputs if MODES[request.mode].splits else "whole"
    # A rank without rows keeps its place: the batch is split over all of them, however few rows there are.
    leaves = fixed_leaves(graph.capture, mesh, inputs, request.storage, every_rank=True)
    outputs = output_layouts(graph.capture, mesh, leaves)
    space = Space(graph, mesh, {}, {}, outputs, *blocks_for(graph, request))
    between_hosts = request.hardware.ranks_per_host is not None
    choice = data_parallel(graph, mesh, leaves, outputs, whole_lookups=between_hosts)
    plan = plan_of(space, request, replace(choice, recomputed=space.demanded))
    if request.memory is None or plan.held.total <= request.memory:
        return plan
    return _within_memory(space, request, choice, request.memory)


def _within_memory(space: Space, request: PlanRequest, choice: Choice, limit: int) -> Plan:
    """Return the plan of a choice with as many blocks recomputed as it takes to fit.

    Raises:
        OverBudget: where it never does.
    """
    from shardwright.compiler.plan.mesh_search import MeshSearch

    search = MeshSearch(space.mesh, request, space, Seconds(request.hardware, request.optimizer))
    choice = search.settle(choice)
    if (within := search.fewest(choice, limit)) is not None:
        return search.plan(replace(within, cost=None))
    over = search.refusal([choice], 0.0)
    raise OverBudget(f"{over}; or mode='auto', which splits parameters too", over.least_bytes)
