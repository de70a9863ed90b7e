"""Other ways to plan, where a search leaves a gap or finds nothing that fits.

An exact search leaves a gap where a budget of bytes binds, or where too much is tied together for a proof.
Another way to plan may then be better by chance, unless each is looked at: the plans that are known by name, and those
of the other searches. The bound stays that of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.searches import SEARCHES, Search
from shardwright.compiler.plan.searching.budget import OverBudget
from shardwright.compiler.plan.searching.data import data_parallel
from shardwright.compiler.plan.searching.known import Known
from shardwright.compiler.plan.searching.problem import Problem
from shardwright.compiler.plan.searching.recursive import recursive
from shardwright.compiler.plan.searching.search import search
from shardwright.compiler.plan.searching.space import FEW_AXES, Choice, Space
from shardwright.compiler.plan.spaces import in_parts, space_of, tensor_space
from shardwright.compiler.plan.weighing import Weighing
from shardwright.errors import PlanError

# A gap of such a share is none. On more than few axes propagation, which takes as long as the search, is not asked:
# what it may choose is searched by itself there, and for seconds.
EQUAL = 1e-9
# A gap of another way to plan that is worth no further price of a byte, and how far prices are apart where that
# minimises something else.
FAR, APART = 1e-2, 5e-2


def searched(weighing: Weighing, row: Search, below: float) -> Choice:
    """What a search finds; what is known beside it, where it leaves a gap or finds nothing that fits.

    Raises:
        NothingBelow: where no choice was found that costs less than ``below``.
        PlanError: where there is none at all, or none that fits.
    """
    asked = False

    def beside(choice: Choice) -> Choice:
        nonlocal asked
        asked = True
        return or_known(choice, row, weighing)

    try:
        choice = weighing.first(row, below, beside)
    except OverBudget as over:
        return in_any_parts(weighing, row, over)
    return choice if asked else beside(choice)


def in_any_parts(weighing: Weighing, row: Search, over: OverBudget) -> Choice:
    """The best of the plans that are known by name which fits, where nothing did that a search has found.

    They store all parameters in parts that need not be even. A search stores so only matrices that it cannot cut evenly
    over all devices.

    Raises:
        OverBudget: where none fits: that of the search, or of one of these which holds less.
    """
    space, request = weighing.space, weighing.request
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


def or_known(choice: Choice, row: Search, weighing: Weighing) -> Choice:
    """The choice, or the best of the others that may be taken, where a gap is left and one of them costs less."""
    if choice.cost is None or choice.bound is None or choice.bound >= choice.cost * (1 - EQUAL):
        return choice
    best, space, request = choice, weighing.space, weighing.request
    costs: dict[tuple[int, int], float] = {}  # by what was decided: what is gathered again does not count here
    held: list[Choice] = []  # so that no identity is given to another object
    for find in _others(row, weighing, choice.price):
        least = best.cost or 0.0
        with suppress(PlanError):  # impossible on this mesh, too wide, or nothing cheaper
            other = find(least)
            if not _allowed(other, space, request):
                continue
            held.append(other)
            decided = id(other.strategies), id(other.leaves)
            if decided not in costs:
                costs[decided] = _cost(other, space, weighing.known)
            if (cost := costs[decided]) >= least:
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
    sharded = replace(data, leaves={**data.leaves, **parts})
    yield data
    yield sharded
    yield replace(sharded, again=frozenset(parts))


def _itself(choice: Choice, below: float) -> Choice:
    return choice


def _others(row: Search, weighing: Weighing, price: float) -> Iterator[Callable[[float], Choice]]:
    """Other ways to plan, each by what it is to cost less than: what is known by name, and what searches find.

    A budget had the search end at ``price`` for a byte, which is where searches for the same objective begin: many of
    them can find nothing that costs less.
    """
    space, request = weighing.space, weighing.request
    graph, mesh, objective = space.graph, space.mesh, row.objective(request.hardware, request.optimizer)
    named = [*_known_by_name(space, request)]
    for of in named:
        yield partial(_itself, of)
    if (budget := weighing.budget()) is not None:
        budget = replace(budget, price=price, once=False, close=FAR)
    free = {value.name for value in graph.capture.of_kind("parameter")} - request.storage.keys()
    settled = replace(space, leaves={name: of for name, of in space.leaves.items() if name not in free})
    if mesh.axes:
        tensor = tensor_space(graph, mesh, named[0].strategies, settled)
        yield lambda below: search(tensor, objective, budget, below, weighing.known)
    if len(mesh.axes) > 1 and not row.by_axes:
        yield lambda below: recursive(space, objective, budget, below, weighing.known, weighing.built)
    if len(mesh.axes) <= FEW_AXES and (other := SEARCHES["propagation"]) is not row:
        yield lambda _: _found_by(other, space_of(graph, mesh, request, other), request)


def _found_by(row: Search, space: Space, request: PlanRequest) -> Choice:
    objective = row.objective(request.hardware, request.optimizer)
    budget = Weighing(space.mesh, request, space, objective).budget()
    return search(space, objective, budget and replace(budget, near=APART, close=FAR))


def _allowed(other: Choice, space: Space, request: PlanRequest) -> bool:
    """Whether pins, parts and what is stored already admit a choice."""
    values = space.graph.capture.values
    options = {key: frozenset(of) for key, of in {id(of): of for of in space.strategies.values()}.items()}
    if any(strategy not in options[id(space.strategies[name])] for name, strategy in other.strategies.items()):
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
