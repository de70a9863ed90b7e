"""What two plans of one graph do otherwise, equal layers once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardwright.common.words import in_bytes
from shardwright.compiler.capture.ir import Node
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.plan.decided.decisions import Decisions
from shardwright.compiler.plan.decided.shown import joined, layers_computed_again, short, table, template


def difference(ours: Decisions, theirs: Decisions) -> str:
    """What each device sends and holds under both, then the operators and the leaves that differ.

    Layouts are compared by their axes where both plans have the same mesh, by their numbers of slices elsewhere.
    """
    parts = [
        "\n".join(_heads(ours, theirs)),
        table([("each device", "this plan", "the other"), *_totals(ours, theirs)]),
        *_differing("operators in", "what they do", list(_operators(ours, theirs)), len(ours.capture.nodes)),
        *_differing("leaves", "stored", list(_leaves(ours, theirs)), len(ours.leaves)),
    ]
    return "\n\n".join(parts)


def _heads(ours: Decisions, theirs: Decisions) -> Iterator[str]:
    for name, plan in (("this plan", ours), ("the other", theirs)):
        yield f"{name}: mode {plan.mode}, search {plan.search}, mesh {plan.mesh}, {plan.mesh.size} devices"


def _totals(ours: Decisions, theirs: Decisions) -> Iterator[tuple[str, str, str]]:
    yield "sends", in_bytes(ours.moved_bytes()), in_bytes(theirs.moved_bytes())
    yield "holds of parameters", in_bytes(ours.held_bytes()), in_bytes(theirs.held_bytes())
    if ours.recomputed != theirs.recomputed:
        yield (
            "activation checkpointing",
            layers_computed_again(ours) or "nothing",
            layers_computed_again(theirs) or "nothing",
        )


def _differing(head: str, what: str, found: list[tuple[str, str, str, str]], of: int) -> Iterator[str]:
    """A table of what differs, (where, which, ours, theirs), a row for all that differ in their numbers alone."""
    if not found:
        yield f"no {head.split()[0]} differ"
        return
    alike: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for where, which, mine, other in found:
        alike[template(where), which, mine, other].append(where)
    rows = [
        (joined(list(dict.fromkeys(names))), which, str(len(names)), mine, other)
        for (_, which, mine, other), names in alike.items()
    ]
    yield f"{len(found)} of {of} {head.split()[0]} differ:\n" + table(
        [(head, what, "times", "this plan", "the other"), *rows]
    )


def _operators(ours: Decisions, theirs: Decisions) -> Iterator[tuple[str, str, str, str]]:
    by_axes = ours.mesh == theirs.mesh
    for node in ours.capture.nodes:
        mine, other = (_does(plan, node, by_axes) for plan in (ours, theirs))
        if mine != other:
            yield node.scope, short(node.op), mine, other


def _does(plan: Decisions, node: Node, by_axes: bool) -> str:
    rule, strategy = plan.graph.rules[node.name], plan.strategies[node.name]
    operands = [rule.operand_layout(i, strategy) for i in range(len(node.operands))]
    results = [rule.result_layout(i, strategy, plan.mesh) for i in range(len(node.results))]
    sides = (" ".join(_text(plan, layout, by_axes) for layout in side) or "-" for side in (operands, results))
    return " -> ".join(sides)


def _leaves(ours: Decisions, theirs: Decisions) -> Iterator[tuple[str, str, str, str]]:
    by_axes = ours.mesh == theirs.mesh
    for name, layout in ours.leaves.items():
        value = ours.capture.values[name]
        mine, other = _text(ours, layout, by_axes), _text(theirs, theirs.leaves[name], by_axes)
        if mine != other:
            yield value.label, value.kind, mine, other


def _text(plan: Decisions, layout: Layout, by_axes: bool) -> str:
    if by_axes:
        return str(layout)
    summed = f"Σ{plan.mesh.extent(layout.partial)}" if layout.partial else ""
    return str(layout.slices(plan.mesh)).replace(" ", "") + summed
