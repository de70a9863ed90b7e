"""The search over meshes, few axes first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.common.stages import stage
from shardwright.common.words import in_bytes
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.mesh_search import EQUAL, MeshSearch, search_mesh
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Objective
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.links import link_along
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import Choice, OverBudget, Space
from shardwright.compiler.plan.search.exact import TooWide
from shardwright.compiler.plan.search.narrow import NothingBelow
from shardwright.compiler.plan.search.problem import CostCache, StillCosts
from shardwright.compiler.plan.search.search import floor_of
from shardwright.compiler.plan.searches import Search
from shardwright.compiler.plan.spaces import meshes_for, space_of
from shardwright.compiler.plan.text import in_unit
from shardwright.errors import PlanError, StrategyError


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


@dataclass(frozen=True)
class Looked:
    """The outcome of a search of a mesh: a line about it, the bound of all its choices, and one that costs less.

    The bound is None where the search has none. ``price`` is that of a byte at which a choice was found, if any was.
    ``is_passed_over`` says that the bound alone was looked for.
    """

    said: str
    bound: float | None
    choice: Choice | None = None
    price: float = 0.0
    error: PlanError | None = None
    is_passed_over: bool = False


class Meshes:
    """The meshes that are looked at for the plan that costs least."""

    def __init__(self, graph: RuledGraph, request: PlanRequest, row: Search, *, keep: bool = False) -> None:
        self._graph, self._request, self._row = graph, request, row
        self._spaces = MeshSpaces(graph, request, row, keep=keep)
        self._objective = row.objective(request.hardware, request.optimizer)
        self._best: Plan | None = None
        self._bounds: list[float | None] = []  # of each mesh
        self._errors: list[tuple[Mesh, PlanError]] = []
        self._said: dict[Mesh, str] = {}
        self._price = 0.0  # of a byte, at which the plan was found

    def search_on(self, mesh: Mesh) -> MeshSearch:
        """Return the search on a mesh."""
        found = self._spaces.search(mesh, self._objective)
        found.price = self._price or None
        return found

    def plan(self) -> Plan:
        """Search the mesh that was asked for, or all; return the plan that costs least.

        Raises:
            PlanError: where there is none.
        """
        if self._request.axes:
            self.look_at([self.search_on(self._request.axes)])
            return self._found()
        few = meshes_for(self._graph, self._request, self._row.first_axes)
        self._look_at_few(few)
        # Unless pins, the storage or the inputs name the axes that there are.
        named = len(few[0].axes) > self._row.first_axes or self._request.storage
        if self._is_too_wide() and not (named or isinstance(self._request.inputs, Mapping)):
            count = self._row.first_axes
            while self._is_too_wide() and count > 1:
                count -= 1
                self._look_at_few(meshes_for(self._graph, self._request, count))
        elif finer := self._finer(few):
            self._look_closer(finer, few)
        return self._found()

    def _look_at_few(self, meshes: Sequence[Mesh]) -> None:
        self.look_at([self.search_on(mesh) for mesh in meshes])

    def _look_closer(self, finer: Sequence[Mesh], few: Sequence[Mesh]) -> None:
        """Look at finer meshes: first at that of the last plan, then where operators may cost least."""
        least = min(self.search_on(mesh).least for mesh in few)
        on_meshes = {mesh: self._if_worth(mesh, least) for mesh in finer}
        worth, best = [of for of in on_meshes.values() if of is not None], self._spaces.best
        self.look_at(sorted(worth, key=lambda of: (of.mesh != best, of.least)))
        idle = [mesh for mesh, of in on_meshes.items() if of is None]
        self._said |= dict.fromkeys(idle, "not searched: its axes have one link, and cut no more than fewer do")

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
        if floor_of(self._graph, self._objective, self._request.mesh.size) >= least * (1 - EQUAL):
            return None
        on_mesh = self.search_on(finer)
        return on_mesh if on_mesh.least < least * (1 - EQUAL) else None

    def look_at(self, on_meshes: Sequence[MeshSearch]) -> None:
        """Search these meshes for what costs less than what was found."""
        for on_mesh in on_meshes:
            looked = self.looked_at(on_mesh, math.inf if self._best is None else self._best.cost or 0.0)
            self._bounds.append(looked.bound)
            if looked.choice is not None:
                self._take(looked.choice, on_mesh.plan(looked.choice))
            on_mesh.forget()

    def looked_at(self, on_mesh: MeshSearch, below: float) -> Looked:
        """Search a mesh for what costs less than ``below``."""
        with stage(mesh=str(on_mesh.mesh)):
            looked = _searched(on_mesh, self._row, below)
        self._said[on_mesh.mesh] = looked.said
        if looked.error is not None:
            self._errors.append((on_mesh.mesh, looked.error))
        return looked

    def _take(self, choice: Choice, plan: Plan) -> None:
        self._best, self._price, self._spaces.best = plan, choice.price, plan.mesh

    def _is_too_wide(self) -> bool:
        nothing = self._best is None and bool(self._errors)
        return nothing and all(isinstance(error, TooWide) for _, error in self._errors)

    def _found(self) -> Plan:
        """Return what was found, with the bound of all meshes; raise why nothing was."""
        if self._best is not None:
            known = [bound for bound in self._bounds if bound is not None]
            bound = min([*known, self._best.cost or 0.0]) if len(known) == len(self._bounds) else None
            several = [f"{mesh} {said}" for mesh, said in self._said.items()]
            return replace(self._best, bound=bound, considered=tuple(several) if len(several) > 1 else ())
        errors = [error for _, error in self._errors]
        if over := [error for error in errors if isinstance(error, OverBudget)]:
            raise min(over, key=lambda error: error.least_bytes)
        for error in errors:
            if isinstance(error, StrategyError):
                raise error
        mesh, error = self._errors[-1]
        raise PlanError(f"no plan was found on the mesh {mesh}: {error}; try fewer axes, as in mesh='dp=4,tp=2'")


def _searched(on_mesh: MeshSearch, row: Search, below: float) -> Looked:
    """Search a mesh for what costs less than ``below``."""
    if on_mesh.least >= below:
        return Looked(f"not searched: nothing on it costs less than {in_unit(on_mesh.least, row)}", on_mesh.least)
    try:
        choice = search_mesh(on_mesh, row, below)
    except NothingBelow as nothing:
        least = in_unit(nothing.bound, row)
        if nothing.bound < below and nothing.bound >= on_mesh.promise * (1 - EQUAL):
            said = f"not searched further: nothing on it costs less than {least}, hardly less than on fewer axes"
            return Looked(said, nothing.bound, is_passed_over=True)
        return Looked(f"has no cheaper plan: nothing on it costs less than {least}", min(nothing.bound, below))
    except OverBudget as over:
        said = f"has no plan that fits: the one that holds least holds {in_bytes(over.least_bytes)}"
        return Looked(said, over.bound, error=over)
    except PlanError as error:
        bound = on_mesh.least if isinstance(error, TooWide) else math.inf
        return Looked(f"has no plan: {str(error).splitlines()[0]}", bound, error=error)
    cost = choice.cost or 0.0
    return Looked(f"costs {in_unit(cost, row)}", choice.bound, choice if cost < below else None, choice.price)
