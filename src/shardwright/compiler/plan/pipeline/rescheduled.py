"""The same plan with another schedule: what the ranks of a stage do stays, stages are cut anew where there are more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import MICROBATCHES
from shardwright.compiler.plan.pipeline.staged import StagedPlans
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.schedule import SCHEDULES
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.rules.notation import Strategy
from shardwright.errors import PlanError, UsageError


def with_other_schedules(plan: Plan, request: PlanRequest) -> Iterator[tuple[str, Plan | str]]:
    """Yield each other schedule by its name with the plan, or with why the plan cannot have it.

    What the plan recomputes stays recomputed; more is, where a schedule needs it to keep the memory of the request.
    """
    assert plan.stages is not None
    inside = _without_stages(plan)
    for name in SCHEDULES:
        if name != plan.stages.schedule:
            asked = replace(request, mesh=plan.devices, axes=None, search_stages=False, schedule=name)
            try:
                plans = StagedPlans(plan.graph, asked, lambda _graph, _request: inside)
                yield name, plans.with_microbatches(plan.stages.microbatches).priced().plan
            except (PlanError, UsageError) as error:
                yield name, str(error)


def _without_stages(plan: Plan) -> Plan:
    """Return what the ranks of one stage do, for all operators and the whole batch."""
    return replace(
        plan,
        mesh=plan.sharers,
        named=plan.sharers,
        strategies={name: _strategy(strategy) for name, strategy in plan.strategies.items()},
        leaves=_layouts(plan.leaves),
        outputs=_layouts(plan.outputs),
        stages=None,
        tried=(),
    )


def _strategy(strategy: Strategy) -> Strategy:
    axes = tuple(tuple(axis for axis in of if axis != MICROBATCHES) for of in strategy.axes)
    return Strategy(axes, tuple(axis for axis in strategy.partial if axis != MICROBATCHES))


def _layouts(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    return {name: layout.without(MICROBATCHES) for name, layout in layouts.items()}
