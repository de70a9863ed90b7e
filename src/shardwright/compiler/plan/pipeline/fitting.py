"""Plans with stages that fit the memory of their devices: cut elsewhere, or with layers recomputed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from shardwright.common.words import in_bytes
from shardwright.compiler.mesh.mesh import PIPELINE, Stages
from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.device_memory import DeviceMemory
from shardwright.compiler.plan.pipeline.cut import Limit
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.memory import Block, Blocks, local_bytes
from shardwright.compiler.plan.pricing.schedule import most_held, schedule
from shardwright.compiler.plan.search.choices import OverBudget
from shardwright.compiler.plan.text import held_by_kind

Limits = Sequence[Sequence[Limit]]
"""The limits of each stage, over the operators that have one, in their order."""
Recut = Callable[[Plan, Limits], Plan | None]
"""Returns the plan with the best cut that keeps limits, None where none does."""

_TRIES = 6  # of cuts, as the bytes of a stage are no sum over its operators alone


def within_memory(plan: Plan, limit: int, recut: Recut) -> Plan:
    """Return the plan if all its stages fit; else cut elsewhere, or with as many layers recomputed as it takes.

    Another cut of the same operators takes longer where they are fewest, and recomputation everywhere.

    Raises:
        OverBudget: where a stage never fits.
    """
    found = _cut_to_fit(plan, limit, recut)
    if found is not None:
        return found
    try:
        return _recomputing(plan, limit)
    except OverBudget:
        layers = {block.name for block in plan.graph.once(Blocks).repeated()}
        smallest = _cut_to_fit(plan.computing_again({*plan.recomputed, *layers}), limit, recut)
        if smallest is None:
            raise
        return _recomputing(smallest.computing_again(plan.recomputed), limit)


def _cut_to_fit(plan: Plan, limit: int, recut: Recut) -> Plan | None:
    """Return the plan with the best cut all of whose stages fit, None where none is found."""
    stages = plan.stages
    assert stages is not None
    groups, over = range(stages.count), [0.0] * stages.count
    for _ in range(_TRIES):
        held = [plan.memory_model.of_stage(plan, plan.optimizer, group).total for group in groups]
        if max(held) <= limit:
            return plan
        if stages.each > 1:  # the stages of a group share its memory, and are cut one by one
            return None
        weights, of = _bytes_of_operators(plan), list(_staged(plan).values())
        own = [sum(each for each, at in zip(weights[group], of, strict=True) if at == group) for group in groups]
        over = [max(over[group], held[group] - own[group]) for group in groups]
        again = recut(plan, [[Limit(weights[group], limit - over[group])] for group in groups])
        if again is None:
            return None
        plan = again
    return None


def _staged(plan: Decisions) -> Mapping[str, int]:
    """Return the stage of each operator that has one, in the order of execution."""
    assert plan.stages is not None
    return {node.name: plan.stages.of[node.name] for node in plan.capture.nodes if node.name in plan.stages.of}


def _bytes_of_operators(plan: Plan) -> list[list[float]]:
    """Return for each group the bytes that each operator with a stage adds to what it holds.

    They are those of the parameters that it is the first to read, and what it saves first of the microbatches that the
    group has begun.
    """
    stages = plan.stages
    assert stages is not None
    saved, stored, read = plan.memory_model.saved_by(plan), list[float](), parameters_read(plan)
    seen: set[str] = set()
    for name in _staged(plan):
        new = read[name] - seen
        seen |= new
        stored.append(sum(_stored_bytes(plan, parameter) for parameter in new))
    table = schedule(stages.schedule, stages.count, stages.microbatches, stages.total)
    begun = [most_held(row)[group] for group, row in enumerate(table)]
    return [
        [bytes + saved[name][0] + times * saved[name][1] for name, bytes in zip(_staged(plan), stored, strict=True)]
        for times in begun
    ]


def _stored_bytes(plan: Plan, name: str) -> float:
    value = plan.capture.values[name]
    size = local_bytes(value, plan.leaves[name], plan.mesh)
    return size + (size + plan.optimizer.bytes_for(size) if value.needs_gradient else 0)


def parameters_read(plan: Decisions) -> dict[str, frozenset[str]]:
    """Return the parameters that each operator computes with, or with what follows from parameters alone."""
    assert plan.stages is not None
    made: dict[str, frozenset[str]] = {
        value.name: frozenset([value.name]) for value in plan.capture.of_kind("parameter")
    }
    found: dict[str, frozenset[str]] = {}
    for node in plan.capture.nodes:
        found[node.name] = frozenset[str]().union(*(made.get(name, frozenset()) for name in node.operands))
        if node.name not in plan.stages.of:
            made |= dict.fromkeys(node.results, found[node.name])
    return found


def _recomputing(plan: Plan, limit: int) -> Plan:
    """Return the plan with as many layers of each stage recomputed as it takes to fit.

    Raises:
        OverBudget: where a stage never does.
    """
    stages = plan.stages
    assert stages is not None
    layers = {block.name: _groups_of(block, stages) for block in plan.graph.once(Blocks).repeated()}
    while over := [group for group in range(stages.count) if _held(plan, group).total > limit]:
        for group in over:  # more than once where a border runs through a layer, of which neighbours hold a part
            plan = _recomputing_of(plan, group, [name for name, of in layers.items() if group in of], limit)
    return plan


def _recomputing_of(plan: Plan, group: int, layers: Sequence[str], limit: int) -> Plan:
    """Return the plan with the fewest of these layers recomputed, the first of them, with which a group fits."""
    left = [name for name in layers if name not in plan.recomputed]

    def recomputing(count: int) -> Plan:
        return plan.computing_again({*plan.recomputed, *left[:count]})

    held = _held(recomputing(len(left)), group)
    if held.total > limit:
        raise OverBudget(
            f"stage {group} of {plan.devices.sizes[PIPELINE]} holds {held_by_kind(plan, held)}, "
            f"{in_bytes(held.total - limit)} more than {in_bytes(limit)}, with all of its layers recomputed; type "
            "a larger memory= (--memory), more stages or other axes in mesh= (--mesh), or a smaller batch",
            held.total,
        )
    fewest = bisect_left(range(len(left) + 1), True, key=lambda count: _held(recomputing(count), group).total <= limit)
    return recomputing(fewest)


def _held(plan: Plan, group: int) -> DeviceMemory:
    return plan.memory_model.of_stage(plan, plan.optimizer, group)


def _groups_of(block: Block, stages: Stages) -> set[int]:
    return {stages.group(stages.of[node.name]) for node in block.nodes if node.name in stages.of}
