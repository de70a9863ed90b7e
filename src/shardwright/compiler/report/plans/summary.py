"""A plan in numbers, equal layers once: what the page prints, and what programs read as JSON.

The keys of the JSON are the names of the fields here; docs/planning.md lists them. Seconds are of one step, forward and
backward, and bytes are of one device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.lower.liveness import peak_of
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import TriedStages
from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.device_memory import DeviceMemory
from shardwright.compiler.plan.pipeline.costs import StagedCosts
from shardwright.compiler.plan.pipeline.prices import StagedPrices, prices_of
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import BACKWARD, COMPUTING_PARTS, ComputingPart
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.text import joined, search_of, template
from shardwright.compiler.plan.timing.costs import Communication
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.compiler.plan.timing.throughput import Throughput, main_dtype

Limit = Literal["compute", "links", "update", "stages", "memory"]
NEARLY = 0.95  # of the memory that a device may hold
Slices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Certificate:
    """The cost of a plan and the bound that no plan is below, in the unit of its search: "s" or "B"."""

    unit: str
    cost: float
    bound: float
    gap: float


@dataclass(frozen=True)
class Stored:
    """The bytes of the parameters that are stored over the same axes, "" where they are replicated.

    ``gathered_bytes`` are those of them that are all-gathered for their use, ``again_bytes`` once more in the backward.
    """

    axes: str
    bytes: int
    gathered_bytes: int
    again_bytes: int


@dataclass(frozen=True)
class ModuleRow:
    """Modules that differ in nothing but their numbers, and the operator that takes longest there."""

    module: str
    count: int
    operator: str | None
    operands: Slices
    results: Slices
    computing_s: float
    communicating_s: float
    sent_bytes: float
    held_bytes: int


@dataclass(frozen=True)
class OperatorRow:
    """Equal operators of equal modules, on one line of the user's program. ``parts``: devices that share the work."""

    operator: str
    module: str
    line: str
    count: int
    parts: int
    computing_s: float
    replicated_s: float  # what is lost where fewer devices than there are share the work
    has_rule: bool


@dataclass(frozen=True)
class CollectiveRow:
    """Equal communication of equal modules: of one value, or inside one operator."""

    kinds: str
    axes: str
    cause: str
    count: int
    sent_bytes: float
    seconds: float


@dataclass(frozen=True)
class ScheduleSummary:
    """The order in which microbatches go through stages; ``bubble`` is the share in which the busiest ranks wait."""

    name: str
    microbatches: int
    groups: int
    bubble: float
    line_s: float  # from the first forward to the last backward
    exchange_s: float  # once in a step: gradients summed, and parameters that several stages read exchanged
    held_microbatches: tuple[float, ...]  # of each group, of which it holds at once what the backward needs


@dataclass(frozen=True)
class StageSummary:
    """A pipeline stage: its outermost modules, what it takes for a microbatch, and what each rank of it holds."""

    group: int  # of ranks: their coordinate on the axis of stages
    modules: tuple[str, ...]
    operators: int
    forward_s: float
    backward_s: float
    message_s: float  # to the next stage, and as much back
    held_bytes: dict[str, int]


@dataclass(frozen=True)
class PlanSummary:
    """A plan in numbers. Rows of modules stand in the order of the model, the others most expensive first."""

    mode: str
    search: str
    devices: int
    hosts: int
    mesh: dict[str, int]
    hardware: str
    dtype: str  # in which most is multiplied
    parameters: dict[str, int]  # bytes of all parameters by their dtype
    stored: tuple[Stored, ...]  # the most bytes first
    step_s: float
    throughput: Throughput
    bf16_step_s: float | None  # of this plan on a GPU if what is float32 were multiplied in bfloat16
    computing_s: float
    communicating_s: float
    updating_s: float
    hidden_s: float  # of communicating, behind computing
    exposed_s: float  # the rest of it
    around_s: float  # beside all these
    repeated_s: float  # of computing and communicating, what the backward recomputes and gathers again
    longest: dict[ComputingPart, float]  # of computing, by what takes longest of each operator
    binds: tuple[Limit, ...]  # what takes most of a step, and memory where a limit of it is reached
    sent_bytes: float
    held_bytes: dict[str, int]
    peak_bytes: int | None  # alive at once at most, and where; of plans with stages it is not looked for
    peak_at: str
    memory: int | None
    optimizer: str
    replicated_s: float
    certificate: Certificate | None
    recomputed: tuple[str, ...]  # the modules of whose inside nothing is kept
    considered: tuple[str, ...]  # what was found on each mesh, where several were searched
    waiting_s: float  # for microbatches
    schedule: ScheduleSummary | None  # of a plan with pipeline stages
    stages: tuple[StageSummary, ...]
    tried_stages: tuple[TriedStages, ...]  # where their number was looked for
    modules: tuple[ModuleRow, ...] = field(repr=False)
    operators: tuple[OperatorRow, ...] = field(repr=False)
    collectives: tuple[CollectiveRow, ...] = field(repr=False)


def plan_summary(plan: Plan, hardware: Hardware, prices: Prices | None = None) -> PlanSummary:
    """The numbers of a plan on ``hardware``, whose ``prices`` of the plan may be there already."""
    prices = prices or prices_of(plan, hardware)
    operators, dtype = _operators(plan, prices), _name(main_dtype(plan.graph))
    peak = None if plan.stages else peak_of(plan, lower(plan, 0, overlap=hardware.prefetches))
    staged = prices.of_stages if isinstance(prices, StagedPrices) else None
    return PlanSummary(
        plan.mode,
        plan.search,
        plan.devices.size,
        -(-plan.devices.size // (hardware.ranks_per_host or plan.devices.size)),
        dict(plan.shown_mesh.sizes),
        hardware.name,
        dtype,
        _bytes_by_dtype(plan),
        _stored(plan),
        prices.step_s,
        Throughput.of(plan, hardware, prices.step_s),
        _in_bf16(plan, hardware) if dtype == "float32" else None,
        prices.computing_s,
        prices.communicating_s,
        prices.updating_s,
        prices.hidden_s,
        prices.exposed_s,
        hardware.around_s,
        _repeated_s(plan, prices),
        _longest(plan, prices),
        _binds(plan, prices, peak.bytes if peak else 0),
        prices.sent_bytes,
        _by_kind(plan.held),
        peak.bytes if peak else None,
        f"{peak.direction} of {peak.at}" if peak else "",
        plan.memory,
        plan.optimizer.name,
        sum(row.replicated_s for row in operators),
        _certificate(plan),
        tuple(sorted(plan.recomputed)),
        tuple(plan.considered),
        prices.waiting_s,
        _schedule(staged) if staged else None,
        tuple(_stages(staged)) if staged else (),
        plan.tried,
        tuple(_modules(plan, prices)),
        operators,
        _collectives(plan, prices),
    )


def _by_kind(held: DeviceMemory) -> dict[str, int]:
    return {**dict(held.kinds()), "total": held.total}


def _schedule(costs: StagedCosts) -> ScheduleSummary:
    cut = costs.cut
    name = f"{cut.schedule}:{cut.each}" if cut.each > 1 else cut.schedule
    held = tuple(count / cut.each for count in costs.run.held)
    return ScheduleSummary(name, cut.microbatches, cut.count, costs.idle, costs.line_s, costs.exchange_s, held)


def _stages(costs: StagedCosts) -> Iterator[StageSummary]:
    held = [_by_kind(costs.held(group)) for group in range(costs.cut.count)]
    for number, stage in enumerate(costs.stages):
        group, seconds = costs.cut.group(number), (stage.forward_s, stage.backward_s, stage.message_s)
        yield StageSummary(group, tuple(_outermost(stage.modules)), stage.operators, *seconds, held[group])


def _outermost(names: Sequence[str]) -> Iterator[str]:
    """Yield modules, of those in one another the outermost, equal ones together."""
    outermost = [name for name in names if name and not any(name.startswith(f"{of}.") for of in names if of)]
    alike: dict[str, list[str]] = defaultdict(list)
    for name in outermost:
        alike[template(name)].append(name)
    yield from map(joined, alike.values())


def _binds(plan: Plan, prices: Prices, peak_bytes: int) -> tuple[Limit, ...]:
    """Return what takes most of a step, and memory where the plan needs what it may hold.

    It does where it holds nearly all of that, or would hold more if it recomputed nothing and gathered nothing again,
    or where more is alive at once.
    """
    taking: dict[Limit, float] = {
        "compute": prices.computing_s,
        "links": prices.exposed_s,
        "update": prices.updating_s,
        "stages": prices.waiting_s,
    }
    first = max(taking, key=lambda limit: taking[limit])
    if plan.memory is None:
        return (first,)
    once = plan.computing_again(frozenset(), frozenset()).held.total if plan.recomputed or plan.again else 0
    return (first, "memory") if max(once, plan.held.total / NEARLY, peak_bytes) > plan.memory else (first,)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_by_dtype(plan: Decisions) -> dict[str, int]:
    found: Counter[str] = Counter()
    for value in plan.capture.of_kind("parameter"):
        found[_name(value.dtype)] += value.bytes
    return dict(found)


def _stored(plan: Decisions) -> tuple[Stored, ...]:
    """Return how parameters are stored, those over the same axes together, and what is gathered of them."""
    gathered = {t.value for t in plan.transfers if any(step.kind == "all_gather" for step in t.steps)}
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for value in plan.capture.of_kind("parameter"):
        axes = "·".join(plan.mesh.ordered(plan.leaves[value.name].split_axes))
        used = {value.name, *_copies(plan, value.name)}
        found[axes]["bytes"] += value.bytes
        found[axes]["gathered"] += value.bytes * (not used.isdisjoint(gathered))
        found[axes]["again"] += value.bytes * (not used.isdisjoint(plan.again))
    rows = [Stored(axes, of["bytes"], of["gathered"], of["again"]) for axes, of in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _copies(plan: Decisions, name: str) -> Iterator[str]:
    """Yield the casts and views of a parameter."""
    for use in plan.graph.uses[name]:
        for result in use.node.results:
            if plan.capture.values[result].of_parameter:
                yield result
                yield from _copies(plan, result)


def _repeated_s(plan: Decisions, prices: Prices) -> float:
    computing_s = sum(prices.forward_s(node) for node in prices.nodes if node.name in plan.computed_again)
    return computing_s + sum(moved.again_s for moved in prices.moved)


def _longest(plan: Decisions, prices: Prices) -> dict[ComputingPart, float]:
    found: dict[ComputingPart, float] = dict.fromkeys(COMPUTING_PARTS, 0.0)
    for node in prices.nodes:
        part = prices.objective.longest_part(plan.graph, node, plan.strategies[node.name], plan.mesh)
        found[part] += prices.computes_s[node.name]
    return found


def _in_bf16(plan: Plan, hardware: Hardware) -> float | None:
    """Return the seconds of a step on GPUs at their speed in bfloat16; what is moved is counted as it is."""
    faster = hardware.flops_in(torch.bfloat16)
    if hardware.device_type != "cuda" or faster <= hardware.flops_in(torch.float32):
        return None
    flops = tuple((name, faster if name == "float32" else speed) for name, speed in hardware.flops)
    return prices_of(plan, replace(hardware, flops=flops)).step_s


def _certificate(plan: Decisions) -> Certificate | None:
    if plan.cost is None or plan.bound is None or plan.gap is None:
        return None
    row = search_of(plan)
    return Certificate(row.unit if row else "s", plan.cost, plan.bound, plan.gap)


@dataclass
class _Module:
    nodes: list[Node] = field(default_factory=list)
    moved: list[Communication] = field(default_factory=list)
    computing_s: float = 0.0
    held_bytes: int = 0


def _modules(plan: Decisions, prices: Prices) -> Iterable[ModuleRow]:
    """A row for modules that are alike in what their operators do and in what is communicated."""
    modules: dict[str, _Module] = defaultdict(_Module)
    for node in plan.capture.nodes:
        modules[node.scope].nodes.append(node)
        modules[node.scope].computing_s += prices.computes_s[node.name]
    for moved in prices.moved:
        modules[moved.module].moved.append(moved)
    for value in plan.capture.of_kind("parameter"):
        modules[value.label.rpartition(".")[0]].held_bytes += plan.bytes_of(value)
    alike: dict[object, list[str]] = defaultdict(list)
    for name, module in modules.items():
        decided = tuple((node.op, plan.in_strategy(node), plan.out_strategy(node)) for node in module.nodes)
        moves = tuple((moved.kinds, moved.axes, round(moved.bytes)) for moved in module.moved)
        alike[template(name), decided, moves].append(name)
    for names in alike.values():
        yield _module_row(plan, prices, names, [modules[name] for name in names])


def _module_row(plan: Decisions, prices: Prices, names: Sequence[str], modules: Sequence[_Module]) -> ModuleRow:
    main = max(modules[0].nodes, key=lambda node: prices.computes_s[node.name], default=None)
    moved = [each for module in modules for each in module.moved]
    return ModuleRow(
        joined(names),
        len(names),
        main.op if main else None,
        plan.in_strategy(main) if main else (),
        plan.out_strategy(main) if main else (),
        sum(module.computing_s for module in modules),
        sum(each.seconds for each in moved),
        sum(each.bytes for each in moved),
        sum(module.held_bytes for module in modules),
    )


def _operators(plan: Decisions, prices: Prices) -> tuple[OperatorRow, ...]:
    alike: dict[tuple[str, str, str, int], list[Node]] = defaultdict(list)
    for node in plan.capture.nodes:
        parts = plan.parts(node)
        alike[node.op, template(node.scope), node.source.partition(" in ")[0], parts].append(node)
    rows = [
        OperatorRow(
            op,
            joined(list(dict.fromkeys(node.scope for node in nodes))),
            line,
            len(nodes),
            parts,
            sum(prices.computes_s[node.name] for node in nodes),
            sum(_replicated_s(plan, prices, node, parts) for node in nodes),
            plan.graph.rules[nodes[0].name].listed,
        )
        for (op, _, line, parts), nodes in alike.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.computing_s))


def _replicated_s(plan: Decisions, prices: Prices, node: Node, parts: int) -> float:
    """Return the seconds that an operator would take less, were its work shared by all devices (of its stage)."""
    spent = prices.computes_s[node.name]
    floor = prices.hardware.launch_s * (1 + BACKWARD * plan.graph.needs_gradient(node))
    return spent - max(spent * parts / plan.sharers.size, min(floor, spent))


def _collectives(plan: Decisions, prices: Prices) -> tuple[CollectiveRow, ...]:
    operators = {node.name: node.op for node in plan.capture.nodes}
    alike: dict[tuple[str, str, str], list[tuple[str, Communication]]] = defaultdict(list)
    for moved in prices.moved:
        of = operators[moved.cause] if moved.value is None else _cause(plan.capture.values[moved.value], moved)
        alike[", ".join(moved.kinds), "·".join(moved.axes), template(of)].append((of, moved))
    rows = [
        CollectiveRow(
            kinds,
            axes,
            joined(list(dict.fromkeys(of for of, _ in found))),
            len(found),
            sum(moved.bytes for _, moved in found),
            sum(moved.seconds for _, moved in found),
        )
        for (kinds, axes, _), found in alike.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _cause(value: Value, moved: Communication) -> str:
    """For what a value is communicated: a parameter by its name, any other by the module that makes it."""
    return value.label if value.kind == "parameter" else moved.module
