"""The meshes on which plans are searched for: few axes first, then what may cost less on more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from shardwright.common.words import in_bytes
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.explain import in_unit
from shardwright.compiler.plan.minima.exact import TooWide
from shardwright.compiler.plan.minima.narrow import NothingBelow
from shardwright.compiler.plan.others import EQUAL, searched
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.links import link_along
from shardwright.compiler.plan.pricing.ruled import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.searches import SEARCHES, Search
from shardwright.compiler.plan.searching.budget import OverBudget
from shardwright.compiler.plan.searching.search import floor_of
from shardwright.compiler.plan.searching.space import Choice
from shardwright.compiler.plan.spaces import meshes_for, space_of
from shardwright.compiler.plan.weighing import Weighing
from shardwright.errors import PlanError, StrategyError


class Meshes:
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
        weighings = {mesh: self._if_worth(mesh, least) for mesh in finer}
        worth = [of for of in weighings.values() if of is not None]
        busy = {of.mesh: self._of_the_busy(of.mesh) for of in worth}
        self.look_at(sorted(worth, key=lambda of: busy[of.mesh]))
        idle = [mesh for mesh, of in weighings.items() if of is None]
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

    def _if_worth(self, finer: Mesh, least: float) -> Weighing | None:
        """What may be chosen on a finer mesh, where links tell its axes from each other, or where these cut what those
        of coarser meshes do not; else None."""
        per_host = self._request.hardware.ranks_per_host
        links = {link_along(finer, [axis], per_host) for axis in finer.names}
        if len(links) > 1:
            return self.weighing(finer)
        if self._floor >= least * (1 - EQUAL):
            return None
        weighing = self.weighing(finer)
        return weighing if weighing.least < least * (1 - EQUAL) else None

    @cached_property
    def _floor(self) -> float:
        """What no plan costs less than on any mesh of these devices.

        Cached: the request and the graph are frozen.
        """
        request = self._request
        return floor_of(self._graph, self._row.objective(request.hardware, request.optimizer), request.mesh.size)

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
            choice = searched(weighing, row, below)
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
