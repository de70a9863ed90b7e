"""The plan whose step takes least, where the hardware hides communication behind computing.

What is hidden is no sum over operators and transfers, as searches minimise. But it is no more than what the hardware
hides of the shorter of the two, of what may overlap and of the computing beside it, in the forward and in the backward,
and so of any mean of both. So for two weights from 0 to 1 the sums of `Seconds.hiding` are bounds of what steps take:
the least of them on a mesh is a bound of all plans there, whatever the weights are on other meshes. As a function of
the weights a plan's sum is a plane, and the bound is where the lowest planes are. It has no second top, and the top is
looked for by cutting planes (Kelley, *The cutting-plane method for solving convex programs*, 1960): of the weights at
which the planes of the plans that were found allow a bound that is higher by half of what they allow at most, the
nearest are next (Lemaréchal, Nemirovskii and Nesterov, *New variants of bundle methods*, 1995). The first are 1, and on
finer meshes the last ones of coarser: most plans compute for longer.

Each mesh is looked at once, but for one that splits as many ranks over the same links into as many axes as another
whose bound promised nothing. It may have a cheaper plan, and is named beside the others as one that was not searched.
Then it is always the mesh with the least bound, until that is near what the best plan takes, or a search has hardly
raised it: where the bound is above that, nothing on a mesh is worth another look. Nor is a mesh whose bound is hardly
less than that of the coarser mesh of whose axes it has the parts: what the coarser one does not promise, it does not
either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwright.common.stages import in_stage, stage
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.mesh_search import MeshSearch
from shardwright.compiler.plan.meshes import Meshes
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import PerDirection, Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.links import LinkKind, link_along
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import Choice, OverBudget
from shardwright.compiler.plan.search.mixing import Weighed, cheapest_between
from shardwright.compiler.plan.searches import SEARCHES, Search, SearchName
from shardwright.compiler.plan.text import in_unit
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.errors import PlanError

MOST_WEIGHTS = 5  # of what is hidden, for each of which a search is made, on any mesh
CLOSE_TO_BOUND = 5e-3  # a gap, as a share, that is worth no other weights
CLOSE_TO_TOP = 0.25  # a rise of the bound, as a share of the gap, that is worth no other weights
RISING = 0.1  # a search that raised the bound by less, as a share of the gap, is the last on its mesh
CLOSE_WEIGHTS = 1e-3
PROMISE = 5e-3  # by how much less, as a share, the bound on a finer mesh must be for a search there
WEIGHT = (0.0, 1.0)  # the least and the largest
LEVEL = 0.5  # of what planes allow the bound to rise at most, so much is looked for


def searched_plan(graph: RuledGraph, request: PlanRequest, search: SearchName, *, on_few_axes: bool = False) -> Plan:
    """Return the plan that costs least of those that a search finds, on no more axes than at first if ``on_few_axes``.

    Where the hardware hides communication behind computing, that is the plan whose step takes least, what is hidden of
    its communication taken off. It need not be the least of all, since nothing can be communicated before it is there,
    nor later than it is needed; how far it may be from it is the gap.
    """
    row = SEARCHES[search]
    row = replace(row, most_axes=row.first_axes) if on_few_axes else row
    objective = row.objective(request.hardware, request.optimizer)
    if not (isinstance(objective, Seconds) and request.hardware.hides_gradients):
        return Meshes(graph, request, row).plan()
    try:
        return HidingMeshes(graph, request, row, objective).plan()
    except OverBudget as over:
        return _found_without_hiding(graph, request, row, over)


def _found_without_hiding(graph: RuledGraph, request: PlanRequest, row: Search, over: OverBudget) -> Plan:
    """Search as if nothing were hidden, since nothing fits; where nothing does then, either, raise the error."""
    try:
        with stage(search="hiding nothing"):
            found = Meshes(graph, request, row).plan()
    except OverBudget as again:
        raise min((again, over), key=lambda error: error.least_bytes) from None
    return replace(found, cost=Prices(found, request.hardware).step_s - request.hardware.around_s, bound=None)


@dataclass
class _OnMesh:
    """The searches on a mesh: the weights, and what no plan on it is below at these."""

    mesh: Mesh
    heights: dict[PerDirection, float] = field(default_factory=dict)
    is_bounded: bool = True
    is_passed_over: bool = False

    @property
    def best(self) -> PerDirection:
        """Return the weights of the largest bound."""
        return max(self.heights, key=self.heights.__getitem__)

    @property
    def height(self) -> float:
        """Return the largest bound."""
        return self.heights[self.best]

    @property
    def rise(self) -> float:
        """Return by how much the last search has raised the bound; infinity where it has not, or was the first."""
        *before, last = self.heights.values()
        raised = last - max(before, default=-math.inf)
        return raised if raised > 0 else math.inf


class HidingMeshes(Meshes):
    """The meshes that are looked at for the plan whose step takes least.

    Beside `Seconds.before_first` seconds of computing goes on what none of the sums has that searches minimise.
    """

    def __init__(self, graph: RuledGraph, request: PlanRequest, row: Search, plain: Seconds) -> None:
        super().__init__(graph, request, row, keep=True)
        self._plain, self._hides = plain, plain.hardware.hides_gradients
        self._more_s = self._hides * plain.before_first(graph)  # that may be hidden beside what the sums hide
        self._weighed: list[Weighed] = []
        self._on: dict[Mesh, _OnMesh] = {}
        self._prices: dict[PerDirection, float] = {}  # of a byte, at which a plan was found at weights; 0 without one
        self._start = PerDirection(1.0, 1.0)
        self._objective = plain.hiding(self._start)

    def look_at(self, on_meshes: Sequence[MeshSearch]) -> None:
        """Search these meshes for plans whose steps take less, and all that there are for larger bounds."""
        for on_mesh in on_meshes:
            if (other := self._passed_over_like(on_mesh.mesh)) is None:
                self._look_at(on_mesh, self._start)
            else:
                said = f"not searched: its axes have the links of {other}, which promises hardly more than fewer axes"
                self._said[on_mesh.mesh] = said
        while (following := self._next()) is not None:
            mesh, weights = following
            self._look_at(self._spaces.search(mesh, self._plain.hiding(weights)), weights)
        if self._spaces.best is not None:
            self._start = self._on[self._spaces.best].best
            self._objective = self._plain.hiding(self._start)

    def _passed_over_like(self, mesh: Mesh) -> Mesh | None:
        """Return a mesh with as many axes, which split as many ranks over the same links, if it was passed over."""
        ranks = self._ranks_by_link(mesh)
        return next(
            (of.mesh for of in self._on.values() if of.is_passed_over and self._ranks_by_link(of.mesh) == ranks), None
        )

    def _ranks_by_link(self, mesh: Mesh) -> dict[LinkKind, tuple[int, int]]:
        """Return how many axes have each kind of link, and how many ranks these split."""
        found: dict[LinkKind, tuple[int, int]] = {}
        for axis in mesh.axes:
            link = link_along(mesh, [axis.name], self._request.hardware.ranks_per_host)
            axes, ranks = found.get(link, (0, 1))
            found[link] = axes + 1, ranks * axis.size
        return found

    def _found(self) -> Plan:
        """Return what was found, or what lies between two plans on a mesh, where a gap is left."""
        for mesh, of in self._on.items():
            plans = [one for one in self._weighed if one.plan.mesh == mesh]
            if not self._is_close(of) and len(plans) > 1:
                self._look_between(plans, self._spaces.search(mesh, self._objective))
        self._bounds = [max(0.0, self._bound_on(of)) if of.is_bounded else None for of in self._on.values()]
        return super()._found()

    def _bound_on(self, of: _OnMesh) -> float:
        """Return what no plan on a mesh takes less than: of the sums of plans that were found none is below it.

        Tables may price what several readers share of two targets, or what is too large for a hub, dearer than plans.
        """
        known = self._known_on(of.mesh)
        least = (min([height, *(one.at(at, self._hides) for one in known)]) for at, height in of.heights.items())
        return max(least) - self._more_s

    @in_stage("pricing")
    def _look_between(self, plans: Sequence[Weighed], on_mesh: MeshSearch) -> None:
        """Look for a plan between some of a mesh, with as many blocks recomputed as the budget asks for."""

        def plan_of(choice: Choice) -> Plan:
            if (within := on_mesh.within(choice)) is None:
                raise PlanError("it holds more than the budget")
            return on_mesh.plan(within)

        def step_s(choice: Choice) -> float:
            return Prices(plan_of(choice), self._plain.hardware).step_s - self._plain.hardware.around_s

        choice = cheapest_between(plans, self._hides, self._least_s(), step_s)
        if choice is not None:
            self._take(choice, plan_of(choice))

    def _is_close(self, of: _OnMesh) -> bool:
        """Return whether no plan on a mesh takes so much less than the best that it is worth another look."""
        return self._least_s() <= (of.height - self._more_s) * (1 + CLOSE_TO_BOUND)

    def _next(self) -> tuple[Mesh, PerDirection] | None:
        """Return the mesh with the least bound, and the next weights there; None where these are worth no search."""
        if not self._weighed:
            return None
        least_s = self._least_s()
        of = min((of for of in self._on.values() if not of.is_passed_over), key=lambda of: of.height)
        gap = least_s + self._more_s - of.height
        if self._is_close(of) or len(of.heights) >= MOST_WEIGHTS or of.rise < RISING * gap:
            return None
        planes = [one.plane(self._hides) for one in self._known_on(of.mesh)]
        if not planes:
            return None
        top = min(highest(planes)[0], least_s + self._more_s)
        if top - of.height <= CLOSE_TO_TOP * gap:
            return None
        weights = nearest(planes, of.height + LEVEL * (top - of.height), of.best)
        return None if any(_are_close(weights, other) for other in of.heights) else (of.mesh, weights)

    def _least_on_coarser(self, mesh: Mesh, weights: PerDirection) -> float:
        """Return the least bound at weights on the meshes of whose axes one has the parts."""
        coarser = (of for of in self._on.values() if of.mesh != mesh and _refines(mesh, of.mesh))
        return min((of.heights[weights] for of in coarser if weights in of.heights), default=math.inf)

    def _known_on(self, mesh: Mesh) -> list[Weighed]:
        """Return the plans that were found on a mesh, or on one of whose axes it has the parts."""
        return [one for one in self._weighed if _refines(mesh, one.plan.mesh)]

    def _look_at(self, on_mesh: MeshSearch, weights: PerDirection) -> None:
        """Search a mesh for what costs less at these weights than the plans that are known there."""
        known = (one.at(weights, self._hides) for one in self._known_on(on_mesh.mesh))
        below = min([*known, self._least_s() + self._more_s])
        on_mesh.price = self._price_at(weights, on_mesh.mesh)
        on_mesh.promise = self._least_on_coarser(on_mesh.mesh, weights) * (1 - PROMISE)
        on_mesh.asks_others = on_mesh.mesh not in self._on  # at other weights most of them find the same
        with stage(search=f"hiding {weights.forward:.3g}, {weights.backward:.3g}"):
            looked = self.looked_at(on_mesh, below)
            if looked.choice is not None:
                self._take(looked.choice, on_mesh.plan(looked.choice))
            on_mesh.forget()
        is_free = looked.choice is not None and looked.bound is not None and looked.bound >= (looked.choice.cost or 0.0)
        if looked.price or is_free:
            self._prices.setdefault(weights, looked.price)
        of = self._on.setdefault(on_mesh.mesh, _OnMesh(on_mesh.mesh))
        of.heights[weights] = below if looked.bound is None else looked.bound
        of.is_bounded &= looked.bound is not None
        of.is_passed_over = looked.is_passed_over

    def _price_at(self, weights: PerDirection, mesh: Mesh) -> float | None:
        """Return the price of a byte at which a plan was found at weights, or on finer meshes at those nearest to them.

        A price hardly depends on the weights, a bound is one at any price, and on finer meshes each takes long.
        """
        if weights not in self._prices and any(of != mesh and _refines(mesh, of) for of in self._on):
            weights = min(self._prices, key=lambda of: _distance(of, weights), default=weights)
        return self._prices.get(weights)

    def _least_s(self) -> float:
        return math.inf if self._best is None else self._best.cost or 0.0

    @in_stage("pricing")
    def _take(self, choice: Choice, plan: Plan) -> None:
        """Keep a plan that a search has found, with what its step takes."""
        prices = Prices(plan, self._plain.hardware)
        cost = prices.step_s - prices.hardware.around_s
        plan = replace(plan, cost=cost)
        self._weighed.append(Weighed(plan, cost + prices.hidden_s, prices.overlapping_s, prices.beside_s))
        on_mesh = min(one.plan.cost or 0.0 for one in self._weighed if one.plan.mesh == plan.mesh)
        self._said[plan.mesh] = f"costs {in_unit(on_mesh, self._row)}"
        if cost < self._least_s():
            super()._take(choice, plan)


def _refines(finer: Mesh, coarser: Mesh) -> bool:
    """Return whether the axes of a mesh are those of another, some of them in parts.

    Example:
        >>> _refines(Mesh.of(a=2, b=4, c=8), Mesh.of(a=8, b=8)), _refines(Mesh.of(a=2, b=32), Mesh.of(a=8, b=8))
        (True, False)
    """
    ends = [{*itertools.accumulate((axis.size for axis in mesh.axes), lambda a, b: a * b)} for mesh in (finer, coarser)]
    return ends[1] <= ends[0]


def _are_close(weights: PerDirection, others: PerDirection) -> bool:
    return _distance(weights, others) < CLOSE_WEIGHTS


def _distance(weights: PerDirection, others: PerDirection) -> float:
    return max(abs(one - other) for one, other in zip(weights, others, strict=True))


def highest(planes: Sequence[tuple[float, float, float]]) -> tuple[float, PerDirection]:
    """Return the largest of what no plane is below, and where that is, with both weights from 0 to 1.

    Args:
        planes: of each its height at weights of 0, and by how much it rises with each of both.

    Example:
        >>> highest([(0.0, 2.0, 0.0), (2.0, -2.0, 0.5)])
        (1.25, PerDirection(forward=0.625, backward=1.0))
    """
    unit = max(abs(height) for height, *_ in planes) or 1.0
    below = [[-forward / unit, -backward / unit, 1.0] for _, forward, backward in planes]
    forward, backward, top = _solved([0.0, 0.0, -1.0], below, [height / unit for height, *_ in planes], [WEIGHT] * 2)
    return top * unit, PerDirection(forward, backward)


def nearest(planes: Sequence[tuple[float, float, float]], level: float, weights: PerDirection) -> PerDirection:
    """Return the weights nearest to others at which no plane is below a level, as the sum of both distances."""
    unit = max(abs(height) for height, *_ in planes) or 1.0
    # The unknowns are both weights, and both distances.
    below = [[-forward / unit, -backward / unit, 0.0, 0.0] for _, forward, backward in planes]
    most = [(height - level) / unit for height, *_ in planes]
    for at, sign in itertools.product((0, 1), (1.0, -1.0)):
        row = [0.0] * 4
        row[at], row[at + 2] = sign, -1.0
        below.append(row)
        most.append(sign * weights[at])
    return PerDirection(*_solved([0.0, 0.0, 1.0, 1.0], below, most, [WEIGHT] * 2)[:2])


def _solved(
    costs: Sequence[float],
    rows: Sequence[Sequence[float]],
    most: Sequence[float],
    limits: Sequence[tuple[float, float]],
) -> list[float]:
    """Return where the costs are least and no row is more than its ``most``; the first unknowns have limits."""
    from scipy.optimize import linprog  # whose import takes a third of a second

    free = [(None, None)] * (len(costs) - len(limits))
    found = linprog(costs, A_ub=rows, b_ub=most, bounds=[*limits, *free], method="highs")
    return [float(value) for value in found.x]
