"""A plan as tables of text: operators, collectives, bytes per module, and the difference of two plans."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardwright.common.words import in_bytes
from shardwright.compiler.capture.ir import Node
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import MICROBATCHES
from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.device_memory import DeviceMemory, device_memory_of
from shardwright.compiler.plan.searches import SEARCHES, Search

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns, the first one as a head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def in_tuples(strategies: Sequence[tuple[int, ...]]) -> str:
    """Slices per dim of several tensors: ``(2,4) (4,1)``."""
    return " ".join(str(strategy).replace(" ", "") for strategy in strategies) or "-"


def in_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks, the first of them where they are many: ``(0, 1, ... 64 in all)``."""
    shown = ", ".join(map(str, ranks[:most]))
    return f"({shown})" if len(ranks) <= most else f"({shown}, ... {len(ranks)} in all)"


def short(op: str) -> str:
    """An operator as people call it: ``aten.linear.default`` is a linear."""
    return op.split(".")[1]


def template(name: str) -> str:
    """A name without its numbers, by which equal layers are told: ``h.*.attn``."""
    return _NUMBER.sub("*", name)


def joined(names: Sequence[str]) -> str:
    """One name for those that differ in numbers alone, ``h.0-47.attn``; a dash for the model itself."""
    numbers = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    ranges = iter([_ranges(sorted(set(of))) for of in numbers])
    return _NUMBER.sub(lambda _: next(ranges), names[0]) or "-"


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def layers_computed_again(plan: Decisions) -> str:
    """The modules of whose inside nothing is kept, equal ones once."""
    alike: dict[str, list[str]] = {}
    for block in plan.blocks:
        alike.setdefault(template(block.name), []).append(block.name)
    return ", ".join(map(joined, alike.values()))


def plan_text(plan: Decisions) -> str:
    """Three tables: what every operator does, every collective, and what each module holds and moves.

    With pipeline stages each is that of a microbatch within its stage.
    """
    unlisted = plan.graph.unlisted
    finer = f" cut into {plan.mesh}" if len(plan.mesh.axes) > len(plan.shown_mesh.axes) and not plan.stages else ""
    sent = {"forward": 0.0, "backward": 0.0}
    for priced in plan.collectives_of_ranks():
        sent[priced.direction] += priced.bytes
    parts = [
        f"plan: mode {plan.mode}, search {plan.search}, mesh {plan.shown_mesh}{finer}, {plan.devices.size} devices",
        *_staged(plan),
        _operators(plan),
        _collectives(plan),
        _modules(plan),
        f"{_sends(plan, sent)} holds {holds(plan, device_memory_of(plan, plan.optimizer))}",
        *computed_again(plan),
        *certificate(plan),
    ]
    if unlisted:
        names = ", ".join(sorted({node.op for node in unlisted}))
        parts.append(f"without a rule, run whole on every device: {names}")
    return "\n\n".join(parts)


def _sends(plan: Decisions, sent: Mapping[str, float]) -> str:
    ways = f"{in_bytes(sent['forward'])} forward, {in_bytes(sent['backward'])} backward"
    if plan.stages is None:
        return f"each device sends {in_bytes(sum(sent.values()))} per step ({ways}) and"
    return f"of each microbatch {ways} are sent in all stages together; where most is held a device"


def _staged(plan: Decisions) -> Iterator[str]:
    """Yield the line about pipeline stages, where there are some."""
    if (stages := plan.stages) is not None:
        yield (
            f"{stages.total} pipeline stages on {stages.count} groups of ranks, {stages.microbatches} microbatches, "
            f"schedule {stages.schedule}; operators and collectives are those of a microbatch"
        )


def holds(plan: Decisions, held: DeviceMemory) -> str:
    """The bytes that each device holds, by kind, and how many it may hold."""
    return held_by_kind(plan, held) + (f", of {in_bytes(plan.memory)} that it may hold" if plan.memory else "")


def held_by_kind(plan: Decisions, held: DeviceMemory) -> str:
    """The bytes that each device holds, by kind; kinds that take none are left out."""
    return f"{kinds_in_words(plan, held)}: {in_bytes(held.total)} in all"


def kinds_in_words(plan: Decisions, held: DeviceMemory) -> str:
    """Return the bytes of each kind; kinds that take none are left out."""
    named = {"optimizer": f"states of {plan.optimizer.name}", "activations": "activations for the backward"}
    named |= {"recomputed": "recomputed activations", "transient": "transient tensors"}
    return ", ".join(f"{in_bytes(size)} of {named.get(kind, kind)}" for kind, size in held.kinds() if size)


def computed_again(plan: Decisions) -> Iterator[str]:
    """Yield the line about modules that are recomputed."""
    if names := layers_computed_again(plan):
        yield f"activation checkpointing, recomputed in the backward: {names}"


def certificate(plan: Decisions) -> Iterator[str]:
    """Yield how far the plan is above the lower bound of its search, and which meshes were considered."""
    if text := proof(plan):
        yield text
    yield from meshes_considered(plan)
    if plan.tried:
        yield "why so many stages: " + "; ".join(map(str, plan.tried))


def proof(plan: Decisions) -> str:
    """Return how far the plan is above the lower bound of its search; "" where nothing was searched."""
    row = search_of(plan)
    if plan.cost is None or row is None:
        return ""
    cost = in_unit(plan.cost, row)
    if plan.bound is None:
        return f"by its search it costs {cost}; what no plan is below was not searched for"
    fitting = "that fits its memory " if plan.memory else ""
    where = "these meshes" if plan.considered else "this mesh"
    bound = in_unit(plan.bound, row)
    return f"no plan {fitting}on {where} costs less than {bound}, and this one costs {cost} (gap {plan.gap:.2%})"


def meshes_considered(plan: Decisions) -> Iterator[str]:
    """Yield what was found on each mesh, where several were considered."""
    row = search_of(plan)
    if plan.considered:
        hides = plan.hardware is not None and plan.hardware.hides_gradients and row is not None and row.unit == "s"
        as_if = ", at bounds of what a step takes where communication is hidden" if hides else ""
        yield "\n  ".join([f"meshes considered{as_if}:", *plan.considered])


def search_of(plan: Decisions) -> Search | None:
    """The search that decided, None where nothing was searched."""
    return next((row for name, row in SEARCHES.items() if name == plan.search), None)


def in_unit(cost: float, row: Search) -> str:
    """Return a cost in the unit of its search, for people."""
    return in_bytes(cost) if row.unit == "B" else f"{cost * 1e3:.4g} ms"


def _operators(plan: Decisions) -> str:
    stages = plan.stages
    rows = [("operator", *["stage"] * bool(stages), "in strategy", "out strategy", "partial", "module", "source")]
    for node in plan.capture.nodes:
        partial = "·".join(plan.layout(node.results[0]).without(MICROBATCHES).partial) if node.results else ""
        pinned = " (pinned)" if plan.pin_of(node) is not None else ""
        strategies = in_tuples(plan.in_strategy(node)), in_tuples(plan.out_strategy(node))
        line = node.source.partition(" in ")[0]  # the dumps show what stands there
        stage = [str(stages.of.get(node.name, "-"))] if stages else []
        rows.append((node.name + pinned, *stage, *strategies, partial, node.scope or "-", line))
    return table(rows)


def _collectives(plan: Decisions) -> str:
    rows = [("collective", "direction", "axes", "ranks of rank 0", "of", "sent")]
    found = list(plan.collectives_of_ranks())
    for priced in found:
        c = priced.collective
        ranks = in_ranks(plan.mesh.group(0, c.axes))
        rows.append((c.kind, priced.direction, "·".join(c.axes), ranks, priced.cause, in_bytes(priced.bytes)))
    return table(rows) if found else "no collectives"


def _modules(plan: Decisions) -> str:
    held: dict[str, float] = {}
    for value in plan.capture.of_kind("parameter"):
        module = value.label.rpartition(".")[0]
        held[module] = held.get(module, 0) + plan.bytes_of(value)
    sent: dict[str, float] = {}
    for priced in plan.collectives_of_ranks():
        sent[priced.module] = sent.get(priced.module, 0) + priced.bytes
    rows = [("module", "parameters held", "bytes sent")]
    for module in dict.fromkeys([*held, *sent]):
        rows.append((module or "-", in_bytes(held.get(module, 0)), in_bytes(sent.get(module, 0))))
    return table(rows)


def difference(ours: Decisions, theirs: Decisions) -> str:
    """Return what each device sends and holds under both plans, then the operators and the leaves that differ.

    Layouts are compared by their axes where both plans have the same mesh, by their numbers of slices elsewhere.
    """
    parts = [
        "\n".join(_heads(ours, theirs)),
        table([("each device", "this plan", "the other"), *_totals(ours, theirs)]),
        *_differing("operators in", "what they do", list(_differing_operators(ours, theirs)), len(ours.capture.nodes)),
        *_differing("leaves", "stored", list(_differing_leaves(ours, theirs)), len(ours.leaves)),
    ]
    return "\n\n".join(parts)


def _heads(ours: Decisions, theirs: Decisions) -> Iterator[str]:
    for name, plan in (("this plan", ours), ("the other", theirs)):
        mesh = plan.mesh if plan.stages is None else plan.devices
        staged = f"; {next(_staged(plan))}" if plan.stages else ""
        yield f"{name}: mode {plan.mode}, search {plan.search}, mesh {mesh}, {mesh.size} devices{staged}"


def _totals(ours: Decisions, theirs: Decisions) -> Iterator[tuple[str, str, str]]:
    if ours.stages is None and theirs.stages is None:
        yield "sends", in_bytes(ours.moved_bytes()), in_bytes(theirs.moved_bytes())
    yield "holds of parameters", _parameters_held(ours), _parameters_held(theirs)
    if ours.recomputed != theirs.recomputed:
        layers = [layers_computed_again(plan) or "nothing" for plan in (ours, theirs)]
        yield "activation checkpointing", layers[0], layers[1]


def _parameters_held(plan: Decisions) -> str:
    """Return the bytes on each device, or on the one that holds most."""
    of_stages = plan.stages is not None
    return in_bytes(device_memory_of(plan, plan.optimizer).parameters if of_stages else plan.held_bytes())


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


def _differing_operators(ours: Decisions, theirs: Decisions) -> Iterator[tuple[str, str, str, str]]:
    by_axes = ours.mesh == theirs.mesh
    for node in ours.capture.nodes:
        mine, other = (_does(plan, node, by_axes) for plan in (ours, theirs))
        if mine != other:
            yield node.scope, short(node.op), mine, other


def _does(plan: Decisions, node: Node, by_axes: bool) -> str:
    sides = (" ".join(_text(plan, layout, by_axes) for layout in side) or "-" for side in plan.worked_on(node))
    stage = plan.stages and plan.stages.of.get(node.name)
    return " -> ".join(sides) + ("" if stage is None else f" in stage {stage}")


def _differing_leaves(ours: Decisions, theirs: Decisions) -> Iterator[tuple[str, str, str, str]]:
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
