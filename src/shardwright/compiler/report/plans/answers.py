"""The head of a plan's page: what to run, how fast it is, what it holds, what binds it, and what more would change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from shardwright.common.words import in_bytes, in_flops, in_thousands, in_time
from shardwright.compiler.mesh.mesh import PIPELINE
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.text import kinds_in_words, layers_computed_again, proof
from shardwright.compiler.report.plans.summary import PlanSummary, ScheduleSummary, Stored

NOT_ASKED = "type --what-if to plan it again, on one more host and with twice the memory"
_SHOWN = 4  # parameters that several stages read
Question = Literal["plan", "run", "speed", "memory", "why so many stages", "binds", "what if", "proof"]


class Answer(NamedTuple):
    """One line of the head; a ``question`` may have several answers."""

    question: Question
    text: str


def answers(plan: Plan, summary: PlanSummary, what_if: str = NOT_ASKED) -> list[Answer]:
    """Return the head of the page; ``what_if`` is what one more host, or twice the memory, would change."""
    if summary.schedule is not None:
        return staged_answers(plan, summary, summary.schedule, what_if)
    found = [
        Answer("plan", _named(summary)),
        Answer("run", f"{_precision(summary)}; {_storage(summary)}; {_recomputed(plan)}"),
        *(Answer("speed", text) for text in _speed(summary)),
        Answer("memory", _held(plan, summary)),
        *_tried_stages(summary),
        Answer("binds", _binds(summary)),
        Answer("what if", what_if),
        Answer("proof", proof(plan)),
    ]
    return [answer for answer in found if answer.text]


def staged_answers(plan: Plan, summary: PlanSummary, schedule: ScheduleSummary, what_if: str) -> list[Answer]:
    """Return the head of the page of a plan with pipeline stages."""
    mesh = " ".join(f"{axis.name}={axis.size}" for axis in plan.devices.axes)
    named = f"mode {summary.mode}, search {summary.search}, mesh {mesh}, {summary.devices} devices"
    limit = f" of {in_bytes(summary.memory)} that a device may hold" if summary.memory else ""
    found = [
        Answer("plan", f"{named}; {len(summary.stages)} stages, {_scheduled(schedule)}"),
        Answer("run", f"{_recomputed(plan)}; {_holding(plan)}"),
        *(Answer("speed", text) for text in _staged_speed(plan, summary, schedule)),
        Answer("memory", f"{in_bytes(plan.held.total)}{limit} where most is held: {kinds_in_words(plan, plan.held)}"),
        Answer("memory", f"which a group of ranks holds of {_begun(schedule)} microbatches at once"),
        *_tried_stages(summary),
        Answer("what if", what_if),
    ]
    return [answer for answer in found if answer.text]


def _scheduled(schedule: ScheduleSummary) -> str:
    return f"{schedule.microbatches} microbatches, schedule {schedule.name}"


def _staged_speed(plan: Plan, summary: PlanSummary, schedule: ScheduleSummary) -> Iterator[str]:
    done, stages = summary.throughput, summary.stages
    slowest = max(range(len(stages)), key=lambda at: stages[at].forward_s + stages[at].backward_s)
    yield f"{_step(summary)}; model FLOPs utilisation {done.utilisation:.1%}"
    exchanged = " and parameters exchanged" if plan.moved_between_stages else ""
    yield (
        f"{in_time(schedule.line_s)} of it the microbatches go through the stages, of which stage {slowest}, the "
        f"slowest, waits {schedule.bubble:.1%}; {in_time(schedule.exchange_s)} gradients are summed over ranks"
        f"{exchanged}, and {in_time(summary.updating_s)} parameters are updated"
    )


def _begun(schedule: ScheduleSummary) -> str:
    """Return of how many microbatches groups hold what the backward needs, whole ones where stages are interleaved."""
    held = [f"{count:.3g}" for count in schedule.held_microbatches]
    return held[0] if len(set(held)) == 1 else f"{held[0]} (the first) to {held[-1]} (the last)"


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


def _tried_stages(summary: PlanSummary) -> Iterator[Answer]:
    if summary.tried_stages:
        yield Answer("why so many stages", "; ".join(map(str, summary.tried_stages)))


def in_lines(found: list[Answer]) -> str:
    """Return the head as text, each question once."""
    lines = [
        f"  {answer.text}" if at and found[at - 1].question == answer.question else f"{answer.question}: {answer.text}"
        for at, answer in enumerate(found)
    ]
    return "\n".join(lines)


def _named(summary: PlanSummary) -> str:
    mesh = " ".join(f"{name}={size}" for name, size in summary.mesh.items())
    hosts = f" on {summary.hosts} hosts" if summary.hosts > 1 else ""
    return f"mode {summary.mode}, search {summary.search}, mesh {mesh}, {summary.devices} devices{hosts}"


def _precision(summary: PlanSummary) -> str:
    if summary.bf16_step_s is None:
        return f"computes in {summary.dtype}"
    took = in_time(summary.bf16_step_s)
    return f"computes in {summary.dtype} (in bfloat16 about {took} a step, without the casts: type --precision bf16)"


def _storage(summary: PlanSummary) -> str:
    """Return how the parameters are stored, and how much of them is gathered for their use."""
    whole = sum(row.bytes for row in summary.stored)
    if not whole:
        return "no parameters"
    rows = [f"{_share(row.bytes, whole)} {_stored_over(row)}" for row in summary.stored if row.bytes / whole >= 5e-4]
    return f"{in_bytes(whole)} of {'/'.join(summary.parameters)} parameters: {', '.join(rows)}"


def _stored_over(row: Stored) -> str:
    if not row.axes:
        return "replicated"
    again = "and again in the backward" if row.again_bytes * 2 > row.bytes else "for use"
    gathered = f" (all-gathered {again})" if row.gathered_bytes * 2 > row.bytes else ""
    return f"sharded over {row.axes}{gathered}"


def _recomputed(plan: Plan) -> str:
    names = layers_computed_again(plan)
    return f"activation checkpointing of {names}" if names else "no activation checkpointing"


def _step(summary: PlanSummary) -> str:
    done = summary.throughput
    kind, per_s = ("tokens", done.tokens_s) if done.tokens else ("samples", done.rows_s)
    each = f"{in_thousands(per_s)} {kind}/s, {in_thousands(per_s / summary.devices)} a device"
    return f"a step of {done.rows:,} samples takes {in_time(summary.step_s)} on {summary.hardware}: {each}"


def _speed(summary: PlanSummary) -> Iterator[str]:
    done, step_s = summary.throughput, summary.step_s
    yield _step(summary)
    peak = f"of {in_flops(done.peak_flops)}"
    hidden = f", {in_time(summary.hidden_s)} hidden" if summary.hidden_s else ""
    yield (
        f"model FLOPs utilisation {done.utilisation:.1%} {peak}; {in_time(summary.exposed_s)} of communication exposed "
        f"({_share(summary.exposed_s, step_s)} of the step){hidden}"
    )
    around = f", {in_time(summary.around_s)} around these" if summary.around_s else ""
    yield (
        f"{in_time(summary.computing_s)} computing, {in_time(summary.communicating_s)} communicating "
        f"{in_bytes(summary.sent_bytes)}, {in_time(summary.updating_s)} updating parameters{around}"
    )


def _held(plan: Plan, summary: PlanSummary) -> str:
    limit = f" of {in_bytes(summary.memory)} that a device may hold" if summary.memory else " on each device"
    assert summary.peak_bytes is not None  # of plans without stages it is known
    alive = f"at most {in_bytes(summary.peak_bytes)} are alive at once, in the {summary.peak_at}"
    if summary.memory and (over := summary.peak_bytes - summary.memory) > 0:
        alive = f"{alive}: {in_bytes(over)} too much, so type a --memory that is smaller by that"
    return f"{in_bytes(plan.held.total)}{limit}: {kinds_in_words(plan, plan.held)}; {alive}"


def _binds(summary: PlanSummary) -> str:
    step_s = summary.step_s
    found = {"compute": _computing, "links": _links, "update": _updating}[summary.binds[0]](summary)
    repeated = f"; what is recomputed and gathered again takes {in_time(summary.repeated_s)}"
    repeated = f"{repeated} ({_share(summary.repeated_s, step_s)} of the step)" if summary.repeated_s else ""
    if summary.memory is None:
        return f"{found}; no limit of memory was given{repeated}"
    held = f"{_share(summary.held_bytes['total'], summary.memory)} of it is held"
    binds = "memory binds, too" if "memory" in summary.binds else "memory is not full"
    return f"{found}; {binds}: {held}{repeated}"


def _computing(summary: PlanSummary) -> str:
    names = {"flops": "products", "traffic": "memory traffic", "launch": "launches"}
    parts = sorted(summary.longest.items(), key=lambda part: -part[1])
    shown = [f"{names[name]} {_share(seconds, summary.step_s)}" for name, seconds in parts if seconds]
    return f"computing, {_share(summary.computing_s, summary.step_s)} of the step ({', '.join(shown)})"


def _links(summary: PlanSummary) -> str:
    row = summary.collectives[0]
    return (
        f"the links, {_share(summary.exposed_s, summary.step_s)} of the step waits for them (most for {row.kinds} over "
        f"{row.axes} of {row.cause})"
    )


def _updating(summary: PlanSummary) -> str:
    return f"updating parameters by {summary.optimizer}, {_share(summary.updating_s, summary.step_s)} of the step"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
