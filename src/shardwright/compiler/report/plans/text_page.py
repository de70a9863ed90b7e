"""The text page of a plan: time of a step, memory of a device, equal layers once, and the most expensive operators."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.common.words import in_bytes, in_time
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.text import in_tuples, meshes_considered, short, table
from shardwright.compiler.report.plans.answers import NOT_ASKED, answers, in_lines
from shardwright.compiler.report.plans.summary import ModuleRow, OperatorRow, PlanSummary, plan_summary

MOST_LINES = 57  # what follows the page, such as the seconds of planning, takes three more
FEWEST_MODULES, MOST_OPERATORS, MOST_COLLECTIVES, MOST_REPLICATED = 8, 6, 6, 4


def plan_page(plan: Plan, hardware: Hardware, what_if: str = NOT_ASKED) -> str:
    """The page, whose seconds are those of ``hardware``; `explain` shows every operator and collective."""
    summary = plan_summary(plan, hardware)
    head = "\n".join([in_lines(answers(plan, summary, what_if)), *meshes_considered(plan)])
    below = [_operators(summary), _collectives(summary), *_replicated(summary)]
    taken = sum(len(part.splitlines()) + 1 for part in [head, *below])
    most_modules = max(FEWEST_MODULES, MOST_LINES - taken - 3)  # beside the head of the table and what is left out
    return "\n\n".join([head, _modules(summary, most_modules), *below])


def _modules(summary: PlanSummary, most: int) -> str:
    """Return the most expensive rows, in the order of the model."""
    rows = summary.modules
    spent = sorted((_spent(row) for row in rows), reverse=True)[:most]
    shown = [row for row in rows if spent and _spent(row) >= spent[-1]][:most]
    cells = [
        (row.module, _strategy(row), *map(in_time, _times(row)), *map(in_bytes, (row.sent_bytes, row.held_bytes)))
        for row in shown
    ]
    head = ("module", "what takes longest there: operands -> results", "computes", "communicates", "sends", "holds")
    return table([head, *cells]) + _more(len(rows) - len(shown), "rows")


def _times(row: ModuleRow) -> tuple[float, float]:
    return row.computing_s, row.communicating_s


def _spent(row: ModuleRow) -> float:
    return sum(_times(row))


def _strategy(row: ModuleRow) -> str:
    return f"{short(row.operator)} {in_tuples(row.operands)} -> {in_tuples(row.results)}" if row.operator else "-"


def _operators(summary: PlanSummary) -> str:
    rows = summary.operators[:MOST_OPERATORS]
    cells = [
        (
            short(row.operator),
            row.module,
            row.line or "-",
            str(row.count),
            _shared(row, summary),
            in_time(row.computing_s),
        )
        for row in rows
    ]
    head = ("most expensive operators", "module", "line", "times", "shared by", "computes")
    return table([head, *cells]) + _more(len(summary.operators) - len(rows), "kinds")


def _shared(row: OperatorRow, summary: PlanSummary) -> str:
    return f"{row.parts} of {summary.devices}"


def _collectives(summary: PlanSummary) -> str:
    found = summary.collectives[:MOST_COLLECTIVES]
    rows = [
        (row.kinds, row.axes, row.cause, str(row.count), in_bytes(row.sent_bytes), in_time(row.seconds))
        for row in found
    ]
    head = ("most expensive collectives", "axes", "of", "times", "sent", "takes")
    more = _more(len(summary.collectives) - len(rows), "kinds")
    return table([head, *rows]) + more if rows else "no collectives"


def _replicated(summary: PlanSummary) -> Iterator[str]:
    """Yield the replicated computation with its cost, and the operators that have no rule."""
    rows = [row for row in sorted(summary.operators, key=lambda row: -row.replicated_s) if row.replicated_s > 0]
    if rows:
        part = summary.replicated_s / summary.step_s
        lines = [f"replicated computation, which costs {in_time(summary.replicated_s)} ({part:.1%} of a step):"]
        for row in rows[:MOST_REPLICATED]:
            where = f"{short(row.operator)} in {row.module} ({row.line or 'no line'})"
            lines.append(f"  {where}, shared by {_shared(row, summary)} devices: {in_time(row.replicated_s)}")
        yield "\n".join(lines) + _more(len(rows) - MOST_REPLICATED, "kinds")
    spent: dict[str, tuple[int, float]] = {}
    for row in summary.operators:
        if not row.has_rule:
            times, seconds = spent.get(row.operator, (0, 0.0))
            spent[row.operator] = times + row.count, seconds + row.computing_s
    if spent:
        each = (f"{op} ({times} times, {in_time(seconds)})" for op, (times, seconds) in spent.items())
        yield f"without a rule, run whole on every device: {', '.join(each)}"


def _more(number: int, what: str) -> str:
    return f"\nand {number} {what} that take less" if number > 0 else ""
