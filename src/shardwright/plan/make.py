"""From a capture and a request to a plan.

Where the mode searches nothing, every operator follows the split of the batch (`data.py`). Else the row of the search
says which strategies are choices and what is minimised over them (`searches.py`); `search.py` finds the minimum, and
`recursive.py` what is the best axis by axis.

An exact search leaves a gap where a budget of bytes binds, or where too much is tied together for a proof.
Another way to plan may then be better by chance, unless each is looked at: the plans that are known by name, and those
of the other searches. The bound stays that of the search.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from shardwright.errors import PlanError, StrategyError
from shardwright.graph.ir import Capture
from shardwright.mesh.layout import Layout
from shardwright.mesh.mesh import Mesh
from shardwright.plan.boundary import fixed_leaves, output_layouts
from shardwright.plan.decisions import Decisions
from shardwright.plan.explain import holds, in_bytes, in_unit
from shardwright.plan.holding import remade_memory
from shardwright.plan.plan import Plan
from shardwright.plan.prices import repeated_costs
from shardwright.plan.pricing.cost import Objective, Seconds
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.plan.request import PlanRequest
from shardwright.plan.searches import MODES, SEARCHES, Search
from shardwright.plan.searching.budget import Budget, OverBudget
from shardwright.plan.searching.data import data_parallel
from shardwright.plan.searching.exact import TooWide
from shardwright.plan.searching.known import Known
from shardwright.plan.searching.problem import Problem
from shardwright.plan.searching.recursive import recursive
from shardwright.plan.searching.search import least_cost, search
from shardwright.plan.searching.space import FEW_AXES, Choice, Space
from shardwright.plan.spaces import blocks_for, in_parts, meshes_for, space_of, tensor_space

# A gap of such a share is none. For graphs of more operators, or on more axes, tensor parallelism and the recursive
# search are asked where it is larger than the second, and propagation, which takes as long as the search, is not.
EQUAL, CLOSE, FEW_OPERATORS = 1e-9, 1e-4, 400


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
    most_axes = row.most_axes
    considered: list[str] = []
    while True:
        meshes = (request.axes,) if request.axes else meshes_for(graph, request, most_axes)
        try:
            return _cheapest(graph, request, row, meshes, considered)
        except (OverBudget, StrategyError):
            raise
        except PlanError as error:
            # A table over fewer axes is smaller, unless pins, the storage or the inputs name the axes that there are.
            named = len(meshes[0].axes) > most_axes or request.storage or isinstance(request.inputs, Mapping)
            if not isinstance(error, TooWide) or most_axes == 1 or named:
                text = f"no plan was found on the mesh {meshes[0]}: {error}; try fewer axes, as in mesh='dp=4,tp=2'"
                raise PlanError(text) from None
        most_axes -= 1


def _cheapest(
    graph: RuledGraph, request: PlanRequest, row: Search, meshes: Sequence[Mesh], considered: list[str]
) -> Plan:
    """The plan of the mesh whose plan costs least; what is said of each goes to ``considered``."""
    best: Plan | None = None
    first: PlanError | None = None
    for mesh in meshes:
        space, objective = space_of(graph, mesh, request, row), row.objective(request.hardware, request.optimizer)
        if best is not None and (least := least_cost(space, objective)) >= (best.cost or 0.0):
            considered.append(f"{mesh} not searched: nothing on it costs less than {in_unit(least, row)}")
            continue
        find = recursive if row.by_axes else search
        weighing = Weighing(mesh, request, space, objective)
        try:
            budget = weighing.budget()
            choice = find(space, objective, budget)
            choice = or_known(choice if budget else weighing.settle(choice), space, row, request, weighing)
        except PlanError as error:
            first = first or error
            considered.append(f"{mesh} has no plan: {str(error).splitlines()[0]}")
            continue
        considered.append(f"{mesh} costs {in_unit(choice.cost or 0.0, row)}")
        if best is None or (choice.cost or 0.0) < (best.cost or 0.0):
            best = weighing.plan(choice)
    if best is None:
        raise first or PlanError("there is no mesh")
    return replace(best, considered=tuple(considered) if len(considered) > 1 else ())


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
        self._mesh, self._request, self._space, self._objective = mesh, request, space, objective

    def budget(self) -> Budget | None:
        """What a device may hold; None where that is not limited."""
        request = self._request
        if request.memory is None:
            return None
        return Budget(
            request.memory,
            request.optimizer,
            lambda choice: self.plan(choice).held.total,
            lambda choice: _too_much(self.plan(choice)),
            self.settle,
            self.fewest,
        )

    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice."""
        return _plan(self._space.graph, self._mesh, self._request, choice, self._space.outputs)

    def settle(self, choice: Choice) -> Choice:
        """The same with the blocks that the request names computed again, and with what that costs."""
        choice = replace(choice, recomputed=choice.recomputed | self._space.demanded)
        if choice.cost is None or not choice.recomputed:
            return choice
        return replace(choice, cost=choice.cost + sum(repeated_costs(self.plan(choice), self._objective).values()))

    def within(self, choice: Choice) -> Choice | None:
        """The same where it fits, with as few more blocks computed again as that takes; None where it never does."""
        choice, limit = self.settle(choice), self._request.memory
        if limit is None or self.plan(choice).held.total <= limit:
            return choice
        return self.fewest(choice)

    def fewest(self, choice: Choice) -> Choice | None:
        """The same with the fewest blocks computed again with which it fits; those that save most come first."""
        limit, demanded = self._request.memory or 0, self._space.demanded
        everything = self.plan(choice).computing_again({block.name for block in self._space.blocks})
        costs, sizes = repeated_costs(everything, self._objective), remade_memory(everything)
        names = [name for name in costs if name not in demanded and sizes[name]]
        names.sort(key=lambda name: costs[name] / sizes[name])

        def fits(count: int) -> bool:
            return everything.computing_again(demanded.union(names[:count])).held.total <= limit

        count = bisect_left(range(len(names)), True, key=fits)
        if not fits(count):
            return None
        recomputed = demanded.union(names[:count])
        kept = (choice.cost or 0.0) - sum(costs[name] for name in choice.recomputed)
        return replace(choice, recomputed=recomputed, cost=kept + sum(costs[name] for name in recomputed))


def _too_much(plan: Plan) -> str:
    """What is said of a plan that holds more than it may, none that was found holding less."""
    return (
        f"no plan was found under which a device holds {in_bytes(plan.memory or 0)} or less: on the mesh {plan.mesh}, "
        f"mode {plan.mode}, the one that holds least holds {holds(plan, plan.held)}; type a larger memory=, more "
        "devices, a smaller batch, or an optimizer that keeps less"
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
        if (within := weighing.fewest(choice)) is not None:
            return weighing.plan(replace(within, cost=None))
        raise OverBudget(f"{_too_much(plan)}; or mode='auto', which splits parameters too")
    return plan


def or_known(choice: Choice, space: Space, row: Search, request: PlanRequest, weighing: Weighing) -> Choice:
    """The choice, or the best of the others that may be taken, where a gap is left and one of them costs less."""
    if choice.cost is None or choice.bound is None or choice.bound >= choice.cost * (1 - EQUAL):
        return choice
    best, objective = choice, row.objective(request.hardware, request.optimizer)
    known = Known(space.graph, objective, space.mesh)
    few = len(space.graph.capture.nodes) <= FEW_OPERATORS and len(space.mesh.axes) <= FEW_AXES
    asked = few or choice.cost - choice.bound > CLOSE * choice.cost
    searched = _of_searches(space, row, request, weighing.budget(), few) if asked else ()
    for other in itertools.chain(_known_by_name(space, request), searched):
        if not _allowed(other, space, request):
            continue
        try:
            within = weighing.within(replace(other, cost=_cost(other, space, known), bound=choice.bound))
        except PlanError:  # impossible on this mesh
            continue
        if within is not None and (within.cost or 0.0) < (best.cost or 0.0):
            best = within
    return best


def _known_by_name(space: Space, request: PlanRequest) -> Iterator[Choice]:
    """Data parallel, and fully sharded without and with a second gathering."""
    graph, mesh = space.graph, space.mesh
    data = data_parallel(graph, mesh, space.leaves, space.outputs)
    parts = {v.name: in_parts(v, mesh) for v in graph.capture.of_kind("parameter") if v.name not in request.storage}
    yield data
    yield replace(data, leaves={**data.leaves, **parts})
    yield replace(data, leaves={**data.leaves, **parts}, again=frozenset(parts))


def _of_searches(space: Space, row: Search, request: PlanRequest, budget: Budget | None, few: bool) -> Iterator[Choice]:
    """Tensor parallel, and what other searches find."""
    graph, mesh, objective = space.graph, space.mesh, row.objective(request.hardware, request.optimizer)
    free = {value.name for value in graph.capture.of_kind("parameter")} - request.storage.keys()
    settled = replace(space, leaves={name: of for name, of in space.leaves.items() if name not in free})
    following = data_parallel(graph, mesh, space.leaves, space.outputs).strategies
    tensor = tensor_space(graph, mesh, following, settled)
    searches: list[Callable[[], Choice]] = [partial(search, tensor, objective, budget)]
    if not row.by_axes:
        searches.append(partial(recursive, space, objective, budget))
    if few and (other := SEARCHES["propagation"]) is not row:
        searches.append(
            lambda: search(
                space_of(graph, mesh, request, other), other.objective(request.hardware, request.optimizer), budget
            )
        )
    for find in searches:
        with suppress(PlanError):
            yield find()


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
    """What a choice costs, with what the backward gathers again."""
    only = replace(
        space,
        strategies={name: (strategy,) for name, strategy in other.strategies.items()},
        leaves={name: (layout,) for name, layout in other.leaves.items()},
    )
    cost = Problem(only, known, set(other.strategies)).solved()[0]
    return cost + (_gathered_again(other, space, known.objective) if other.again else 0.0)


def _gathered_again(other: Choice, space: Space, objective: Objective) -> float:
    values, mesh = space.graph.capture.values, space.mesh
    decided = (other.strategies, other.leaves, space.outputs)
    plan = Decisions(space.graph, mesh, mesh, "auto", "none", *decided, again=other.again, recomputed=other.recomputed)
    again = [(transfer, plan.gathers_again(transfer)) for transfer in plan.transfers if transfer.value in other.again]
    return sum(
        times * objective.transfer(replace(values[transfer.value], needs_gradient=False), transfer.steps, mesh)
        for transfer, times in again
        if times
    )
