"""The seconds and bytes that a plan predicts for a step, for those who watch the run and compare."""

from __future__ import annotations

from typing import Any

from shardwright.compiler.plan.pipeline.prices import prices_of
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware


def expected(plan: Plan, hardware: Hardware) -> dict[str, Any]:
    """Seconds and bytes of a step on each device, under the names by which runs tell theirs."""
    prices = prices_of(plan, hardware)
    return {
        "mode": plan.mode,
        "mesh": str(plan.shown_mesh),
        "hardware": hardware.name,
        "seconds": prices.step_s,
        "computing_s": prices.computing_s + prices.updating_s + hardware.around_s,
        "communicating_s": prices.exposed_s + prices.waiting_s,
        "sent_bytes": prices.sent_bytes,
        "held_bytes": plan.held.total,
    }
