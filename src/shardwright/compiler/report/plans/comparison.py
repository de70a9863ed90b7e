"""The plan that was found beside the plans that people know by name, under the same costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.common.words import in_bytes, in_time
from shardwright.compiler.plan.baselines import BASELINES
from shardwright.compiler.plan.pipeline.prices import prices_of
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.text import table
from shardwright.errors import PlanError


def with_known_plans(plan: Plan, request: PlanRequest) -> dict[str, Plan | str]:
    """The found plan and the known ones by name; a known plan that there is not is told by the reason."""
    found: dict[str, Plan | str] = {"this plan": plan}
    for name, make in BASELINES.items():
        try:
            found[name] = make(plan.graph, request)
        except PlanError as error:
            found[name] = str(error)
    return found


def in_numbers(plans: Mapping[str, Plan | str], hardware: Hardware) -> dict[str, dict[str, Any]]:
    """Return the seconds and bytes of each plan by name, or why there is none."""
    return {
        name: {"error": plan} if isinstance(plan, str) else _numbers(plan, hardware) for name, plan in plans.items()
    }


def comparison(plans: Mapping[str, Plan | str], hardware: Hardware) -> str:
    """A table of what each plan takes, sends and holds; the seconds are those of ``hardware``."""
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
    )
    rows = [
        (name, str(plan.mesh), *_cells(_numbers(plan, hardware)))
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
    }


def _cells(numbers: Mapping[str, float]) -> Iterator[str]:
    for name, number in numbers.items():
        yield in_time(number) if name.endswith("_s") else in_bytes(number)
