"""A plan with pipeline stages on a page of text: how fast a step is, and what each stage does and holds."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.common.words import in_bytes, in_time
from shardwright.compiler.plan.pipeline.costs import StagedCosts
from shardwright.compiler.plan.pipeline.prices import StagedPrices
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.schedule import drawn
from shardwright.compiler.plan.text import table
from shardwright.compiler.report.plans.answers import answers, in_lines
from shardwright.compiler.report.plans.summary import StageSummary, plan_summary

_SHOWN = 4  # kinds of modules of a stage
_DRAWN = 16  # microbatches, and groups of ranks


def staged_page(plan: Plan, hardware: Hardware, what_if: str = "") -> str:
    """Return the page of a plan with stages, priced by ``hardware``; ``what_if`` is what more hardware would change."""
    prices = StagedPrices(plan, hardware)
    summary = plan_summary(plan, hardware, prices)
    lines = [in_lines(answers(plan, summary, what_if)), "", *_schedule(prices.of_stages), ""]
    return "\n".join([*lines, _table(summary.stages)])


def _schedule(costs: StagedCosts) -> list[str]:
    """Return the time line of the groups, where it has room for all microbatches."""
    if costs.cut.microbatches > _DRAWN or costs.cut.count > _DRAWN:
        return []
    rows = drawn(costs.table, costs.seconds)
    apart = any(action.kind == "weights" for row in costs.table for action in row)
    weights = "; A, B, ...: the gradients of its weights" * apart
    title = f"time line of a step (0, 1, ...: forward of a microbatch; a, b, ...: its backward{weights}; ·: waiting):"
    return [title, "", *(f"{f'pp={group}':>6} {row}" for group, row in enumerate(rows))]


def _table(stages: Sequence[StageSummary]) -> str:
    head = ("stage", "modules", "operators", "forward", "backward", "to the next", "holds")
    rows = [
        (
            str(number),
            _modules(stage.modules),
            str(stage.operators),
            in_time(stage.forward_s),
            in_time(stage.backward_s),
            in_time(stage.message_s) if stage.message_s else "-",
            in_bytes(stage.held_bytes["total"]),
        )
        for number, stage in enumerate(stages)
    ]
    return f"of each microbatch:\n\n{table([head, *rows])}"


def _modules(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more or "-"
