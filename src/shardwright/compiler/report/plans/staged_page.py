"""A plan with pipeline stages on a page of text: how fast a step is, and what each stage does and holds."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.common.words import in_bytes, in_thousands, in_time
from shardwright.compiler.mesh.mesh import PIPELINE
from shardwright.compiler.plan.pipeline.costs import StageCost, StagedCosts
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.schedule import drawn
from shardwright.compiler.plan.text import joined, kinds_in_words, layers_computed_again, table, template
from shardwright.compiler.plan.timing.throughput import Throughput

_SHOWN = 4  # kinds of modules of a stage
_DRAWN = 16  # microbatches, and groups of ranks


def staged_page(plan: Plan, hardware: Hardware) -> str:
    """Return the page of a plan with stages, priced by ``hardware``."""
    costs = StagedCosts(plan, hardware)
    stages = costs.stages
    done = Throughput.of(plan, hardware, costs.step_s)
    kind, per_s = ("tokens", done.tokens_s) if done.tokens else ("samples", done.rows_s)
    again = layers_computed_again(plan)
    slowest = max(range(len(stages)), key=lambda at: stages[at].both_s)
    fullest = max(stages, key=lambda stage: stage.held.total).held
    limit = f" of {in_bytes(plan.memory)} that a device may hold" if plan.memory else ""
    mesh = " ".join(f"{axis.name}={axis.size}" for axis in plan.devices.axes)
    lines = [
        f"plan: mode {plan.mode}, search {plan.search}, mesh {mesh}, {plan.devices.size} devices; "
        f"{costs.cut.total} stages, {costs.cut.microbatches} microbatches, schedule {costs.cut.schedule}",
        f"run: {f'activation checkpointing of {again}' if again else 'no activation checkpointing'}; {_holding(plan)}",
        f"speed: a step of {done.rows:,} samples takes {in_time(costs.step_s)} on {hardware.name}: "
        f"{in_thousands(per_s)} {kind}/s, {in_thousands(per_s / plan.devices.size)} a device; model FLOPs utilisation "
        f"{done.utilisation:.1%}",
        f"  {in_time(costs.line_s)} of it the microbatches go through the stages, of which stage {slowest}, the "
        f"slowest, waits {costs.idle:.1%}; {in_time(costs.exchange_s)} gradients are summed over ranks"
        f"{' and parameters exchanged' if plan.moved_between_stages else ''}, and {in_time(costs.updating_s)} "
        "parameters are updated",
        f"memory: {in_bytes(fullest.total)}{limit} where most is held: {kinds_in_words(plan, fullest)}",
        f"  which a group of ranks holds of {_held(costs)} microbatches at once",
        *(["why so many stages: " + "; ".join(plan.considered)] if plan.considered else []),
        "",
        *_schedule(costs),
        "",
        _table(stages),
    ]
    return "\n".join(lines)


def _held(costs: StagedCosts) -> str:
    """Return of how many microbatches groups hold what the backward needs, whole ones where stages are interleaved."""
    held = [f"{count / costs.cut.each:.3g}" for count in costs.run.held]
    return held[0] if len(set(held)) == 1 else f"{held[0]} (the first) to {held[-1]} (the last)"


def _schedule(costs: StagedCosts) -> list[str]:
    """Return the time line of the groups, where it has room for all microbatches."""
    if costs.cut.microbatches > _DRAWN or costs.cut.count > _DRAWN:
        return []
    rows = drawn(costs.table, costs.seconds)
    title = "time line of a step (0, 1, ...: forward of a microbatch; a, b, ...: its backward; ·: waiting):"
    return [title, "", *(f"{f'pp={group}':>6} {row}" for group, row in enumerate(rows))]


def _holding(plan: Plan) -> str:
    """Return in words which ranks hold parameters, and the states of the optimizer."""
    states = f"and the states of {plan.optimizer.name}"
    if not plan.moved_between_stages:
        return f"each stage holds its own parameters {states}"
    labels = [plan.capture.values[name].label for name in plan.capture.values if name in plan.moved_between_stages]
    some = ", ".join(labels[:_SHOWN]) + (f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else "")
    return (
        f"each stage holds its own parameters {states}; {some}, which several stages read, "
        f"{'is' if len(labels) == 1 else 'are'} sharded over {PIPELINE} and exchanged in each step"
    )


def _table(stages: Sequence[StageCost]) -> str:
    head = ("stage", "modules", "operators", "forward", "backward", "to the next", "holds")
    rows = [
        (
            str(number),
            _modules(stage.modules),
            str(stage.operators),
            in_time(stage.forward_s),
            in_time(stage.backward_s),
            in_time(stage.message_s) if stage.message_s else "-",
            in_bytes(stage.held.total),
        )
        for number, stage in enumerate(stages)
    ]
    return f"of each microbatch:\n\n{table([head, *rows])}"


def _modules(names: Sequence[str]) -> str:
    """Return the modules of a stage, of those in one another the outermost, equal ones together."""
    outermost = [name for name in names if name and not any(name.startswith(f"{of}.") for of in names if of)]
    alike: dict[str, list[str]] = {}
    for name in outermost:
        alike.setdefault(template(name), []).append(name)
    shown = [joined(of) for of in alike.values()]
    more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more or "-"
