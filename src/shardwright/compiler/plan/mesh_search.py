"""The search on one mesh, within a memory limit: the cost and memory of choices, and alternatives where a gap is left.

An exact search leaves a gap where a memory limit binds, or where too much is tied together for a proof. Another way to
plan may then be better by chance, unless each is tried: the baselines (data parallel, tensor parallel, fully sharded)
and the other searches. The bound stays that of the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial

from shardwright.common.stages import in_stage, stage
from shardwright.common.words import in_bytes, typed_bytes
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.decisions import Transfer
from shardwright.compiler.plan.device_memory import DeviceMemory
from shardwright.compiler.plan.plan import Plan, plan_of
from shardwright.compiler.plan.pricing.cost import Objective
from shardwright.compiler.plan.pricing.memory import local_bytes
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.budget import Budget
from shardwright.compiler.plan.search.choices import FEW_AXES, Choice, OverBudget, Space, casting_shards, data_parallel
from shardwright.compiler.plan.search.problem import CostCache, Problem
from shardwright.compiler.plan.search.recursive import recursive
from shardwright.compiler.plan.search.search import PreparedSearch, least_cost, search
from shardwright.compiler.plan.searches import SEARCHES, Search
from shardwright.compiler.plan.spaces import in_parts, space_of, tensor_space
from shardwright.compiler.plan.text import held_by_kind
from shardwright.compiler.plan.timing.prices import gathered_again, repeated_costs
from shardwright.errors import PlanError

LAST = 8  # plans whose decisions may be asked about again
SOON = 4  # times that a number of blocks is looked for where the sizes of these say that it is


class MeshSearch:
    """The search on one mesh: its space, and the cost and memory of the choices there."""

    def __init__(
        self, mesh: Mesh, request: PlanRequest, space: Space, objective: Objective, known: CostCache | None = None
    ) -> None:
        self.mesh, self.request, self.space, self._objective = mesh, request, space, objective
        self.known = known or CostCache(space.graph, objective, mesh)
        """The costs that searches on this mesh have worked out."""
        self._last: list[Plan] = []
        self._last_repeated: list[tuple[Sequence[Transfer], Mapping[str, float]]] = []
        self._sizes: dict[Hashable, int] = {}  # Cached by shape, dtype and layout, which on one mesh say all
        self.price: float | None = None
        """Of a byte, at which the plan was found that is to be beaten; None where any may be tried."""
        self.promise = math.inf
        """What the bound on this mesh must be below for it to be searched further than that."""
        self.asks_others = True
        """Whether other searches may be asked for what costs less, where a gap is left."""

    @cached_property
    def least(self) -> float:
        """The least cost of the operators alone.

        Cached, as all of this class: the request, the space and the objective stay the same; `forget` drops what is
        large.
        """
        return least_cost(self.space, self.known)

    @cached_property
    def built(self) -> PreparedSearch:
        """The prepared search of all choices, which others share."""
        return PreparedSearch(self.space, self._objective, self.known)

    def forget(self) -> None:
        """Leave what was worked out for searches, which takes more memory than all else, once these were made."""
        self._last, self._last_repeated = [], []
        self.known = CostCache(self.space.graph, self._objective, self.mesh)
        self.__dict__.pop("built", None)

    def budget(self) -> Budget | None:
        """Return the memory budget of a device; None where it is not limited."""
        request = self.request
        if request.memory is None:
            return None
        return Budget(
            request.memory,
            request.optimizer,
            self._held,
            lambda choice, bound: self.refusal([choice], bound),
            self.settle,
            self.fewest,
            self.price or 0.0,
            once=self.price is not None,
            promise=self.promise,
        )

    def first(
        self, row: Search, below: float = math.inf, alternatives: Callable[[Choice], Choice] | None = None
    ) -> Choice:
        """Return the choice that the search finds; with ``alternatives`` it branches where a budget leaves a gap.

        Raises:
            NothingBelow: where no choice was found that costs less than ``below``.
            PlanError: where there is none at all, or none that fits.
        """
        budget, below = self.budget(), math.inf if row.by_axes else below
        budget = budget and replace(budget, alternatives=alternatives)
        if row.by_axes:
            choice = recursive(self.space, self._objective, budget, below, self.known)
        else:
            choice = search(self.space, self._objective, budget, below, self.known, self.built)
        return choice if budget else self.settle(choice)

    def refusal(self, choices: Sequence[Choice], bound: float) -> OverBudget:
        """Return the error where none of these choices fits, not even with all blocks recomputed."""
        demanded = self.space.demanded
        plans = [self.plan(replace(choice, recomputed=choice.recomputed | demanded)) for choice in choices]
        plans += [self._everything_again(plan) for plan in plans]
        least = min(plans, key=lambda plan: plan.held.total)
        return OverBudget(_too_much(least), least.held.total, bound)

    @in_stage("pricing")
    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice; what follows from decisions is worked out once for those that were asked for last."""
        strategies = casting_shards(self.space.graph, self.mesh, choice.strategies, choice.leaves)
        for plan in self._last:
            if (plan.leaves, plan.strategies) == (choice.leaves, strategies):
                same = (plan.again, plan.recomputed) == (choice.again, choice.recomputed)
                found = plan if same else plan.computing_again(choice.recomputed, choice.again)
                return found.costing(choice.cost, choice.bound)
        found = plan_of(self.space, self.request, choice)
        self._last = [found, *self._last[: LAST - 1]]
        return found

    @in_stage("pricing")
    def _held(self, choice: Choice) -> int:
        return self.plan(choice).held.total

    @in_stage("pricing")
    def settle(self, choice: Choice) -> Choice:
        """Return the plan with the named blocks recomputed, and with all that the backward does again."""
        choice = replace(choice, recomputed=choice.recomputed | self.space.demanded)
        if choice.cost is None or not (choice.recomputed or choice.again):
            return choice
        plan = self.plan(choice)
        costs = self._repeated_costs(plan) if choice.recomputed else {}
        repeated = sum(costs[name] for name in sorted(choice.recomputed))
        return replace(choice, cost=choice.cost + repeated + gathered_again(plan, self._objective))

    def _repeated_costs(self, plan: Plan) -> Mapping[str, float]:
        """Return the cost of recomputing each block, by its name, whichever others are recomputed."""
        known = [costs for of, costs in self._last_repeated if of is plan.transfers]
        if known:
            return known[0]
        found = repeated_costs(self._everything_again(plan), self._objective)
        self._last_repeated = [(plan.transfers, found), *self._last_repeated[: LAST - 1]]
        return found

    def _everything_again(self, plan: Plan) -> Plan:
        return plan.computing_again({block.name for block in self.space.blocks})

    def within(self, choice: Choice) -> Choice | None:
        """Return the plan where it fits, with as few more blocks recomputed as that takes; None where it never does."""
        limit = self.request.memory
        if limit is not None and self._of_leaves(choice) > limit:
            return None
        choice = self.settle(choice)
        if limit is None or self.plan(choice).held.total <= limit:
            return choice
        return self.fewest(choice, limit)

    def _of_leaves(self, choice: Choice) -> int:
        """Return the bytes of leaves, gradients and optimizer states: a lower bound of all that is held."""
        total, values = 0, self.space.graph.capture.values
        for name, layout in choice.leaves.items():
            key = values[name].shape, values[name].dtype, layout
            if key not in self._sizes:
                self._sizes[key] = local_bytes(values[name], layout, self.mesh)
            size = self._sizes[key]
            trained = values[name].kind == "parameter" and values[name].needs_gradient
            total += 2 * size + self.request.optimizer.bytes_for(size) if trained else size
        return total

    @in_stage("pricing")
    def fewest(self, choice: Choice, limit: int) -> Choice | None:
        """Return the plan with the fewest recomputed blocks with which it holds no more; None where it always does.

        Those that save most come first.
        """
        if self._of_leaves(choice) > limit:
            return None
        demanded = self.space.demanded
        everything = self._everything_again(self.plan(choice))
        costs, sizes = self._repeated_costs(everything), everything.memory_model.remade(everything)
        names = [name for name in costs if name not in demanded and sizes[name]]
        names.sort(key=lambda name: costs[name] / sizes[name])

        @cache
        def held(count: int) -> int:
            """Return what is held where so many blocks are computed again.

            Cached for this call alone, in which all but the count stays the same.
            """
            return everything.computing_again(demanded.union(names[:count])).held.total

        if held(len(names)) > limit:
            return None
        count = _first_within(limit, held, [sizes[name] for name in names])
        recomputed = demanded.union(names[:count])
        once = (choice.cost or 0.0) - sum(costs[name] for name in choice.recomputed)
        once -= gathered_again(self.plan(choice), self._objective)
        again = gathered_again(everything.computing_again(recomputed), self._objective)
        return replace(choice, recomputed=recomputed, cost=once + sum(costs[name] for name in recomputed) + again)


def _first_within(limit: int, held: Callable[[int], int], sizes: Sequence[int]) -> int:
    """Return the least number of recomputed blocks with which no more than the limit is held.

    Each of them saves nearly its size: it is looked for where these say that it is, by what was held the last time; if
    that is not soon enough, in the middle.
    """
    low, high, looked = 0, len(sizes), 0
    at, over = high, held(high) - limit
    while low < high:
        while over > 0 and at < high:
            over -= sizes[at]
            at += 1
        while at > low and over + sizes[at - 1] <= 0:
            at -= 1
            over += sizes[at]
        at = min(at, high - 1) if looked < SOON else (low + high) // 2
        over, looked = held(at) - limit, looked + 1
        low, high = (low, at) if over <= 0 else (at + 1, high)
    return high


def _too_much(plan: Plan) -> str:
    """Return the refusal of a plan that holds too much, where none that was found holds less."""
    enough, limit = typed_bytes(plan.held.total), plan.memory or 0
    return (
        f"no plan was found under which a device holds {in_bytes(limit)} or less: on the mesh {plan.mesh}, "
        f"mode {plan.mode}, the one that holds least holds {held_by_kind(plan, plan.held)}, "
        f"{in_bytes(plan.held.total - limit)} too much: {_part_too_large(plan.held, limit)}; type memory='{enough}' "
        f"(--memory {enough}) or more, more devices, a smaller batch, or an optimizer that keeps less"
    )


def _part_too_large(held: DeviceMemory, limit: int) -> str:
    """Return which part of what is held does not fit beside those before it."""
    fixed = held.parameters + held.gradients + held.optimizer + held.buffers + held.inputs
    if fixed > limit:
        return f"parameters, gradients, optimizer states, buffers and inputs alone are {in_bytes(fixed)}"
    if fixed + held.activations + held.recomputed > limit:
        return (
            f"what the backward needs is {in_bytes(held.activations + held.recomputed)}, and parameters, gradients, "
            f"optimizer states, buffers and inputs leave {in_bytes(limit - fixed)} for it"
        )
    left = limit - fixed - held.activations - held.recomputed
    name, size = "buffers of collectives are", held.communication
    if size <= left:
        left -= size
        name, size = "gradients of activations and other transient tensors take", held.transient
    return f"{name} {in_bytes(size)}, and all else leaves {in_bytes(left)} for them"


# A gap of such a share is none. On more than few axes propagation, which takes as long as the search, is not asked:
# what it may choose is searched by itself there, and for seconds.
EQUAL, NEARLY_EQUAL = 1e-9, 1e-3
# A gap of another way to plan that is worth no further price of a byte; how far prices are apart where that minimises
# something else; and a gap that is worth no other search where something is hidden.
FAR, APART, FAR_HIDING = 1e-2, 5e-2, 2e-2


def search_mesh(on_mesh: MeshSearch, row: Search, below: float) -> Choice:
    """Search a mesh; try alternatives where the search leaves a gap or finds nothing that fits.

    Raises:
        NothingBelow: where no choice was found that costs less than ``below``.
        PlanError: where there is none at all, or none that fits.
    """
    asked = False

    def or_better(choice: Choice) -> Choice:
        nonlocal asked
        asked = True
        return or_alternative(choice, row, on_mesh)

    try:
        choice = on_mesh.first(row, below, or_better)
    except OverBudget as over:
        return best_baseline(on_mesh, row, over)
    return choice if asked else or_better(choice)


def best_baseline(on_mesh: MeshSearch, row: Search, over: OverBudget) -> Choice:
    """The best of the plans that are known by name which fits, where nothing did that a search has found.

    They store all parameters in parts that need not be even. A search stores so only matrices that it cannot cut evenly
    over all devices. Where nothing fits because of transient tensors, which the search does not count, the other
    searches are tried, too.

    Raises:
        OverBudget: where none fits: that of the search, or of one of these which holds less.
    """
    space, request = on_mesh.space, on_mesh.request
    found, least = [], over
    named = (partial(_itself, of) for of in _known_by_name(space, request))
    for find in _others(row, on_mesh, on_mesh.price or 0.0) if over.by_transient else named:
        with suppress(PlanError):  # impossible on this mesh, too wide, or nothing fits
            other = find(math.inf)
            if _allowed(other, space, request):
                priced = replace(other, cost=_cost(other, space, on_mesh.known))
                if (within := on_mesh.within(priced)) is not None:
                    found.append(within)
                else:
                    least = min(least, on_mesh.refusal([priced], over.bound), key=lambda error: error.least_bytes)
    if not found:
        raise least
    best = min(found, key=lambda choice: choice.cost or 0.0)
    return replace(best, bound=None if row.by_axes else min(over.bound, best.cost or 0.0))


@in_stage("alternatives")
def or_alternative(choice: Choice, row: Search, on_mesh: MeshSearch) -> Choice:
    """The choice, or the best of the others that may be taken, where a gap is left and one of them costs less."""
    # Where something is hidden, what is minimised is no more than near to what a step takes.
    gap, worth = (NEARLY_EQUAL, FAR_HIDING) if on_mesh.request.hardware.hides_gradients else (EQUAL, EQUAL)
    if choice.cost is None or choice.bound is None or choice.bound >= choice.cost * (1 - gap):
        return choice
    best, space, request = choice, on_mesh.space, on_mesh.request
    searches = on_mesh.asks_others and choice.bound < choice.cost * (1 - worth)
    costs: dict[tuple[int, int], float] = {}  # by what was decided: what is gathered again does not count here
    held: list[Choice] = []  # so that no identity is given to another object
    for find in _others(row, on_mesh, choice.price, searches=searches):
        least = best.cost or 0.0
        with suppress(PlanError):  # impossible on this mesh, too wide, or nothing cheaper
            with stage(search="alternative"):
                other = find(least)
            if not _allowed(other, space, request):
                continue
            held.append(other)
            decided = id(other.strategies), id(other.leaves)
            if decided not in costs:
                costs[decided] = _cost(other, space, on_mesh.known)
            if (cost := costs[decided]) >= least:
                continue
            within = on_mesh.within(replace(other, cost=cost, price=choice.price))
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


def _others(
    row: Search, on_mesh: MeshSearch, price: float, *, searches: bool = True
) -> Iterator[Callable[[float], Choice]]:
    """Other ways to plan, each by what it is to cost less than: what is known by name, and what ``searches`` find.

    A budget had the search end at ``price`` for a byte, which is where searches for the same objective begin: many of
    them can find nothing that costs less.
    """
    space, request = on_mesh.space, on_mesh.request
    graph, mesh, objective = space.graph, space.mesh, row.objective(request.hardware, request.optimizer)
    named = [*_known_by_name(space, request)]
    for of in named:
        yield partial(_itself, of)
    if not searches:
        return
    if (budget := on_mesh.budget()) is not None:
        budget = replace(budget, price=price, once=False, close=FAR)
    free = {value.name for value in graph.capture.of_kind("parameter")} - request.storage.keys()
    settled = replace(space, leaves={name: of for name, of in space.leaves.items() if name not in free})
    if mesh.axes:
        tensor = tensor_space(graph, mesh, named[0].strategies, settled)
        yield lambda below: search(tensor, objective, budget, below, on_mesh.known)
    if len(mesh.axes) > 1 and not row.by_axes:
        yield lambda below: recursive(space, objective, budget, below, on_mesh.known, on_mesh.built)
    if len(mesh.axes) <= FEW_AXES and (other := SEARCHES["propagation"]) is not row:
        yield lambda _: _found_by(other, space_of(graph, mesh, request, other), request)


def _found_by(row: Search, space: Space, request: PlanRequest) -> Choice:
    objective = row.objective(request.hardware, request.optimizer)
    budget = MeshSearch(space.mesh, request, space, objective).budget()
    return search(space, objective, budget and replace(budget, near=APART, close=FAR))


def _allowed(other: Choice, space: Space, request: PlanRequest) -> bool:
    """Return whether a choice agrees with pins, with uneven parts, and with what is stored already."""
    values = space.graph.capture.values
    options = {key: frozenset(of) for key, of in {id(of): of for of in space.strategies.values()}.items()}
    if any(strategy not in options[id(space.strategies[name])] for name, strategy in other.strategies.items()):
        return False
    return all(
        layout in space.leaves[name] or (values[name].kind == "parameter" and name not in request.storage)
        for name, layout in other.leaves.items()
    )


def _cost(other: Choice, space: Space, known: CostCache) -> float:
    """Return the cost of a choice, without what the backward repeats."""
    strategies = {name: known.alone(strategy) for name, strategy in other.strategies.items()}
    leaves = {name: known.alone(layout) for name, layout in other.leaves.items()}
    only = replace(space, strategies=strategies, leaves=leaves, blocks=())
    return Problem(only, known, set(other.strategies)).solved()[0]
