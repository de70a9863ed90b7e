"""The search for the number of pipeline stages, and of microbatches.

For each number of stages that divides the devices the ranks of a stage are planned once, by the search that plans
without stages. Then microbatches are halved for as long as a step gets quicker: fewer of them wait longer, and each is
larger. What takes no less than the best plan so far even if memory had no limit is not made to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwright.compiler.mesh.mesh import PIPELINE, UNNAMED, Axis, Mesh, TriedStages
from shardwright.compiler.plan.pipeline.costs import StagedCosts
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
    found = [_without(without, request)]
    for count in _numbers(graph, request):
        least_s = min((tried.step_s for plan, tried in found if plan and tried.step_s is not None), default=math.inf)
        found.append(_tried(graph, request, make, count, least_s))
    best = min((plan for plan, _ in found if plan), key=lambda plan: _step_s(plan, request), default=None)
    return None if best is None else replace(best, tried=tuple(tried for _, tried in found))


def _step_s(plan: Plan, request: PlanRequest) -> float:
    return (Prices if plan.stages is None else StagedCosts)(plan, request.hardware).step_s


def _without(plan: Plan | None, request: PlanRequest) -> tuple[Plan | None, TriedStages]:
    if plan is None:
        return None, TriedStages(1, why="nothing fits")
    return plan, TriedStages(1, step_s=_step_s(plan, request))


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
    least_s = math.inf
    try:
        plans = StagedPlans(graph, asked, make)
        for microbatches in [request.microbatches] if request.microbatches else reversed(plans.even_microbatches):
            plan = plans.plan(microbatches, min(below_s, least_s))
            seconds = _step_s(plan, request)
            if seconds >= least_s:
                break
            fits = request.memory is None or plan.memory == request.memory
            best, least_s = plan if fits else None, seconds
            said = TriedStages(count, microbatches, seconds, is_bound=not fits)
    except PlanError as error:
        if said.step_s is None:
            said = replace(said, why=str(error).partition("; ")[0])
    return best, said
