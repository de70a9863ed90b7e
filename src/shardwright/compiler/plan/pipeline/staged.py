"""The plan with pipeline stages of a request whose mesh has an axis ``pp``.

A microbatch is one more mesh axis, which is laid out in time: each rank works through it. Along it operators follow the
batch as in data parallelism; along the other axes they are planned as if there were no stages. So the rules say what is
exact: over microbatches sums of losses and counts are made, and gradients add up. What else would communicate over them
is refused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import MICROBATCHES, PIPELINE, Axis, Mesh, Stages
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.plan.axis_names import with_axis_names
from shardwright.compiler.plan.decisions import Transfer
from shardwright.compiler.plan.pipeline.costs import MicrobatchCosts, StagedCosts
from shardwright.compiler.plan.pipeline.cut import Limit, cut, improved
from shardwright.compiler.plan.pipeline.fitting import Limits, parameters_read, within_memory
from shardwright.compiler.plan.pipeline.linear import why_not_in_turns
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.memory import local_bytes
from shardwright.compiler.plan.pricing.schedule import (
    Floats,
    least_seconds,
    read_schedule,
    schedule,
    schedule_problem,
    seconds_of_cuts,
    simulate,
)
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import OverBudget, data_parallel
from shardwright.compiler.plan.spaces import fixed_leaves, output_layouts
from shardwright.compiler.rules.notation import Strategy
from shardwright.errors import PlanError, UsageError

_USUAL_SCHEDULE = "1f1b"
_QUICKER = 0.98  # of the time: a schedule that keeps all microbatches is not worth less
_NOTICED = 0.01  # of what a stage takes: messages that may be waited for
_MANY = 4  # microbatches to a stage: with as many, the slowest stage decides how long all take
_PER_STAGE = 4  # microbatches, unless a number is asked for: 4 of 5 ranks then compute, of many stages


def staged_plan(graph: RuledGraph, request: PlanRequest, make: Callable[[RuledGraph, PlanRequest], Plan]) -> Plan:
    """Return the plan of a request whose mesh has stages.

    Args:
        make: makes the plan of one stage.

    Raises:
        UsageError: where the request has what goes with no stages.
        PlanError: where the graph does, or has fewer operators than stages.
    """
    plans = StagedPlans(graph, request, make)
    return plans.priced(request.microbatches or plans.usual_microbatches).plan


class StagedPlans:
    """The plans of a request whose mesh has stages, for any number of microbatches.

    Raises:
        UsageError: where the request has what goes with no stages.
    """

    def __init__(
        self, graph: RuledGraph, request: PlanRequest, make: Callable[[RuledGraph, PlanRequest], Plan]
    ) -> None:
        _refuse_request(request)
        self._graph, self._request, self._make = graph, request, make
        self._count = request.mesh.sizes[PIPELINE]
        # Cached by the memory that all stages together may hold on a rank; the request stays.
        self._insides: dict[int | None, Plan] = {}

    @property
    def usual_microbatches(self) -> int:
        """How many there are if nobody says: at most so many that each rank has a row of each."""
        rank_rows = self._graph.capture.rows // (self._request.mesh.size // self._count)
        return max(1, min(_PER_STAGE * self._count, rank_rows))

    @property
    def even_microbatches(self) -> list[int]:
        """Numbers of microbatches that divide the rows of a rank: as many as there are stages, 2, 4, 8 or 16 times."""
        rows = self._rows_of_rank()
        several = (self._count * times for times in (1, 2, 4, 8, 16))  # of 16 times, stages wait 6 % of the time
        return [number for number in several if number <= rows and rows % number == 0]

    def _rows_of_rank(self) -> int:
        inside, capture = self._inside(None), self._graph.capture
        split = next((inside.leaves[v.name].dims[0] for v in capture.of_kind("input") if v.shape), Split())
        return capture.rows // inside.mesh.extent(split.axes)

    def least_s(self, microbatches: int) -> float:
        """Return seconds that no plan with so many microbatches is below, whatever its cut and its ranks do.

        Each operator is split over the ranks of its stage and over microbatches, and takes no less than one that is
        split over as many devices.
        """
        request, parts = self._request, self._request.mesh.size // self._count * microbatches
        prices = Seconds(request.hardware, request.optimizer)
        both_s = sum(prices.floor(self._graph, node, parts) for node in operators_in_stages(self._graph.capture))
        name = read_schedule(request.schedule or _USUAL_SCHEDULE)[0]
        return least_seconds(both_s, name, self._count, microbatches) + request.hardware.around_s

    def priced(self, microbatches: int, below_s: float = math.inf) -> StagedCosts:
        """Return the plan for so many microbatches with its prices.

        It is the one without a limit of memory, if that takes no less than ``below_s``. The ranks of a stage are first
        planned as if their memory had no limit, and layers recomputed until each stage fits; where that is not enough,
        as if they held all stages, in as many times their memory.

        Raises:
            PlanError: where there is none; `OverBudget` where none fits.
        """
        limit = self._request.memory
        if limit is not None and below_s < math.inf:
            free = self._in_stages(self._inside(None), microbatches, None)
            if free.step_s >= below_s:
                return free
        try:
            return self._in_stages(self._inside(None), microbatches, limit)
        except OverBudget as error:
            assert limit is not None
            try:
                return self._in_stages(self._inside(self._count * limit), microbatches, limit)
            except OverBudget:
                raise error from None

    def _inside(self, memory: int | None) -> Plan:
        """Return the plan of the ranks of one stage, for all operators."""
        if memory not in self._insides:
            request, rest = self._request, _without(self._request.mesh, PIPELINE)
            within = replace(
                request,
                mesh=rest if rest.axes else Mesh.of(ranks=1),
                axes=request.axes and _without(request.axes, PIPELINE, MICROBATCHES),
                storage={name: each.without(PIPELINE) for name, each in request.storage.items()},
                microbatches=None,
                schedule=None,
                memory=memory,
            )
            plan = self._make(self._graph, within)
            self._insides[memory] = plan if within.axes is not None else with_axis_names(plan)
        return self._insides[memory]

    def _in_stages(self, inside: Plan, microbatches: int, memory: int | None) -> StagedCosts:
        """Return the plan with the schedule asked for; without one with 1F1B, or with GPipe's where that is quicker.

        Messages of 1F1B are waited for one by one, which takes longer where links are slow.
        """
        request = self._request
        found = self._scheduled(inside, microbatches, request.schedule or _USUAL_SCHEDULE, memory)
        if request.schedule is not None or found.cut.schedule == "gpipe":
            return found
        other_s = simulate(schedule("gpipe", self._count, microbatches), found.seconds).seconds
        if other_s > _QUICKER * found.line_s:
            return found
        try:
            other = self._scheduled(inside, microbatches, "gpipe", memory)
        except OverBudget:
            return found
        return min(found, other, key=lambda costs: costs.step_s)

    def _scheduled(self, inside: Plan, microbatches: int, called: str, memory: int | None) -> StagedCosts:
        request, count = self._request, self._count
        plan = _in_time(inside, request, Stages(count, microbatches, {}))
        flow = _Flow(plan)
        flow.refuse()
        name, each = read_schedule(called)
        if problem := schedule_problem(name, count, microbatches):
            raise UsageError(problem)
        stages = Stages(count, microbatches, dict.fromkeys((node.name for node in flow.staged), 0), name, each)
        stored = _as_stored(plan.in_stages(stages), request.storage, stages)

        def recut(plan: Plan, limits: Limits) -> Plan | None:
            together = [[*one, *two] for one, two in zip_longest(limits, stored, fillvalue=())]
            of = flow.stages(stages, together)
            return None if of is None else _in_turns(plan.in_stages(replace(stages, of=of)), request)

        plan = replace(plan, memory=memory)
        found = recut(plan, [])
        if found is None:  # of later plans, whose parameters are held where no cut can have them
            found = _in_turns(plan.in_stages(replace(stages, of=flow.stages(stages) or {})), request)
        return StagedCosts(found if memory is None else within_memory(found, memory, recut), request.hardware)


def _in_turns(plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan of some stages with the schedule that they allow, and who holds which parameter."""
    stages = plan.stages
    assert stages is not None
    name = stages.schedule if stages.microbatches > 1 else "gpipe"  # there are no turns to take
    if name != "gpipe" and (problem := why_not_in_turns(plan, stages.of)):
        if request.schedule is not None:
            raise PlanError(
                f"schedule={request.schedule!r} begins the backward before the last forward, and {problem}; "
                "type schedule='gpipe' (--schedule gpipe)"
            )
        name = "gpipe"
    return plan.in_stages(replace(stages, schedule=name, holders=_holders(plan, request)))


def _holders(plan: Plan, request: PlanRequest) -> dict[str, int | None]:
    """Return which group of ranks holds each parameter, None for those that are sharded over the groups.

    That is the one that computes with it, if there is one alone. Where a parameter is stored already it stays there.
    """
    found: dict[str, int | None] = {}
    for value in plan.capture.of_kind("parameter"):
        readers, stored = plan.read_by_stages[value.name], request.storage.get(value.name)
        if plan.stages is None or plan.stages.count == 1 or (stored and PIPELINE not in stored.split_axes):
            continue
        if stored:
            found[value.name] = stored.held[1] if stored.held else None
        elif len(readers) == 1 and value.shape:
            [found[value.name]] = readers
        else:
            found[value.name] = None
    return found


def _as_stored(plan: Plan, storage: Mapping[str, Layout], stages: Stages) -> list[list[Limit]]:
    """Return limits that let each operator be where its parameters are held already."""
    holders = {name: layout.held[1] for name, layout in storage.items() if layout.held is not None}
    if not holders:
        return []
    read = parameters_read(plan)
    at = [{holders[each] for each in read[name] if each in holders} for name in stages.of]
    return [[Limit([float(bool(of - {stages.group(s)})) for of in at], 0.5)] for s in range(stages.total)]


def _ranks(plan: Plan) -> tuple[Axis, ...]:
    """Return the axes of the ranks of a stage."""
    return _without(plan.mesh, MICROBATCHES).axes


def _without(mesh: Mesh, *names: str) -> Mesh:
    return Mesh(tuple(axis for axis in mesh.axes if axis.name not in names))


def _refuse_request(request: PlanRequest) -> None:
    names = request.mesh.names
    if names[0] != PIPELINE:
        raise UsageError(
            f"the mesh {request.mesh} has its stages ({PIPELINE}) behind other axes; write them first, as in "
            f"mesh='{PIPELINE}=2,dp=2': the ranks of a stage then stand next to each other"
        )
    if MICROBATCHES in names:
        raise UsageError(f"the mesh {request.mesh} has an axis {MICROBATCHES!r}; type microbatches= (--microbatches)")
    if request.mode == "single":
        raise UsageError(f"mode='single' splits nothing, and the mesh {request.mesh} has stages; leave mesh= out")
    if request.inputs != "split":
        raise UsageError(f"with stages each rank is given its rows of a batch; leave inputs={request.inputs!r} out")


def _in_time(inside: Plan, request: PlanRequest, stages: Stages) -> Plan:
    """Return the plan of a stage with its batch cut into microbatches, too."""
    graph, capture = inside.graph, inside.capture
    if stages.microbatches == 1:
        return replace(inside, named=request.mesh, stages=stages, cost=None, bound=None, again=frozenset())
    alone = Mesh.of(**{MICROBATCHES: stages.microbatches})
    leaves = fixed_leaves(capture, alone, "split", {}, every_rank=True)
    along = data_parallel(graph, alone, leaves, output_layouts(capture, alone, leaves))
    mesh = Mesh((Axis(MICROBATCHES, stages.microbatches), *inside.mesh.axes))
    strategies = {name: _joined(each, along.strategies[name], mesh) for name, each in inside.strategies.items()}
    stored = {name: _cut_further(layout, along.leaves[name]) for name, layout in inside.leaves.items()}
    outputs = output_layouts(capture, alone, leaves)  # whole within each microbatch, so that these can be joined
    return Plan(
        graph,
        mesh,
        request.mesh,
        inside.mode,
        inside.search,
        strategies,
        stored,
        outputs,
        optimizer=inside.optimizer,
        hardware=inside.hardware,
        recomputed=inside.recomputed,
        stages=stages,
    )


def _joined(mine: Strategy, along: Strategy, mesh: Mesh) -> Strategy:
    axes = tuple((*first, *then) for first, then in zip(along.axes, mine.axes, strict=True))
    return Strategy(axes, mesh.ordered({*mine.partial, *along.partial}))


def _cut_further(layout: Layout, along: Layout) -> Layout:
    dims = zip(layout.dims, along.dims, strict=True)
    return Layout(tuple(Split((*first.axes, *then.axes), max(first.unit, then.unit)) for then, first in dims))


def operators_in_stages(capture: Capture, of_microbatch: Container[str] = ()) -> list[Node]:
    """Return the operators that depend on the batch and on parameters, in order of execution.

    Args:
        of_microbatch: others that are split over microbatches, and so depend on the batch.
    """
    fed = {value.name for value in capture.of_kind("input")}
    weighed = {value.name for value in capture.of_kind("parameter")}
    found = []
    for node in capture.nodes:
        operands = set(node.operands)
        if operands & fed or node.name in of_microbatch:
            fed.update(node.results)
        if operands & weighed:
            weighed.update(node.results)
        if set(node.results) <= fed and set(node.results) <= weighed:
            found.append(node)
    return found


@dataclass(frozen=True)
class _Flow:
    """What flows through the graph of a plan: from the batch, and from parameters."""

    plan: Plan

    @property
    def capture(self) -> Capture:
        return self.plan.capture

    @cached_property
    def staged(self) -> list[Node]:
        """The operators that depend on the batch and on parameters, in order of execution: each has one stage.

        Cached, as all of this class: the plan is frozen.
        """
        of_microbatch = {name for name, strategy in self.plan.strategies.items() if MICROBATCHES in strategy.used}
        return operators_in_stages(self.capture, of_microbatch)

    def stages(self, stages: Stages, limits: Limits = ()) -> dict[str, int] | None:
        """Return the stage of each of these operators; None where no cut keeps the limits.

        Stages that wait for their messages are cut elsewhere than those whose messages go beside computing, and those
        that wait for each other's, too, elsewhere again. The cut is taken with which the schedule ends first.

        Raises:
            PlanError: where there are fewer of them than stages.
        """
        nodes = self.staged
        if len(nodes) < stages.total:
            raise PlanError(
                f"{len(nodes)} operators depend on the batch and on parameters, which are no {stages.total} stages; "
                f"choose a smaller {PIPELINE}= in mesh="
            )
        both_s, crossing = [sum(took) for took in self._seconds], [both for _, both in self._crossing]
        first = cut(both_s, crossing, stages.total, limits)
        if first is None:
            return None
        found = [first]
        noticed = max(crossing[start] for start in first) > _NOTICED * sum(both_s) / stages.total
        if noticed:
            others = [cut(both_s, crossing, stages.total, limits, overlapped=True)]
            others.append(cut(both_s, [2 * s for s in crossing], stages.total, limits))
            found += [other for other in others if other]
        line_s = partial(self._line_s, stages)
        if noticed or stages.microbatches < _MANY * stages.total:
            found = [improved(starts, len(nodes), line_s, limits) for starts in found]
        starts = found[int(line_s(np.array(found)).argmin())]
        of, stage = {}, -1
        for at, node in enumerate(nodes):
            stage += at in starts
            of[node.name] = stage
        return of

    def _line_s(self, stages: Stages, starts: NDArray[np.int64]) -> Floats:
        """Return the seconds in which the microbatches go through stages that begin there, of each row."""
        assert self.plan.hardware is not None
        ends = np.concatenate([starts[:, 1:], np.full((len(starts), 1), len(self.staged))], axis=1)
        forward, backward = np.moveaxis(self._until[ends] - self._until[starts], 2, 0)
        message = np.array([there for there, _ in (*self._crossing, (0.0, 0.0))])[ends]
        table = schedule(stages.schedule, stages.count, stages.microbatches, stages.total)
        on_demand = not self.plan.hardware.receives_early
        return seconds_of_cuts(table, forward.T, backward.T, message.T, on_demand=on_demand)

    @cached_property
    def _until(self) -> Floats:
        """The seconds of the first operators, of none at first, forward and backward. Cached as all of this class."""
        return np.concatenate([np.zeros((1, 2)), np.cumsum(self._seconds, axis=0)])

    @cached_property
    def _seconds(self) -> list[tuple[float, float]]:
        """The seconds of these operators, forward and backward, each with the redistributions of what it reads."""
        assert self.plan.hardware is not None
        costs = MicrobatchCosts(self.plan, self.plan.hardware)
        transfers: defaultdict[str, list[Transfer]] = defaultdict(list)
        for transfer in self.plan.transfers:
            transfers[transfer.consumers[0][0]].append(transfer)
        parts = ([costs.operator_s(n), *map(costs.transfer_s, transfers[n.name])] for n in self.staged)
        return [(sum(ahead for ahead, _ in part), sum(back for _, back in part)) for part in parts]

    @cached_property
    def _crossing(self) -> list[tuple[float, float]]:
        """The seconds that what is made before each operator and read behind takes, in one direction, and in both."""
        plan, nodes = self.plan, self.staged
        assert plan.hardware is not None
        prices, pair = Seconds(plan.hardware, plan.optimizer), Mesh((Axis(PIPELINE, 2), *_ranks(plan)))
        number = {node.name: at for at, node in enumerate(nodes)}
        changes = np.zeros((len(nodes) + 1, 2))
        for node in nodes:
            for name in node.results:
                last = max(
                    (number[use.node.name] for use in plan.graph.uses[name] if use.node.name in number), default=0
                )
                if last > number[node.name]:
                    size = local_bytes(self.capture.values[name], plan.layout(name), plan.mesh)
                    message = Collective("all_gather", (PIPELINE,), 2 * size)  # in which each of two sends as much
                    seconds = prices.collective(message, pair)
                    both = seconds, seconds * (1 + self.capture.values[name].needs_gradient)
                    changes[number[node.name] + 1] += both
                    changes[last + 1] -= both
        return [(float(there), float(both)) for there, both in np.maximum(changes[:-1].cumsum(axis=0), 0.0)]

    def refuse(self) -> None:
        """Raise `PlanError` where something else would communicate over microbatches than sums of losses and counts."""
        stages = self.plan.stages
        assert stages is not None
        remedy = "type microbatches=1 (--microbatches 1), with which the whole batch goes through the stages at once"
        if self.capture.checks:
            raise PlanError(
                "the model raises errors for values of its tensors, which is not there yet with stages; leave "
                f"{PIPELINE} out of mesh="
            )
        if stages.microbatches == 1:
            return
        for node in self.capture.nodes:
            forward, backward = self.plan.graph.collectives_inside(
                node, self.plan.strategies[node.name], self.plan.mesh
            )
            if any(MICROBATCHES in collective.axes for collective in (*forward, *backward)):
                raise PlanError(
                    f"{node.op} in {node.scope or 'the loss function'} ({node.source}) computes over the whole batch, "
                    f"of which a pipeline has one of {stages.microbatches} microbatches at a time; {remedy}"
                )
        for transfer in self.plan.transfers:
            moved = (step for step in transfer.steps if MICROBATCHES in step.axes)
            if step := next((step for step in moved if step.kind == "all_to_all"), None):
                raise PlanError(f"{self._described(transfer)} needs {step}, over microbatches; {remedy}")
        names = {node.name for node in self.staged}
        for buffer, new in self.capture.mutations.items():
            maker = self.plan.graph.producers.get(new)
            if maker is not None and maker[0].name in names:
                label = self.capture.values[buffer].label
                raise PlanError(f"the buffer {label} is changed by what each microbatch gives; {remedy}")

    def _described(self, transfer: Transfer) -> str:
        name, index = transfer.consumers[0]
        node = next((node for node in self.capture.nodes if node.name == name), None)
        if node is None:
            return f"the output {self.capture.values[transfer.value].label}"
        return f"operand {index} of {node.op} in {node.scope or 'the loss function'} ({node.source})"
