"""From a capture and a request to a plan.

Where the mode searches nothing, every operator follows the split of the batch (`data.py`). Else the row of the search
says which strategies are choices and what is minimised over them (`searches.py`); `search.py` finds the minimum, and
`recursive.py` what is the best axis by axis.

Where the hardware hides the reduction of gradients behind the backward, several searches are made (`prices.py`).

An exact search leaves a gap where a budget of bytes binds, or where too much is tied together for a proof.
Another way to plan may then be better by chance, unless each is looked at: the plans that are known by name, and those
of the other searches. The bound stays that of the search.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial

from shardwright.errors import PlanError, StrategyError
from shardwright.graph.ir import Capture
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh
from shardwright.plan.boundary import fixed_leaves, output_layouts
from shardwright.plan.explain import holds, in_unit
from shardwright.plan.minima.exact import TooWide
from shardwright.plan.minima.narrow import NothingBelow
from shardwright.plan.plan import Plan
from shardwright.plan.prices import cheapest_with_hidden, gathered_again, repeated_costs
from shardwright.plan.pricing.cost import Objective, Seconds
from shardwright.plan.pricing.links import link_along
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.plan.request import PlanRequest
from shardwright.plan.searches import MODES, SEARCHES, Search
from shardwright.plan.searching.budget import Budget, OverBudget
from shardwright.plan.searching.data import data_parallel
from shardwright.plan.searching.known import Known
from shardwright.plan.searching.problem import Problem
from shardwright.plan.searching.recursive import recursive
from shardwright.plan.searching.search import least_cost, search
from shardwright.plan.searching.space import FEW_AXES, Choice, Space
from shardwright.plan.spaces import blocks_for, in_parts, meshes_for, space_of, tensor_space
from shardwright.words import in_bytes, typed_bytes

# A gap of such a share is none. On more than few axes propagation, which takes as long as the search, is not asked:
# what it may choose is searched by itself there, and for seconds.
EQUAL = 1e-9
# A gap of another way to plan that is worth no further price of a byte, and how far prices are apart where that
# minimises something else.
FAR, APART = 1e-2, 5e-2
LAST = 8  # plans whose decisions may be asked about again


def make_plan(capture: Capture, request: PlanRequest) -> Plan:
    """Decide the layout of every value and the strategy of every operator.

    Raises:
        UsageError: where the inputs do not fit the batch or the mesh.
        StrategyError: where a pin cannot be fulfilled.
        PlanError: where no plan exists.
    """
    graph = RuledGraph.of(capture)
    if request.searched is None:
        return _following_the_batch(graph, request)
    row = SEARCHES[request.searched]
    _refuse_what_cannot_fit(graph, request)
    objective = row.objective(request.hardware, request.optimizer)
    if isinstance(objective, Seconds) and request.hardware.hides_gradients:
        return cheapest_with_hidden(
            lambda of: _searched(graph, request, replace(row, objective=lambda *_: of)), objective
        )
    return _searched(graph, request, row)


def _searched(graph: RuledGraph, request: PlanRequest, row: Search) -> Plan:
    """The plan that costs least of those that a search finds."""
    meshes = _Meshes(graph, request, row)
    if request.axes:
        meshes.look_at([meshes.weighing(request.axes)])
    else:
        meshes.look()
    return meshes.found()


class _Meshes:
    """The meshes that are looked at: the plan that costs least, what nothing costs less than, what is said of each."""

    def __init__(self, graph: RuledGraph, request: PlanRequest, row: Search) -> None:
        self._graph, self._request, self._row = graph, request, row
        self._best: Plan | None = None
        self._bounds: list[float] = []  # of each mesh, where the search has one
        self._errors: list[tuple[Mesh, PlanError]] = []
        self._said: list[str] = []
        self._price = 0.0  # of a byte, at which the plan was found

    def weighing(self, mesh: Mesh, row: Search | None = None) -> Weighing:
        """What may be chosen on a mesh, and what that costs."""
        request, row = self._request, row or self._row
        space = space_of(self._graph, mesh, request, row)
        found = Weighing(mesh, request, space, row.objective(request.hardware, request.optimizer))
        found.price = self._price
        return found

    def look(self) -> None:
        """Look at meshes of few axes, then at finer ones; where all tables would be too large, at coarser ones."""
        count = self._row.first_axes
        meshes = meshes_for(self._graph, self._request, count)
        few = [self.weighing(mesh) for mesh in meshes]
        self.look_at(few)
        # Unless pins, the storage or the inputs name the axes that there are.
        named = len(meshes[0].axes) > count or self._request.storage or isinstance(self._request.inputs, Mapping)
        if self._is_too_wide() and not named:
            while self._is_too_wide() and count > 1:
                count -= 1
                self.look_at([self.weighing(mesh) for mesh in meshes_for(self._graph, self._request, count)])
        else:
            self._look_closer(self._finer(meshes), min(of.least for of in few))

    def _look_closer(self, finer: Sequence[Mesh], least: float) -> None:
        """Look at finer meshes, that first whose devices find most to do when none is to be idle.

        What is found of such plans, in a fraction of the time, is to be beaten.
        """
        weighings = [self.weighing(mesh) for mesh in finer]
        worth = [of for of in weighings if self._is_worth(of, least)]
        busy = {of.mesh: self._of_the_busy(of.mesh) for of in worth}
        self.look_at(sorted(worth, key=lambda of: busy[of.mesh]))
        idle = [of.mesh for of in weighings if of not in worth]
        self._said += [f"{mesh} not searched: its axes have one link, and cut no more than fewer do" for mesh in idle]

    def _of_the_busy(self, mesh: Mesh) -> float:
        """What the best plan costs that leaves no device idle, which may take the place of the one that is there."""
        weighing = self.weighing(mesh, replace(self._row, keeps=SEARCHES["propagation"].keeps))
        try:
            choice = weighing.first(self._row, self._least())
        except PlanError:
            return math.inf
        self._take(choice, weighing)
        return choice.cost or 0.0

    def _finer(self, meshes: Sequence[Mesh]) -> Sequence[Mesh]:
        """Those of more axes than these, unless the user has named several."""
        if len(self._request.mesh.without_ones().axes) > 1:
            return ()
        counts = range(self._row.first_axes + 1, self._row.most_axes + 1)
        found = dict.fromkeys(mesh for of in counts for mesh in meshes_for(self._graph, self._request, of))
        return [mesh for mesh in found if mesh not in meshes]

    def _is_worth(self, finer: Weighing, least: float) -> bool:
        """Whether links tell the axes of a mesh from each other, or they cut what those of coarser meshes do not."""
        per_host = self._request.hardware.ranks_per_host
        links = {link_along(finer.mesh, [axis], per_host) for axis in finer.mesh.names}
        return len(links) > 1 or finer.least < least * (1 - EQUAL)

    def look_at(self, weighings: Sequence[Weighing]) -> None:
        """Search these meshes for what costs less than what was found."""
        for weighing in weighings:
            self._said.append(f"{weighing.mesh} {self._searched(weighing)}")
            weighing.forget()

    def _searched(self, weighing: Weighing) -> str:
        """What is to be said of a mesh; a plan that costs less than the one that is there takes its place."""
        row, below = self._row, self._least()
        if weighing.least >= below:
            return f"not searched: nothing on it costs less than {in_unit(weighing.least, row)}"
        try:
            choice = weighing.searched(row, below)
        except NothingBelow as nothing:
            self._bounds.append(min(nothing.bound, below))
            return f"has no cheaper plan: nothing on it costs less than {in_unit(nothing.bound, row)}"
        except OverBudget as over:
            self._errors.append((weighing.mesh, over))
            self._bounds.append(over.bound)
            return f"has no plan that fits: the one that holds least holds {in_bytes(over.least_bytes)}"
        except PlanError as error:
            self._errors.append((weighing.mesh, error))
            self._bounds += [weighing.least] if isinstance(error, TooWide) else []
            return f"has no plan: {str(error).splitlines()[0]}"
        self._bounds += [] if choice.bound is None else [choice.bound]
        self._take(choice, weighing)
        return f"costs {in_unit(choice.cost or 0.0, row)}"

    def _least(self) -> float:
        return math.inf if self._best is None else self._best.cost or 0.0

    def _take(self, choice: Choice, weighing: Weighing) -> None:
        if (choice.cost or 0.0) < self._least():
            self._best, self._price = weighing.plan(choice), choice.price

    def _is_too_wide(self) -> bool:
        return self._best is None and all(isinstance(error, TooWide) for _, error in self._errors)

    def found(self) -> Plan:
        """The plan that costs least of all that were found.

        Raises:
            PlanError: where there is none.
        """
        if self._best is not None:
            several = tuple(self._said) if len(self._said) > 1 else ()
            return replace(self._best, bound=self._best.bound and min(self._bounds), considered=several)
        errors = [error for _, error in self._errors]
        if over := [error for error in errors if isinstance(error, OverBudget)]:
            raise min(over, key=lambda error: error.least_bytes)
        for error in errors:
            if isinstance(error, StrategyError):
                raise error
        mesh, error = self._errors[-1]
        raise PlanError(f"no plan was found on the mesh {mesh}: {error}; try fewer axes, as in mesh='dp=4,tp=2'")


def _plan(graph: RuledGraph, mesh: Mesh, request: PlanRequest, choice: Choice, outputs: Mapping[str, Layout]) -> Plan:
    method = request.searched or "none"
    return Plan(
        graph,
        mesh,
        request.mesh,
        request.mode,
        method,
        choice.strategies,
        choice.leaves,
        outputs,
        choice.cost,
        choice.bound,
        request.optimizer,
        request.memory,
        choice.again,
        hardware=request.hardware,
        recomputed=choice.recomputed,
    )


class Weighing:
    """What choices hold and cost on a mesh, all of it."""

    def __init__(self, mesh: Mesh, request: PlanRequest, space: Space, objective: Objective) -> None:
        self.mesh, self._request, self._space, self._objective = mesh, request, space, objective
        self._last: list[Plan] = []
        self.price = 0.0
        """Of a byte, at which the plan was found that is to be beaten; 0 where there is none."""

    @cached_property
    def least(self) -> float:
        """What the operators alone cost at least."""
        return least_cost(self._space, self.known)

    @cached_property
    def known(self) -> Known:
        """What searches have worked out here, for those that follow."""
        return Known(self._space.graph, self._objective, self.mesh)

    def forget(self) -> None:
        """Leave what was worked out for searches, which takes more memory than all else, once these were made."""
        self._last = []
        self.__dict__.pop("known", None)

    def budget(self) -> Budget | None:
        """What a device may hold; None where that is not limited."""
        request = self._request
        if request.memory is None:
            return None
        return Budget(
            request.memory,
            request.optimizer,
            lambda choice: self.plan(choice).held.total,
            lambda choice, bound: self.refusal([choice], bound),
            self.settle,
            self.fewest,
            self.price,
            once=bool(self.price),
        )

    def first(self, row: Search, below: float = math.inf, *, divides: bool = False) -> Choice:
        """What the search finds; with ``divides`` it looks closer where a budget leaves a gap.

        Raises:
            NothingBelow: where no choice was found that costs less than ``below``.
            PlanError: where there is none at all, or none that fits.
        """
        budget, below = self.budget(), math.inf if row.by_axes else below
        budget = budget and replace(budget, divides=divides)
        choice = (recursive if row.by_axes else search)(self._space, self._objective, budget, below, self.known)
        return choice if budget else self.settle(choice)

    def searched(self, row: Search, below: float) -> Choice:
        """The same; what is known beside it, where it leaves a gap or finds nothing that fits; raises what it does."""
        try:
            choice = self.first(row, below, divides=True)
        except OverBudget as over:
            return in_any_parts(self._space, row, self._request, self, over)
        return or_known(choice, self._space, row, self._request, self)

    def refusal(self, choices: Sequence[Choice], bound: float) -> OverBudget:
        """What is raised where none of these fits, not even with all blocks computed again."""
        plans = [self.plan(choice) for choice in choices]
        plans += [plan.computing_again({block.name for block in self._space.blocks}) for plan in plans]
        least = min(plans, key=lambda plan: plan.held.total)
        return OverBudget(_too_much(least), least.held.total, bound)

    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice; what follows from decisions is worked out once for those that were asked for last."""
        for plan in self._last:
            if (plan.again, plan.leaves, plan.strategies) == (choice.again, choice.leaves, choice.strategies):
                found = plan if plan.recomputed == choice.recomputed else plan.computing_again(choice.recomputed)
                return found.costing(choice.cost, choice.bound)
        found = _plan(self._space.graph, self.mesh, self._request, choice, self._space.outputs)
        self._last = [found, *self._last[: LAST - 1]]
        return found

    def settle(self, choice: Choice) -> Choice:
        """The same with the blocks that the request names computed again, and with all that the backward does again."""
        choice = replace(choice, recomputed=choice.recomputed | self._space.demanded)
        if choice.cost is None or not (choice.recomputed or choice.again):
            return choice
        plan = self.plan(choice)
        repeated = sum(repeated_costs(plan, self._objective).values()) if choice.recomputed else 0.0
        return replace(choice, cost=choice.cost + repeated + gathered_again(plan, self._objective))

    def within(self, choice: Choice) -> Choice | None:
        """The same where it fits, with as few more blocks computed again as that takes; None where it never does."""
        choice, limit = self.settle(choice), self._request.memory
        if limit is None or self.plan(choice).held.total <= limit:
            return choice
        return self.fewest(choice, limit)

    def fewest(self, choice: Choice, limit: int) -> Choice | None:
        """The same with the fewest blocks computed again with which it holds no more; None where it always does.

        Those that save most come first.
        """
        demanded = self._space.demanded
        everything = self.plan(choice).computing_again({block.name for block in self._space.blocks})
        costs, sizes = repeated_costs(everything, self._objective), everything.holding.remade(everything)
        names = [name for name in costs if name not in demanded and sizes[name]]
        names.sort(key=lambda name: costs[name] / sizes[name])

        def fits(count: int) -> bool:
            return everything.computing_again(demanded.union(names[:count])).held.total <= limit

        count = bisect_left(range(len(names)), True, key=fits)
        if not fits(count):
            return None
        recomputed = demanded.union(names[:count])
        once = (choice.cost or 0.0) - sum(costs[name] for name in choice.recomputed)
        once -= gathered_again(self.plan(choice), self._objective)
        again = gathered_again(everything.computing_again(recomputed), self._objective)
        return replace(choice, recomputed=recomputed, cost=once + sum(costs[name] for name in recomputed) + again)


def _refuse_what_cannot_fit(graph: RuledGraph, request: PlanRequest) -> None:
    """Refuse, before a search, what no plan can hold: parameters cut over all devices, their gradients and states."""
    devices, parameters = request.mesh.size, graph.capture.of_kind("parameter")
    trained = sum(value.bytes for value in parameters if value.needs_gradient)
    kinds = sum(value.bytes for value in parameters), trained, request.optimizer.bytes_for(trained)
    floor, each = sum(kinds), [in_bytes(size / devices) for size in kinds]
    if request.memory is not None and floor > devices * request.memory:
        raise OverBudget(
            f"no plan was found under which a device holds {in_bytes(request.memory)} or less, and there is none: "
            f"however they are split, the parameters ({each[0]}), their gradients ({each[1]}) and the states of "
            f"{request.optimizer.name} ({each[2]}) take {in_bytes(floor / devices)} on each of {devices} devices, and "
            f"a step keeps more; type a larger memory= (--memory), at least {-(-floor // request.memory)} devices, a "
            "smaller dtype, or an optimizer that keeps less"
        )


def _too_much(plan: Plan) -> str:
    """What is said of a plan that holds more than it may, none that was found holding less."""
    enough = typed_bytes(plan.held.total)
    return (
        f"no plan was found under which a device holds {in_bytes(plan.memory or 0)} or less: on the mesh {plan.mesh}, "
        f"mode {plan.mode}, the one that holds least holds {holds(plan, plan.held)}; type memory='{enough}' "
        f"(--memory {enough}) or more, more devices, a smaller batch, or an optimizer that keeps less"
    )


def _following_the_batch(graph: RuledGraph, request: PlanRequest) -> Plan:
    """The plan without a search.

    It takes one axis, which cuts a batch that does not divide as loaders do: ceil-sized parts first; unless the slices
    of the inputs are asked for, which may need several.
    """
    one_axis = Mesh.of(ranks=request.mesh.size).without_ones()
    mesh = request.axes or (request.mesh.atomic() if isinstance(request.inputs, Mapping) else one_axis)
    inputs = request.inputs if MODES[request.mode].splits else "whole"
    # A rank without rows keeps its place: the batch is cut over all of them, however few rows there are.
    leaves = fixed_leaves(graph.capture, mesh, inputs, request.storage, every_rank=True)
    outputs = output_layouts(graph.capture, mesh, leaves)
    space = Space(graph, mesh, {}, {}, outputs, *blocks_for(graph, request))
    weighing = Weighing(mesh, request, space, Seconds(request.hardware, request.optimizer))
    choice = weighing.settle(data_parallel(graph, mesh, leaves, outputs))
    plan = weighing.plan(choice)
    if request.memory is not None and plan.held.total > request.memory:
        if (within := weighing.fewest(choice, request.memory)) is not None:
            return weighing.plan(replace(within, cost=None))
        over = weighing.refusal([choice], 0.0)
        raise OverBudget(f"{over}; or mode='auto', which splits parameters too", over.least_bytes)
    return plan


def in_any_parts(space: Space, row: Search, request: PlanRequest, weighing: Weighing, over: OverBudget) -> Choice:
    """The best of the plans that are known by name which fits, where nothing did that a search has found.

    They store all parameters in parts that need not be even. A search stores so only matrices that it cannot cut evenly
    over all devices.

    Raises:
        OverBudget: where none fits: that of the search, or of one of these which holds less.
    """
    found, least = [], over
    for other in _known_by_name(space, request):
        with suppress(PlanError):  # impossible on this mesh
            if _allowed(other, space, request):
                priced = replace(other, cost=_cost(other, space, weighing.known))
                if (within := weighing.within(priced)) is not None:
                    found.append(within)
                else:
                    least = min(least, weighing.refusal([priced], over.bound), key=lambda error: error.least_bytes)
    if not found:
        raise least
    best = min(found, key=lambda choice: choice.cost or 0.0)
    return replace(best, bound=None if row.by_axes else min(over.bound, best.cost or 0.0))


def or_known(choice: Choice, space: Space, row: Search, request: PlanRequest, weighing: Weighing) -> Choice:
    """The choice, or the best of the others that may be taken, where a gap is left and one of them costs less."""
    if choice.cost is None or choice.bound is None or choice.bound >= choice.cost * (1 - EQUAL):
        return choice
    best = choice
    for find in _others(space, row, request, weighing, choice.price):
        least = best.cost or 0.0
        with suppress(PlanError):  # impossible on this mesh, too wide, or nothing cheaper
            other = find(least)
            if not _allowed(other, space, request) or (cost := _cost(other, space, weighing.known)) >= least:
                continue
            within = weighing.within(replace(other, cost=cost, price=choice.price))
            if within is not None and (within.cost or 0.0) < least:
                # What is stored in parts that the search has not may cost less than its bound.
                best = replace(within, bound=min(choice.bound, within.cost or 0.0))
    return best


def _known_by_name(space: Space, request: PlanRequest) -> Iterator[Choice]:
    """Data parallel, and fully sharded without and with a second gathering."""
    graph, mesh = space.graph, space.mesh
    data = data_parallel(graph, mesh, space.leaves, space.outputs)
    parts = {v.name: in_parts(v, mesh) for v in graph.capture.of_kind("parameter") if v.name not in request.storage}
    yield data
    yield replace(data, leaves={**data.leaves, **parts})
    yield replace(data, leaves={**data.leaves, **parts}, again=frozenset(parts))


def _itself(choice: Choice, below: float) -> Choice:
    return choice


def _others(
    space: Space, row: Search, request: PlanRequest, weighing: Weighing, price: float
) -> Iterator[Callable[[float], Choice]]:
    """Other ways to plan, each by what it is to cost less than: what is known by name, and what searches find.

    A budget had the search end at ``price`` for a byte, which is where searches for the same objective begin: many of
    them can find nothing that costs less.
    """
    graph, mesh, objective = space.graph, space.mesh, row.objective(request.hardware, request.optimizer)
    named = [*_known_by_name(space, request)]
    for of in named:
        yield partial(_itself, of)
    if (budget := weighing.budget()) is not None:
        budget = replace(budget, price=price, once=False, close=FAR)
    free = {value.name for value in graph.capture.of_kind("parameter")} - request.storage.keys()
    settled = replace(space, leaves={name: of for name, of in space.leaves.items() if name not in free})
    tensor = tensor_space(graph, mesh, named[0].strategies, settled)
    yield lambda below: search(tensor, objective, budget, below, weighing.known)
    if len(mesh.axes) > 1 and not row.by_axes:
        yield lambda below: recursive(space, objective, budget, below, weighing.known)
    if len(mesh.axes) <= FEW_AXES and (other := SEARCHES["propagation"]) is not row:
        yield lambda _: _found_by(other, space_of(graph, mesh, request, other), request)


def _found_by(row: Search, space: Space, request: PlanRequest) -> Choice:
    objective = row.objective(request.hardware, request.optimizer)
    budget = Weighing(space.mesh, request, space, objective).budget()
    return search(space, objective, budget and replace(budget, near=APART, close=FAR))


def _allowed(other: Choice, space: Space, request: PlanRequest) -> bool:
    """Whether pins, parts and what is stored already admit a choice."""
    values = space.graph.capture.values
    if any(strategy not in space.strategies[name] for name, strategy in other.strategies.items()):
        return False
    return all(
        layout in space.leaves[name] or (values[name].kind == "parameter" and name not in request.storage)
        for name, layout in other.leaves.items()
    )


def _cost(other: Choice, space: Space, known: Known) -> float:
    """What a choice costs, without what the backward does again."""
    strategies = {name: known.alone(strategy) for name, strategy in other.strategies.items()}
    leaves = {name: known.alone(layout) for name, layout in other.leaves.items()}
    only = replace(space, strategies=strategies, leaves=leaves, blocks=())
    return Problem(only, known, set(other.strategies)).solved()[0]
