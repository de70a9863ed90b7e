"""The plan whose step takes least, where the hardware hides communication behind computing.

What is hidden is no sum over operators and transfers, as searches minimise. But it is no more than what the hardware
hides of the shorter of the two, of what may overlap and of the computing beside it, in the forward and in the backward,
and so of any mean of both. So for two weights from 0 to 1 the sums of `Seconds.hiding` are bounds of what steps take:
the least of them is a bound of all plans. As a function of the weights a plan's sum is a plane, and the bound is where
the lowest planes are. It has no second top, and the top is looked for by cutting planes (Kelley, *The cutting-plane
method for solving convex programs*, 1960): of the weights at which the planes of the plans that were found allow a
bound that is higher by half of what they allow at most, the nearest are next (Lemaréchal, Nemirovskii and Nesterov,
*New variants of bundle methods*, 1995). The first are 1, and mostly the last ones: most plans compute for longer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from shardwright.common.stages import in_stage, stage
from shardwright.compiler.plan.decisions import Decisions
from shardwright.compiler.plan.pricing.cost import PerDirection, Seconds
from shardwright.compiler.plan.search.choices import OverBudget
from shardwright.compiler.plan.timing.prices import Prices

MOST_WEIGHTS = 4  # of what is hidden, for each of which a search is made
MOST_ON_FEW = 5  # and on meshes of few axes
CLOSE_TO_BOUND = 5e-3  # a gap, as a share, that is worth no other weights
CLOSE_TO_TOP = 0.25  # a rise of the bound, as a share of the gap, that is worth no other weights
CLOSE_WEIGHTS = 1e-3
WEIGHT = (0.0, 1.0)  # the least and the largest
LEVEL = 0.5  # of what planes allow the bound to rise at most, so much is looked for

P = TypeVar("P", bound=Decisions)


@dataclass(frozen=True)
class Found(Generic[P]):
    """The plan that costs least, where one costs less than what is known; what none costs less than; what was said.

    That is of all meshes, or of few axes alone where there are more: then it is not ``whole``.
    """

    plan: P | None
    bound: float | None
    considered: tuple[str, ...] = ()
    whole: bool = True


Searched = Iterator[Found[P]]
"""What a search finds on meshes of few axes, and where there are more, next what it finds on all."""


def cheapest_with_hidden(
    search: Callable[[Seconds, float], Searched[P]], objective: Seconds, before_s: float = 0.0
) -> P:
    """The plan whose step takes least of those that are found, what is hidden of its communication taken off.

    Of the bounds the largest is given, and the plan that takes least of all that were found. That need not be the least
    of all, since nothing can be communicated before it is there, nor later than it is needed; how far it may be from it
    is the gap.

    Beside ``before_s`` seconds of computing goes on what none of these sums has (`Seconds.before_first`). Each search
    looks for what costs less than all plans that were found before. Weights are looked for on meshes of few axes, which
    takes little time, and then from the best of these on all.
    """
    return _Weighing(search, objective, before_s).cheapest()


@dataclass(frozen=True)
class _Weighed(Generic[P]):
    """A plan that was found, what it costs as if nothing were hidden, and P, P', C and C' of `Seconds`."""

    plan: P
    found: P  # as the search has found it
    cost: float
    overlapping_s: PerDirection
    beside_s: PerDirection

    def plane(self, hides: float) -> tuple[float, float, float]:
        """Return the cost of the plan at weights of 0, and by how much it rises with each of both."""
        slopes = (hides * (beside - of) for of, beside in zip(self.overlapping_s, self.beside_s, strict=True))
        return self.cost - hides * sum(self.beside_s), *slopes  # type: ignore[return-value]

    def at(self, weights: PerDirection, hides: float) -> float:
        """Return the cost of the plan at weights."""
        least, forward, backward = self.plane(hides)
        return least + weights.forward * forward + weights.backward * backward


class _Weighing(Generic[P]):
    """The searches of `cheapest_with_hidden`, and what each has found."""

    def __init__(self, search: Callable[[Seconds, float], Searched[P]], objective: Seconds, before_s: float) -> None:
        self._search, self._objective = search, objective
        self._hides, self._before_s = objective.hardware.hides_gradients, before_s
        self._found: list[_Weighed[P]] = []
        self._on_few: dict[PerDirection, Searched[P]] = {}  # searches that have looked at meshes of few axes alone
        self._heights: dict[PerDirection, float] = {}  # what no plan is below, by the weights that were looked at
        self._on_few_heights: dict[PerDirection, float] = {}  # the same on meshes of few axes: no less than on all
        self._bounds: list[tuple[float, tuple[str, ...]]] = []  # of all meshes, with what is said of these

    def cheapest(self) -> P:
        """Return the plan whose step takes least, with the largest bound.

        Raises:
            OverBudget: where no search has found a plan that fits.
        """
        over = None
        try:
            start = self._look_at_weights(PerDirection(1.0, 1.0), whole=False)
            if self._on_few:
                self._on_few_heights, self._heights = self._heights, {}
                self._look_at_weights(start, whole=True)
        except OverBudget as error:
            over = error
        if over is not None:
            self._look_without_hiding(over)
        best = min((one.plan for one in self._found), key=lambda plan: plan.cost or 0.0)
        if not self._bounds:
            return replace(best, bound=None)
        bound, considered = max(self._bounds)
        return replace(best, bound=min(bound, best.cost or 0.0), considered=considered)

    def _least(self) -> float:
        return min(one.plan.cost or 0.0 for one in self._found)

    def _look_at_weights(self, weights: PerDirection, *, whole: bool) -> PerDirection:
        """Look for the weights of the largest bound, on few meshes or all; return the best."""
        for _ in range(MOST_WEIGHTS if whole else MOST_ON_FEW):
            self._look_at(weights, whole=whole)
            best = max(self._heights, key=lambda of: self._heights[of])
            if not self._found:
                return weights
            bound, least = self._heights[best] - self._hides * self._before_s, self._least()
            if least <= bound * (1 + CLOSE_TO_BOUND):
                return best
            planes = [one.plane(self._hides) for one in self._found]
            top, height = highest(planes)[0], self._heights[best]
            if top - height <= CLOSE_TO_TOP * (least - bound):
                return best
            weights = nearest(planes, height + LEVEL * (top - height), best)
            lower = {of for of, few in self._on_few_heights.items() if few <= height}
            if any(_are_close(weights, of) for of in lower.union(self._heights)):
                return best
        return best

    def _look_at(self, weights: PerDirection, *, whole: bool) -> None:
        """Search at these weights, on few meshes or all, for what costs less there than all that was found before."""
        with stage(search=f"hiding {weights.forward:.3g}, {weights.backward:.3g}"):
            if weights in self._on_few:
                found = self._taken(next(self._on_few.pop(weights)))
            else:
                searched = self._search(self._objective.hiding(weights), self._least_at(weights))
                found = self._taken(next(searched))
                if not found.whole and whole:
                    found = self._taken(next(searched))
                elif not found.whole:
                    self._on_few[weights] = searched
        self._heights[weights] = self._least_at(weights) if found.bound is None else found.bound
        if found.whole and found.bound is not None:
            self._bounds.append((found.bound - self._hides * self._before_s, found.considered))

    def _taken(self, found: Found[P]) -> Found[P]:
        """Return what a search has found, of which the plan is kept."""
        if found.plan is not None and all(one.found is not found.plan for one in self._found):
            self._take(found.plan)
        return found

    def _least_at(self, weights: PerDirection) -> float:
        return min((one.at(weights, self._hides) for one in self._found), default=math.inf)

    def _look_without_hiding(self, over: OverBudget) -> None:
        """Search as if nothing were hidden, since nothing fits; where nothing does then, either, raise the error."""
        try:
            with stage(search="hiding nothing"):
                *_, found = self._search(self._objective, min((one.cost for one in self._found), default=math.inf))
        except OverBudget as again:
            raise min((again, over), key=lambda error: error.least_bytes) from None
        self._taken(found)

    @in_stage("pricing")
    def _take(self, plan: P) -> None:
        """Keep a plan that a search has found, with what its step takes."""
        prices = Prices(plan, self._objective.hardware)
        cost = prices.step_s - prices.hardware.around_s
        self._found.append(
            _Weighed(replace(plan, cost=cost), plan, cost + prices.hidden_s, prices.overlapping_s, prices.beside_s)
        )


def _are_close(weights: PerDirection, others: PerDirection) -> bool:
    return max(abs(one - other) for one, other in zip(weights, others, strict=True)) < CLOSE_WEIGHTS


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
