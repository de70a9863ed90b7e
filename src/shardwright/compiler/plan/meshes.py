"""The search over meshes, few axes first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from shardwright.common.stages import stage
from shardwright.common.words import in_bytes
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.hidden import Found, cheapest_with_hidden
from shardwright.compiler.plan.mesh_search import EQUAL, MeshSearch, search_mesh
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Objective, Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.links import link_along
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import Choice, OverBudget, Space
from shardwright.compiler.plan.search.exact import TooWide
from shardwright.compiler.plan.search.narrow import NothingBelow
from shardwright.compiler.plan.search.problem import CostCache, StillCosts
from shardwright.compiler.plan.search.search import floor_of
from shardwright.compiler.plan.searches import SEARCHES, Search, SearchName
from shardwright.compiler.plan.spaces import meshes_for, space_of
from shardwright.compiler.plan.text import in_unit
from shardwright.errors import PlanError, StrategyError


def searched_plan(graph: RuledGraph, request: PlanRequest, search: SearchName) -> Plan:
    """Return the plan that costs least of those that a search finds.

    Where the hardware hides communication behind computing, several searches are made.
    """
    row = SEARCHES[search]
    objective = row.objective(request.hardware, request.optimizer)
    if isinstance(objective, Seconds) and request.hardware.hides_gradients:
        spaces = MeshSpaces(graph, request, row)
        return cheapest_with_hidden(
            lambda of, below: Meshes(graph, request, replace(row, objective=lambda *_: of), below, spaces).found(),
            objective,
            objective.before_first(graph),
        )
    *_, found = Meshes(graph, request, row).found()
    assert found.plan is not None
    return replace(found.plan, bound=found.bound, considered=found.considered)


class MeshSpaces:
    """The spaces of meshes, and costs there that are the same whatever is hidden: several searches share them."""

    def __init__(self, graph: RuledGraph, request: PlanRequest, row: Search, *, keep: bool = True) -> None:
        self._graph, self._request, self._row, self._keep = graph, request, row, keep
        # Cached by the mesh, as all else stays the same.
        self._spaces: dict[Mesh, Space] = {}
        self._costs: dict[Mesh, StillCosts] = {}
        self.best: Mesh | None = None
        """The mesh of the last plan that cost less than those before."""

    def search(self, mesh: Mesh, objective: Objective) -> MeshSearch:
        """Return the search on a mesh."""
        if mesh not in self._spaces:
            self._spaces[mesh] = space_of(self._graph, mesh, self._request, self._row)
        costs = CostCache(self._graph, objective, mesh, self._costs.get(mesh))
        if self._keep:
            self._costs.setdefault(mesh, costs.still)
        return MeshSearch(mesh, self._request, self._spaces[mesh], objective, costs)


class Meshes:
    """The meshes that are looked at for a plan that costs less than ``below``, which a plan does that is known."""

    def __init__(
        self,
        graph: RuledGraph,
        request: PlanRequest,
        row: Search,
        below: float = math.inf,
        spaces: MeshSpaces | None = None,
    ) -> None:
        self._graph, self._request, self._row, self._below = graph, request, row, below
        self._spaces = spaces or MeshSpaces(graph, request, row, keep=False)
        self._best: Plan | None = None
        self._bounds: list[float] = []  # of each mesh, where the search has one
        self._errors: list[tuple[Mesh, PlanError]] = []
        self._said: list[str] = []
        self._price = 0.0  # of a byte, at which the plan was found

    def search_on(self, mesh: Mesh) -> MeshSearch:
        """Return the search on a mesh."""
        found = self._spaces.search(mesh, self._row.objective(self._request.hardware, self._request.optimizer))
        found.price = self._price
        return found

    def found(self) -> Iterator[Found[Plan]]:
        """Search the mesh that was asked for, or all; yield the plan that costs least, on few axes and then on all.

        Raises:
            PlanError: where there is none, and none is known.
        """
        if self._request.axes:
            self.look_at([self.search_on(self._request.axes)])
            yield self._found(whole=True)
            return
        few = meshes_for(self._graph, self._request, self._row.first_axes)
        least = self._look_at_few(few)
        # Unless pins, the storage or the inputs name the axes that there are.
        named = len(few[0].axes) > self._row.first_axes or self._request.storage
        if self._is_too_wide() and not (named or isinstance(self._request.inputs, Mapping)):
            count = self._row.first_axes
            while self._is_too_wide() and count > 1:
                count -= 1
                self._look_at_few(meshes_for(self._graph, self._request, count))
        elif finer := self._finer(few):
            if self._best is not None or math.isfinite(self._below):
                yield self._found(whole=False)
            self._look_closer(finer, least)
        yield self._found(whole=True)

    def _look_at_few(self, meshes: Sequence[Mesh]) -> float:
        """Look at meshes of few axes; return the least that operators alone cost there."""
        few = [self.search_on(mesh) for mesh in meshes]
        self.look_at(few)
        return min(of.least for of in few)

    def _look_closer(self, finer: Sequence[Mesh], least: float) -> None:
        """Look at finer meshes: first at that of the last plan, then where operators may cost least."""
        on_meshes = {mesh: self._if_worth(mesh, least) for mesh in finer}
        worth, best = [of for of in on_meshes.values() if of is not None], self._spaces.best
        self.look_at(sorted(worth, key=lambda of: (of.mesh != best, of.least)))
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
            self._best, self._price, self._spaces.best = on_mesh.plan(choice), choice.price, on_mesh.mesh

    def _is_too_wide(self) -> bool:
        nothing = self._best is None and bool(self._errors)
        return nothing and all(isinstance(error, TooWide) for _, error in self._errors)

    def _found(self, *, whole: bool) -> Found[Plan]:
        """Return what was found so far; raise why nothing was, where nothing is known either."""
        several = tuple(self._said) if len(self._said) > 1 else ()
        if self._best is not None:
            return Found(self._best, self._best.bound and min(self._bounds), several, whole)
        if math.isfinite(self._below):
            return Found(None, None if self._row.by_axes else min([self._below, *self._bounds]), several, whole)
        errors = [error for _, error in self._errors]
        if over := [error for error in errors if isinstance(error, OverBudget)]:
            raise min(over, key=lambda error: error.least_bytes)
        for error in errors:
            if isinstance(error, StrategyError):
                raise error
        mesh, error = self._errors[-1]
        raise PlanError(f"no plan was found on the mesh {mesh}: {error}; try fewer axes, as in mesh='dp=4,tp=2'")
