"""The plan with pipeline stages of a request whose mesh has an axis ``pp``.

A microbatch is one more mesh axis, which is laid out in time: each rank works through it. Along it operators follow the
batch as in data parallelism; along the other axes they are planned as if there were no stages. So the rules say what is
exact: over microbatches sums of losses and counts are made, and gradients add up. What else would communicate over them
is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import zip_longest

from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import MICROBATCHES, PIPELINE, Axis, Mesh, Stages
from shardwright.compiler.plan.axis_names import with_axis_names
from shardwright.compiler.plan.pipeline.costs import StagedCosts
from shardwright.compiler.plan.pipeline.cut import Limit
from shardwright.compiler.plan.pipeline.fitting import Limits, parameters_read, within_memory
from shardwright.compiler.plan.pipeline.flow import Flow, operators_in_stages
from shardwright.compiler.plan.pipeline.linear import why_not_in_turns
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.schedule import (
    least_seconds,
    read_schedule,
    schedule,
    schedule_problem,
    simulate,
)
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import OverBudget, data_parallel
from shardwright.compiler.plan.spaces import fixed_leaves, output_layouts
from shardwright.compiler.rules.notation import Strategy
from shardwright.errors import PlanError, UsageError

_USUAL_SCHEDULE = "1f1b"
_QUICKER = 0.98  # of the time: a schedule that keeps all microbatches is not worth less
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
    return plans.with_microbatches(request.microbatches or plans.usual_microbatches).priced().plan


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
        prices, (name, _) = Seconds(request.hardware, request.optimizer), _schedule(request)
        both_s = sum(prices.floor(self._graph, node, parts) for node in operators_in_stages(self._graph.capture))
        return least_seconds(both_s, name, self._count, microbatches) + request.hardware.around_s

    def with_microbatches(self, number: int) -> MicrobatchPlans:
        """Return the plans for so many microbatches."""
        return MicrobatchPlans(self._request, number, self._inside)

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


class MicrobatchPlans:
    """The plans of a request whose mesh has stages, for one number of microbatches.

    Args:
        inside: the plan of the ranks of one stage, for all operators, by the memory that these may hold.
    """

    def __init__(self, request: PlanRequest, microbatches: int, inside: Callable[[int | None], Plan]) -> None:
        self._request, self._microbatches, self._inside = request, microbatches, inside
        self._count = request.mesh.sizes[PIPELINE]

    @cached_property
    def _flow(self) -> Flow:
        """The plan of the ranks of a stage without a limit of memory. Cached: all that it is made of stays the same."""
        return self._in_time(self._inside(None))

    def _in_time(self, inside: Plan) -> Flow:
        stages = Stages(self._count, self._microbatches, {}, *_schedule(self._request))
        flow = Flow(_in_time(inside, self._request, stages))
        flow.refuse()
        return flow

    @property
    def least_s(self) -> float:
        """Seconds that no cut of the plan without a limit of memory is below, whatever is recomputed."""
        return self._flow.least_s + self._request.hardware.around_s

    def priced(self, below_s: float = math.inf) -> StagedCosts:
        """Return the plan with its prices.

        It is the one without a limit of memory, if that takes no less than ``below_s``. The ranks of a stage are first
        planned as if their memory had no limit, and layers recomputed until each stage fits; where that is not enough,
        as if they held all stages, in as many times their memory.

        Raises:
            PlanError: where there is none; `OverBudget` where none fits.
        """
        limit, free = self._request.memory, self._in_stages(self._flow)
        quickest = min(free, key=lambda costs: costs.step_s)
        if limit is None or quickest.step_s >= below_s:
            return quickest
        try:
            return self._fitting(self._flow, free, limit)
        except OverBudget as error:
            try:
                flow = self._in_time(self._inside(self._count * limit))
                return self._fitting(flow, self._in_stages(flow), limit)
            except OverBudget:
                raise error from None

    def _in_stages(self, flow: Flow) -> list[StagedCosts]:
        """Return the plan with the schedule asked for; without one with 1F1B, and with GPipe's if that may be quicker.

        Messages of 1F1B are waited for one by one, which takes longer where links are slow.
        """
        request = self._request
        found = self._scheduled(flow, request.schedule or _USUAL_SCHEDULE)
        if request.schedule is not None or found.cut.schedule == "gpipe":
            return [found]
        other_s = simulate(schedule("gpipe", self._count, self._microbatches), found.seconds).seconds
        return [found, *([self._scheduled(flow, "gpipe")] if other_s <= _QUICKER * found.line_s else [])]

    def _scheduled(self, flow: Flow, called: str) -> StagedCosts:
        request = self._request
        name, each = read_schedule(called)
        if problem := schedule_problem(name, self._count, self._microbatches):
            raise UsageError(problem)
        nowhere = dict.fromkeys((node.name for node in flow.staged), 0)
        plan = flow.plan.in_stages(Stages(self._count, self._microbatches, nowhere, name, each))
        found = self._recut(flow, plan, [])
        if found is None:  # of later plans, whose parameters are held where no cut can have them
            assert plan.stages is not None
            found = _in_turns(plan.in_stages(replace(plan.stages, of=flow.stages(plan.stages) or {})), request)
        return StagedCosts(found, request.hardware)

    def _recut(self, flow: Flow, plan: Plan, limits: Limits) -> Plan | None:
        """Return the plan with the best cut that keeps limits, and has stored parameters where they are."""
        assert plan.stages is not None
        storage = self._request.storage
        if storage and len(flow.staged) < plan.stages.total:
            of: dict[str, int] | None = _where_stored(plan, storage)
        else:
            stored = _as_stored(plan, storage, plan.stages)
            together = [[*one, *two] for one, two in zip_longest(limits, stored, fillvalue=())]
            of = flow.stages(plan.stages, together)
        return None if of is None else _in_turns(plan.in_stages(replace(plan.stages, of=of)), self._request)

    def _fitting(self, flow: Flow, free: Sequence[StagedCosts], limit: int) -> StagedCosts:
        """Return the quickest of some plans once they fit.

        Raises:
            OverBudget: where none does, of the first.
        """
        found, errors, recut = list[StagedCosts](), list[OverBudget](), partial(self._recut, flow)
        for costs in free:
            try:
                plan = within_memory(replace(costs.plan, memory=limit), limit, recut)
                found.append(StagedCosts(plan, costs.hardware))
            except OverBudget as error:
                errors.append(error)
        if not found:
            raise errors[0]
        return min(found, key=lambda costs: costs.step_s)


def _schedule(request: PlanRequest) -> tuple[str, int]:
    """Return the name of the schedule asked for, or of the usual one, and how many stages a group of ranks has."""
    return read_schedule(request.schedule or _USUAL_SCHEDULE)


def _in_turns(plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan of some stages with the schedule that they allow, and who holds which parameter."""
    stages = plan.stages
    assert stages is not None
    alone = plan.capture.rows == 1 and stages.each == 1  # a row, as at the end of an epoch, goes through undivided
    name = stages.schedule if stages.microbatches > 1 and not alone else "gpipe"  # else there are no turns to take
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


def _where_stored(plan: Plan, storage: Mapping[str, Layout]) -> dict[str, int]:
    """Return the stage of each of few operators: the next that holds its parameters, or that of the one before.

    Of a later plan, as one to predict: other stages than these have no operators, and pass on what comes.
    """
    stages, read = plan.stages, parameters_read(plan)
    assert stages is not None
    holders = {name: layout.held[1] for name, layout in storage.items() if layout.held is not None}
    of, stage = {}, 0
    for name in stages.of:
        groups = {holders[each] for each in read[name] if each in holders}
        behind = range(stage, stages.total)
        stage = of[name] = next((each for each in behind if {stages.group(each)} == groups), stage)
    return of


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
