"""The search over meshes, few axes first, and over how much of the communication is hidden."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from shardwright.common.stages import in_stage, stage
from shardwright.common.words import in_bytes
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.mesh_search import EQUAL, MeshSearch, search_mesh
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.links import link_along
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import Choice, OverBudget
from shardwright.compiler.plan.search.exact import TooWide
from shardwright.compiler.plan.search.narrow import NothingBelow
from shardwright.compiler.plan.search.search import floor_of
from shardwright.compiler.plan.searches import SEARCHES, Search, SearchName
from shardwright.compiler.plan.spaces import meshes_for, space_of
from shardwright.compiler.plan.text import in_unit
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.errors import PlanError, StrategyError


def searched_plan(graph: RuledGraph, request: PlanRequest, search: SearchName) -> Plan:
    """Return the plan that costs least of those that a search finds.

    Where the hardware hides communication behind computing, several searches are made.
    """
    row = SEARCHES[search]
    objective = row.objective(request.hardware, request.optimizer)
    if isinstance(objective, Seconds) and request.hardware.hides_gradients:
        return cheapest_with_hidden(
            lambda of, below: Meshes(graph, request, replace(row, objective=lambda *_: of), below).found(),
            objective,
            objective.before_first(graph),
        )
    found = Meshes(graph, request, row).found()
    assert found.plan is not None
    return replace(found.plan, bound=found.bound, considered=found.considered)


P = TypeVar("P", bound=Decisions)


@dataclass(frozen=True)
class Found(Generic[P]):
    """The plan that costs least, where one costs less than what is known; what none costs less than; what was said."""

    plan: P | None
    bound: float | None
    considered: tuple[str, ...] = ()


class Meshes:
    """The meshes that are looked at for a plan that costs less than ``below``, which a plan does that is known."""

    def __init__(self, graph: RuledGraph, request: PlanRequest, row: Search, below: float = math.inf) -> None:
        self._graph, self._request, self._row, self._below = graph, request, row, below
        self._best: Plan | None = None
        self._bounds: list[float] = []  # of each mesh, where the search has one
        self._errors: list[tuple[Mesh, PlanError]] = []
        self._said: list[str] = []
        self._price = 0.0  # of a byte, at which the plan was found

    def search_on(self, mesh: Mesh) -> MeshSearch:
        """Return the search on a mesh."""
        request, row = self._request, self._row
        space = space_of(self._graph, mesh, request, row)
        found = MeshSearch(mesh, request, space, row.objective(request.hardware, request.optimizer))
        found.price = self._price
        return found

    def look(self) -> None:
        """Look at meshes of few axes, then at finer ones; where all tables would be too large, at coarser ones."""
        count = self._row.first_axes
        meshes = meshes_for(self._graph, self._request, count)
        few = [self.search_on(mesh) for mesh in meshes]
        self.look_at(few)
        # Unless pins, the storage or the inputs name the axes that there are.
        named = len(meshes[0].axes) > count or self._request.storage or isinstance(self._request.inputs, Mapping)
        if self._is_too_wide() and not named:
            while self._is_too_wide() and count > 1:
                count -= 1
                self.look_at([self.search_on(mesh) for mesh in meshes_for(self._graph, self._request, count)])
        else:
            self._look_closer(self._finer(meshes), min(of.least for of in few))

    def _look_closer(self, finer: Sequence[Mesh], least: float) -> None:
        """Look at finer meshes, that first on which operators may cost least."""
        on_meshes = {mesh: self._if_worth(mesh, least) for mesh in finer}
        worth = [of for of in on_meshes.values() if of is not None]
        self.look_at(sorted(worth, key=lambda of: of.least))
        idle = [mesh for mesh, of in on_meshes.items() if of is None]
        self._said += [f"{mesh} not searched: its axes have one link, and cut no more than fewer do" for mesh in idle]

    def _finer(self, meshes: Sequence[Mesh]) -> Sequence[Mesh]:
        """Those of more axes than these, unless the user has named several."""
        if len(self._request.mesh.without_ones().axes) > 1:
            return ()
        counts = range(self._row.first_axes + 1, self._row.most_axes + 1)
        found = dict.fromkeys(mesh for of in counts for mesh in meshes_for(self._graph, self._request, of))
        return [mesh for mesh in found if mesh not in meshes]

    def _if_worth(self, finer: Mesh, least: float) -> MeshSearch | None:
        """Return the search on a finer mesh; None where it cannot cost less.

        It can where links tell its axes apart, or where these split what the axes of coarser meshes do not.
        """
        per_host = self._request.hardware.ranks_per_host
        links = {link_along(finer, [axis], per_host) for axis in finer.names}
        if len(links) > 1:
            return self.search_on(finer)
        if self._floor >= least * (1 - EQUAL):
            return None
        on_mesh = self.search_on(finer)
        return on_mesh if on_mesh.least < least * (1 - EQUAL) else None

    @cached_property
    def _floor(self) -> float:
        """The cost that no plan is below on any mesh of these devices.

        Cached: the request and the graph are frozen.
        """
        request = self._request
        return floor_of(self._graph, self._row.objective(request.hardware, request.optimizer), request.mesh.size)

    def look_at(self, on_meshes: Sequence[MeshSearch]) -> None:
        """Search these meshes for what costs less than what was found."""
        for on_mesh in on_meshes:
            with stage(mesh=str(on_mesh.mesh)):
                self._said.append(f"{on_mesh.mesh} {self._searched(on_mesh)}")
            on_mesh.forget()

    def _searched(self, on_mesh: MeshSearch) -> str:
        """Search a mesh and return a line about it; a plan that costs less than the best so far takes its place."""
        row, below = self._row, self._least()
        if on_mesh.least >= below:
            return f"not searched: nothing on it costs less than {in_unit(on_mesh.least, row)}"
        try:
            choice = search_mesh(on_mesh, row, below)
        except NothingBelow as nothing:
            self._bounds.append(min(nothing.bound, below))
            return f"has no cheaper plan: nothing on it costs less than {in_unit(nothing.bound, row)}"
        except OverBudget as over:
            self._errors.append((on_mesh.mesh, over))
            self._bounds.append(over.bound)
            return f"has no plan that fits: the one that holds least holds {in_bytes(over.least_bytes)}"
        except PlanError as error:
            self._errors.append((on_mesh.mesh, error))
            self._bounds += [on_mesh.least] if isinstance(error, TooWide) else []
            return f"has no plan: {str(error).splitlines()[0]}"
        self._bounds += [] if choice.bound is None else [choice.bound]
        self._take(choice, on_mesh)
        return f"costs {in_unit(choice.cost or 0.0, row)}"

    def _least(self) -> float:
        return self._below if self._best is None else self._best.cost or 0.0

    def _take(self, choice: Choice, on_mesh: MeshSearch) -> None:
        if (choice.cost or 0.0) < self._least():
            self._best, self._price = on_mesh.plan(choice), choice.price

    def _is_too_wide(self) -> bool:
        nothing = self._best is None and bool(self._errors)
        return nothing and all(isinstance(error, TooWide) for _, error in self._errors)

    def found(self) -> Found[Plan]:
        """Search the mesh that was asked for, or all, for the plan that costs least.

        Raises:
            PlanError: where there is none, and none is known.
        """
        if self._request.axes:
            self.look_at([self.search_on(self._request.axes)])
        else:
            self.look()
        several = tuple(self._said) if len(self._said) > 1 else ()
        if self._best is not None:
            return Found(self._best, self._best.bound and min(self._bounds), several)
        if math.isfinite(self._below):
            return Found(None, None if self._row.by_axes else min([self._below, *self._bounds]), several)
        errors = [error for _, error in self._errors]
        if over := [error for error in errors if isinstance(error, OverBudget)]:
            raise min(over, key=lambda error: error.least_bytes)
        for error in errors:
            if isinstance(error, StrategyError):
                raise error
        mesh, error = self._errors[-1]
        raise PlanError(f"no plan was found on the mesh {mesh}: {error}; try fewer axes, as in mesh='dp=4,tp=2'")


MOST_WEIGHTS = 4  # of what is hidden, for each of which a search is made
CLOSE_TO_BOUND = 5e-3  # a gap, as a share, that is not worth a search as if nothing were hidden
CLOSE_WEIGHTS = 1e-3


def cheapest_with_hidden(search: Callable[[Seconds, float], Found[P]], objective: Seconds, before_s: float = 0.0) -> P:
    """The plan whose step takes least of those that are found, what is hidden of its communication taken off.

    What is hidden is no sum over operators and transfers, as searches minimise. But it is no more than what the
    hardware hides of the shorter of the two, of what may overlap and of the computing beside it, and so of any mean of
    both. So for each weight from 0 to 1 the sums of ``objective.hiding(weight)`` are bounds of what steps take
    (`Seconds`): the least of them is a bound of all plans. The largest of these bounds is given, and the plan that
    takes least of all that were found, where a gap is left also as if nothing were hidden. That need not be the least
    of all, since nothing can be communicated before it is there, nor later than it is needed; how far it may be from it
    is the gap.

    Beside ``before_s`` seconds of computing goes on what none of these sums has (`Seconds.before_first`).

    As a function of the weight the bound rises where less overlaps in the plan that it comes from than there is
    computing beside it, falls where more, and has no second top. So the first weight is 1, and mostly the last one:
    most plans compute for longer. Else 0 is the next, and then those where the sums of the two nearest plans meet.
    Each search looks for what costs less than all plans that were found before.
    """
    return _Weighing(search, objective, before_s).cheapest()


@dataclass(frozen=True)
class _Weighed(Generic[P]):
    """A plan that was found, what it costs as if nothing were hidden, and P and C of `Seconds`."""

    plan: P
    cost: float
    overlapping_s: float
    beside_s: float

    def at(self, weight: float, hides: float) -> float:
        """Return the cost of the plan at a weight."""
        return self.cost - hides * (weight * self.overlapping_s + (1 - weight) * self.beside_s)


class _Weighing(Generic[P]):
    """The searches of `cheapest_with_hidden`, and what each has found."""

    def __init__(self, search: Callable[[Seconds, float], Found[P]], objective: Seconds, before_s: float) -> None:
        self._search, self._objective = search, objective
        self._hides, self._before_s = objective.hardware.hides_gradients, before_s
        self._found: list[_Weighed[P]] = []
        self._bounds: list[tuple[float, tuple[str, ...]]] = []  # with what is said of the meshes
        # Of the last plan of a bound that rises, or falls: its cost at weight 0, and the slope.
        self._lines: dict[bool, tuple[float, float]] = {}

    def cheapest(self) -> P:
        """Return the plan whose step takes least, with the largest bound.

        Raises:
            OverBudget: where no search has found a plan that fits.
        """
        over = None
        try:
            self._look_at_weights()
        except OverBudget as error:
            over = error
        if over is not None or not self._bounds or self._least() > max(self._bounds)[0] * (1 + CLOSE_TO_BOUND):
            self._look_without_hiding(over)
        best = min((one.plan for one in self._found), key=lambda plan: plan.cost or 0.0)
        if not self._bounds:
            return replace(best, bound=None)
        bound, considered = max(self._bounds)
        return replace(best, bound=min(bound, best.cost or 0.0), considered=considered)

    def _least(self) -> float:
        return min(one.plan.cost or 0.0 for one in self._found)

    def _look_at_weights(self) -> None:
        weight = 1.0
        for _ in range(MOST_WEIGHTS):
            rises = self._rises_at(weight)
            if rises == (weight == 1) and weight in (0, 1):
                return
            before, weight = weight, _meeting(self._lines) if len(self._lines) > 1 else 0.0
            if abs(weight - before) < CLOSE_WEIGHTS:
                return

    def _rises_at(self, weight: float) -> bool:
        """Search at a weight; return whether the bound rises there."""
        hides, known = self._hides, min(self._found, key=lambda one: one.at(weight, self._hides), default=None)
        with stage(search=f"hiding {weight:.3g}"):
            found = self._search(self._objective.hiding(weight), known.at(weight, hides) if known else math.inf)
        cost = known.at(weight, hides) if known else math.inf
        if found.plan is not None:
            known, cost = self._take(found.plan), found.plan.cost or 0.0
        assert known is not None
        if found.bound is not None:
            self._bounds.append((found.bound - hides * self._before_s, found.considered))
        slope = hides * (known.beside_s - known.overlapping_s)
        self._lines[slope >= 0] = cost - slope * weight, slope
        return slope >= 0

    def _look_without_hiding(self, over: OverBudget | None) -> None:
        """Search as if nothing were hidden; where nothing fits that has been found before, either, raise the error."""
        try:
            with stage(search="hiding nothing"):
                found = self._search(self._objective, min((one.cost for one in self._found), default=math.inf))
        except OverBudget as again:
            raise min((again, over or again), key=lambda error: error.least_bytes) from None
        if found.plan is not None:
            self._take(found.plan)

    @in_stage("pricing")
    def _take(self, plan: P) -> _Weighed[P]:
        """Keep a plan that a search has found, with what its step takes."""
        prices = Prices(plan, self._objective.hardware)
        cost = prices.step_s - prices.hardware.around_s
        taken = _Weighed(replace(plan, cost=cost), cost + prices.hidden_s, prices.overlapping_s, prices.beside_s)
        self._found.append(taken)
        return taken


def _meeting(lines: Mapping[bool, tuple[float, float]]) -> float:
    (rising, up), (falling, down) = lines[True], lines[False]
    return min(1.0, max(0.0, (falling - rising) / (up - down)))
