"""The search for the number of pipeline stages, and of microbatches.

For each number of stages that divides the devices the ranks of a stage are planned once, by the search that plans
without stages. Then microbatches are halved for as long as a step gets quicker: fewer of them wait longer, and each is
larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardwright.common.words import in_time
from shardwright.compiler.mesh.mesh import PIPELINE, UNNAMED, Axis, Mesh
from shardwright.compiler.plan.pipeline.costs import StagedCosts
from shardwright.compiler.plan.pipeline.staged import StagedPlans
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.memory import Blocks
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import PlanError

Make = Callable[[RuledGraph, PlanRequest], Plan]


@dataclass(frozen=True)
class Tried:
    """A number of stages that was tried: the best plan and its seconds, or why there is none."""

    stages: int
    plan: Plan | None
    seconds: float
    why: str

    def __str__(self) -> str:
        if self.plan is None or self.plan.stages is None:
            return f"{PIPELINE}={self.stages}: {self.why}"
        return f"{PIPELINE}={self.stages}, {self.plan.stages.microbatches} microbatches: {in_time(self.seconds)}"


def best_in_stages(graph: RuledGraph, request: PlanRequest, make: Make, below: float = math.inf) -> Plan | None:
    """Return the quickest plan with stages on unnamed devices that takes less than ``below`` seconds; None without one.

    Args:
        make: makes the plan of one stage.
    """
    tried = [_tried(graph, request, make, count) for count in _numbers(graph, request)]
    found = min((each for each in tried if each.plan is not None), key=lambda each: each.seconds, default=None)
    if found is None or found.plan is None or found.seconds >= below:
        return None
    without = (f"without stages: {in_time(below)}",) if math.isfinite(below) else ("without stages: nothing fits",)
    return replace(found.plan, considered=(*without, *map(str, tried)))


def _numbers(graph: RuledGraph, request: PlanRequest) -> Iterator[int]:
    """Yield the numbers of stages that divide the devices, and are no more than there are layers or rows."""
    layers = len(graph.once(Blocks).repeated())
    most = layers if layers > 1 else len(graph.capture.nodes)
    for count in range(2, min(request.mesh.size, most, graph.capture.rows) + 1):
        if request.mesh.size % count == 0:
            yield count


def _tried(graph: RuledGraph, request: PlanRequest, make: Make, count: int) -> Tried:
    """Return the best plan with so many stages."""
    rest = request.mesh.size // count
    axes = (Axis(PIPELINE, count), *([Axis(UNNAMED, rest)] if rest > 1 else []))
    asked = replace(request, mesh=Mesh(axes), search_stages=False)
    best, why = Tried(count, None, math.inf, "no number of microbatches divides the rows of a rank"), ""
    try:
        plans = StagedPlans(graph, asked, make)
        for microbatches in [request.microbatches] if request.microbatches else reversed(plans.even_microbatches):
            plan = plans.plan(microbatches)
            seconds = StagedCosts(plan, request.hardware).step_s
            if seconds >= best.seconds:
                break
            best = Tried(count, plan, seconds, "")
    except PlanError as error:
        why = str(error).partition("; ")[0]
    return replace(best, why=why) if why and best.plan is None else best
