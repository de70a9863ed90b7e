"""The plan that was found beside the plans that people know by name, under the same costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwright.common.words import in_bytes, in_time
from shardwright.compiler.mesh.mesh import UNNAMED, Mesh
from shardwright.compiler.plan.baselines import BASELINES
from shardwright.compiler.plan.pipeline.prices import StagedPrices, prices_of
from shardwright.compiler.plan.pipeline.rescheduled import with_other_schedules
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.text import table
from shardwright.errors import PlanError


def with_known_plans(plan: Plan, request: PlanRequest) -> dict[str, Plan | str]:
    """The found plan and the known ones by name; a known plan that there is not is told by the reason.

    A plan with pipeline stages has the same stages with other schedules beside it, too, and the known ones without.
    """
    found: dict[str, Plan | str] = {"this plan": plan}
    if plan.stages is not None:
        found |= {f"schedule {name}": other for name, other in with_other_schedules(plan, request)}
        request = replace(request, mesh=_without_stages(plan), microbatches=None, schedule=None, search_stages=False)
    for name, make in BASELINES.items():
        try:
            found[name] = make(plan.graph, request)
        except PlanError as error:
            found[name] = str(error)
    return found


def _without_stages(plan: Plan) -> Mesh:
    """Return the mesh of the devices of a plan with pipeline stages, for plans that have none."""
    pipeline, *others = plan.devices.axes
    name = next(name for name in ("dp", "dp.0", UNNAMED) if name not in plan.devices.names)
    return Mesh((replace(pipeline, name=name), *others))


def in_numbers(plans: Mapping[str, Plan | str], hardware: Hardware) -> dict[str, dict[str, Any]]:
    """Return the seconds and bytes of each plan by name, or why there is none."""
    return {
        name: {"error": plan} if isinstance(plan, str) else _numbers(plan, hardware) for name, plan in plans.items()
    }


def comparison(plans: Mapping[str, Plan | str], hardware: Hardware) -> str:
    """A table of what each plan takes, sends and holds; the seconds are those of ``hardware``."""
    staged = any(isinstance(plan, Plan) and plan.stages is not None for plan in plans.values())
    head = (
        "plan",
        "mesh",
        "a step takes",
        "computes",
        "communicates",
        "of that exposed",
        "updates",
        "each device sends",
        "holds of parameters",
        "in all",
        *["waits"] * staged,
    )
    rows = [
        (name, str(plan.mesh if plan.stages is None else plan.shown_mesh), *_cells(_numbers(plan, hardware), staged))
        for name, plan in plans.items()
        if not isinstance(plan, str)
    ]
    missing = [f"{name}: {plan}" for name, plan in plans.items() if isinstance(plan, str)]
    return "\n".join([table([head, *rows]), *missing])


def _numbers(plan: Plan, hardware: Hardware) -> dict[str, float]:
    prices = prices_of(plan, hardware)
    return {
        "step_s": prices.step_s,
        "computing_s": prices.computing_s,
        "communicating_s": prices.communicating_s,
        "exposed_s": prices.exposed_s,
        "updating_s": prices.updating_s,
        "sent_bytes": prices.sent_bytes,
        "parameter_bytes": plan.held.parameters,
        "held_bytes": plan.held.total,
        "bubble": prices.of_stages.idle if isinstance(prices, StagedPrices) else 0.0,
    }


def _cells(numbers: Mapping[str, float], staged: bool) -> Iterator[str]:
    for name, number in numbers.items():
        if name != "bubble":
            yield in_time(number) if name.endswith("_s") else in_bytes(number)
    if staged:
        yield f"{numbers['bubble']:.1%}"
