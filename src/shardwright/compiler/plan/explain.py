"""A plan as tables for people: operators with their strategies, collectives, and bytes per module."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.common.words import in_bytes
from shardwright.compiler.plan.decided.decisions import Decisions
from shardwright.compiler.plan.decided.holding import Held, held_by
from shardwright.compiler.plan.decided.shown import in_ranks, in_tuples, layers_computed_again, table
from shardwright.compiler.plan.searches import SEARCHES, Search


def explain(plan: Decisions) -> str:
    """Three tables: what every operator does, every collective, and what each module holds and moves."""
    unlisted = plan.graph.unlisted
    finer = f" cut into {plan.mesh}" if len(plan.mesh.axes) > len(plan.named.axes) else ""
    sent = {"forward": 0.0, "backward": 0.0}
    for priced in plan.collectives():
        sent[priced.direction] += priced.bytes
    parts = [
        f"plan: mode {plan.mode}, search {plan.search}, mesh {plan.named}{finer}, {plan.mesh.size} devices",
        _operators(plan),
        _collectives(plan),
        _modules(plan),
        f"each device sends {in_bytes(plan.moved_bytes())} per step ({in_bytes(sent['forward'])} forward, "
        f"{in_bytes(sent['backward'])} backward) and holds {holds(plan, held_by(plan, plan.optimizer))}",
        *computed_again(plan),
        *certificate(plan),
    ]
    if unlisted:
        names = ", ".join(sorted({node.op for node in unlisted}))
        parts.append(f"without a rule, run whole on every device: {names}")
    return "\n\n".join(parts)


def holds(plan: Decisions, held: Held) -> str:
    """The bytes that each device holds, by kind; kinds that take none are left out."""
    named = {"optimizer": f"states of {plan.optimizer.name}", "activations": "activations for the backward"}
    named["recomputed"] = "recomputed activations"
    shown = [f"{in_bytes(size)} of {named.get(kind, kind)}" for kind, size in held.kinds() if size]
    limit = f", of {in_bytes(plan.memory)} that it may hold" if plan.memory else ""
    return f"{', '.join(shown)}: {in_bytes(held.total)} in all{limit}"


def computed_again(plan: Decisions) -> Iterator[str]:
    """What is said of modules of whose inside nothing is kept."""
    if names := layers_computed_again(plan):
        yield f"activation checkpointing, recomputed in the backward: {names}"


def certificate(plan: Decisions) -> Iterator[str]:
    """How far the plan is above what no plan is below, by the costs of its search, and which meshes were considered."""
    row = search_of(plan)
    if plan.cost is not None and row is not None:
        cost = f"by its search it costs {in_unit(plan.cost, row)}"
        if plan.bound is None:
            yield f"{cost}; what no plan is below was not searched for"
        else:
            fitting = "that fits its memory " if plan.memory else ""
            where = "these meshes" if plan.considered else "this mesh"
            bound = f"no plan {fitting}on {where} costs less than {in_unit(plan.bound, row)}"
            yield f"{cost}; {bound} (gap {plan.gap:.2%})"
    if plan.considered:
        yield "\n  ".join(["meshes considered:", *plan.considered])


def search_of(plan: Decisions) -> Search | None:
    """The search that decided, None where nothing was searched."""
    return next((row for name, row in SEARCHES.items() if name == plan.search), None)


def in_unit(cost: float, row: Search) -> str:
    """What a search counts, as people read it."""
    return in_bytes(cost) if row.unit == "B" else f"{cost * 1e3:.4g} ms"


def _operators(plan: Decisions) -> str:
    rows = [("operator", "in strategy", "out strategy", "partial", "module", "source")]
    for node in plan.capture.nodes:
        partial = "·".join(plan.layout(node.results[0]).partial) if node.results else ""
        pinned = " (pinned)" if plan.pin_of(node) is not None else ""
        strategies = in_tuples(plan.in_strategy(node)), in_tuples(plan.out_strategy(node))
        line = node.source.partition(" in ")[0]  # the dumps show what stands there
        rows.append((node.name + pinned, *strategies, partial, node.scope or "-", line))
    return table(rows)


def _collectives(plan: Decisions) -> str:
    rows = [("collective", "direction", "axes", "ranks of rank 0", "of", "sent")]
    found = list(plan.collectives())
    for priced in found:
        c = priced.collective
        ranks = in_ranks(plan.mesh.group(0, c.axes))
        rows.append((c.kind, priced.direction, "·".join(c.axes), ranks, priced.cause, in_bytes(priced.bytes)))
    return table(rows) if found else "no collectives"


def _modules(plan: Decisions) -> str:
    """Per module: parameters on one device, bytes sent per step."""
    held: dict[str, float] = {}
    for value in plan.capture.of_kind("parameter"):
        module = value.label.rpartition(".")[0]
        held[module] = held.get(module, 0) + plan.bytes_of(value)
    sent: dict[str, float] = {}
    for priced in plan.collectives():
        sent[priced.module] = sent.get(priced.module, 0) + priced.bytes
    rows = [("module", "parameters held", "bytes sent")]
    for module in dict.fromkeys([*held, *sent]):
        rows.append((module or "-", in_bytes(held.get(module, 0)), in_bytes(sent.get(module, 0))))
    return table(rows)
