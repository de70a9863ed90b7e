"""The search for the number of pipeline stages, and of microbatches.

For each number of stages that divides the devices the ranks of a stage are planned once, by the search that plans
without stages, on few axes. Then microbatches are halved for as long as a step gets quicker: fewer of them wait longer,
and each is larger. What no cut can bring below the best plan so far is not cut, and what takes no less than that even
if memory had no limit is not made to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwright.compiler.mesh.mesh import PIPELINE, UNNAMED, Axis, Mesh, TriedStages
from shardwright.compiler.plan.pipeline.staged import StagedPlans
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.memory import Blocks
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.errors import PlanError

Make = Callable[[RuledGraph, PlanRequest], Plan]


def best_in_stages(graph: RuledGraph, request: PlanRequest, make: Make, without: Plan | None = None) -> Plan | None:
    """Return the quickest plan on unnamed devices, with stages or ``without``; None where there is no plan at all.

    Args:
        make: makes the plan of one stage.
    """
    best, least_s, found = without, math.inf, [TriedStages(1, why="nothing fits")]
    if without is not None:
        least_s = Prices(without, request.hardware).step_s
        found = [TriedStages(1, step_s=least_s)]
    for count in _numbers(graph, request):
        plan, tried = _tried(graph, request, make, count, least_s)
        found.append(tried)
        if plan is not None and tried.step_s is not None and tried.step_s < least_s:
            best, least_s = plan, tried.step_s
    return None if best is None else replace(best, tried=tuple(found))


def _numbers(graph: RuledGraph, request: PlanRequest) -> Iterator[int]:
    """Yield the numbers of stages that divide the devices, and are no more than there are layers or rows."""
    layers = len(graph.once(Blocks).repeated())
    most = layers if layers > 1 else len(graph.capture.nodes)
    for count in range(2, min(request.mesh.size, most, graph.capture.rows) + 1):
        if request.mesh.size % count == 0:
            yield count


def _tried(
    graph: RuledGraph, request: PlanRequest, make: Make, count: int, below_s: float
) -> tuple[Plan | None, TriedStages]:
    """Return the best plan with so many stages if its step takes less than ``below_s``, and what is told of it."""
    rest = request.mesh.size // count
    axes = (Axis(PIPELINE, count), *([Axis(UNNAMED, rest)] if rest > 1 else []))
    asked = replace(request, mesh=Mesh(axes), search_stages=False)
    best: Plan | None = None
    said = TriedStages(count, why="no number of microbatches divides the rows of a rank")
    try:
        plans = StagedPlans(graph, asked, make)
        for microbatches in [request.microbatches] if request.microbatches else reversed(plans.even_microbatches):
            to_beat_s, of = min(below_s, _told_s(said)), plans.with_microbatches(microbatches)
            bound_s = plans.least_s(microbatches)
            if bound_s < to_beat_s:
                bound_s = of.least_s
            if bound_s >= to_beat_s:
                said = min(said, TriedStages(count, microbatches, bound_s, is_bound=True), key=_told_s)
                continue
            priced = of.priced(to_beat_s)
            if priced.step_s >= _told_s(said):
                break
            fits = request.memory is None or priced.plan.memory == request.memory
            best = priced.plan if fits else None
            said = TriedStages(count, microbatches, priced.step_s, is_bound=not fits)
    except PlanError as error:
        if said.step_s is None:
            said = replace(said, why=str(error).partition("; ")[0])
    return best, said


def _told_s(tried: TriedStages) -> float:
    return math.inf if tried.step_s is None else tried.step_s
