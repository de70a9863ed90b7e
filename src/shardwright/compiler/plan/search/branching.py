"""Branch and bound: where a budget leaves a gap, the choices are divided, and each part has a bound of its own.

At one price of a byte all that is alike is decided alike: a budget that lies between a plan that fits and one that does
not, far apart from each other, has plans between them that are the least at no price (a *duality gap*). The two differ
above all in a few large things, as how an embedding is stored. Of the choices that store it as the one does, and of
those that do as the other, the bounds are larger than that of both together, and other plans are the least among them.
So the part with the least bound is divided again and again (branch and bound: Land and Doig, *An automatic method of
solving discrete programming problems*, 1960).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.common.stages import in_stage
from shardwright.compiler.plan.search.budget import Budget, PricedChoice, Solve, highest, next_price, priced
from shardwright.compiler.plan.search.choices import Choice
from shardwright.compiler.plan.search.exact import Table, TooWide
from shardwright.compiler.plan.search.narrow import NothingBelow
from shardwright.compiler.plan.search.problem import Problem
from shardwright.compiler.plan.search.weights import Weights
from shardwright.errors import PlanError

ENOUGH = 0.01
"""A gap, as a share of the cost, that is worth no further division."""
MOST_SEARCHES, OF_A_PART = 48, 4
FEWEST_SEARCHES = 4  # that are worth a beginning: of the whole, of both its halves, and of one of these again
NEAR = 0.02  # prices that differ by a smaller share tell a part nothing new
WORK = 30_000
"""As many tables are searched again at most: where there are many, few things are so large that a gap is left."""


class Branching:
    """The division of the choices of a problem in two."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self._problem, self._weights = problem, weights
        self.most_searches = min(MOST_SEARCHES, WORK // (len(problem.tables) + len(weights.tables)))

    def halves(self, one: Choice, other: Choice) -> tuple[Table, Table] | None:
        """Two tables, each of which forbids what the other does not: of the variable in which the two weigh most apart.

        None where they weigh the same in each.
        """
        picked, others = self._picked(one), self._picked(other)
        differing = [v for v, (a, b) in enumerate(zip(picked, others, strict=True)) if a != b]
        sizes = {v: self._weights.of_each(v, picked) for v in differing}
        apart = {v: abs(float(of[picked[v]] - of[others[v]])) for v, of in sizes.items()}
        variable = max(apart, key=apart.__getitem__, default=None)
        if variable is None or not apart[variable]:
            return None
        of = sizes[variable]
        less = of <= (of[picked[variable]] + of[others[variable]]) / 2
        return Table((variable,), np.where(less, np.inf, 0.0)), Table((variable,), np.where(less, 0.0, np.inf))

    def has(self, forbidding: Sequence[Table], choice: Choice) -> bool:
        """Return whether a choice is among those that the tables do not forbid."""
        picked = self._picked(choice)
        return all(np.isfinite(table.at(picked)) for table in forbidding)

    def _picked(self, choice: Choice) -> list[int]:
        return self._problem.picked(choice.strategies, choice.leaves, choice.recomputed)


@dataclass(eq=False)
class Branch:
    """Choices that no table forbids: what was found among them, at which prices, and a bound of those that fit."""

    forbidding: tuple[Table, ...]
    found: list[PricedChoice]
    bound: float
    price: float


class BranchAndBound:
    """The parts into which choices are divided, and the best of all that was found.

    Args:
        best: the cheapest choice that fits of those that are known.
        below: what is to be beaten beside that.
    """

    def __init__(self, best: Choice, solve: Solve, budget: Budget, division: Branching, below: float) -> None:
        self.best, self._solve, self._budget, self._division, self._below = best, solve, budget, division, below
        self._left = division.most_searches
        self._closed: list[float] = []  # bounds of parts that are divided no further

    @in_stage("branching")
    def divided(self, whole: Branch) -> Choice:
        """The cheapest choice that was found, with the bound of all parts."""
        price = whole.price
        if self._is_near(whole) or self._left < FEWEST_SEARCHES:
            return self.best
        whole.price = self._next_price(whole, last=False)
        open_parts = [whole] if self._is_open(whole) else []
        while open_parts and self._left > 0:
            part = min(open_parts, key=lambda of: of.bound)
            if self._is_near(part):
                break
            open_parts.remove(part)
            open_parts += self._halves(part)
        bound = min([*self._closed, *(part.bound for part in open_parts)], default=math.inf)
        return replace(self.best, bound=min(max(whole.bound, bound), self._to_beat()), price=price)

    def _is_near(self, part: Branch) -> bool:
        """Return whether nothing in a part may be so much better that it is worth a search."""
        return self._to_beat() - part.bound <= ENOUGH * self._to_beat()

    def _to_beat(self) -> float:
        return min(self._below, self.best.cost or 0.0)

    def _halves(self, part: Branch) -> list[Branch]:
        """The two halves of a part, as far as they may have what is better."""
        sides = self._nearest(part)
        tables = self._division.halves(*sides) if sides else None
        if tables is None:
            self._closed.append(part.bound)
            return []
        found = []
        for table in tables:
            forbidding = (*part.forbidding, table)
            there = [one for one in part.found if self._division.has([table], one.choice)]
            half = Branch(forbidding, there, part.bound, part.price)
            if self._is_open(half):
                found.append(half)
        return found

    def _nearest(self, part: Branch) -> tuple[Choice, Choice] | None:
        """Of those that do not fit, and of those that do, the best at the price; None where one side is empty."""
        limit = self._budget.limit_bytes
        sides = [one for one in part.found if one.bytes > limit], [one for one in part.found if one.bytes <= limit]
        if not all(sides):
            return None
        over, fit = (min(side, key=lambda one: one.cost + part.price * one.bytes).choice for side in sides)
        return over, fit

    def _is_open(self, half: Branch) -> bool:
        """Ask at a few prices what is the best of a part; whether there may be what is better than the best.

        Mostly at those at which the bound may be the largest, at last where plans just fit: what is counted of them is
        less than they hold.
        """
        asked: list[float] = []
        while len(asked) < OF_A_PART and not any(math.isclose(half.price, of, rel_tol=NEAR) for of in asked):
            self._left -= 1
            asked.append(half.price)
            try:
                new = priced(self._solve, half.price, self._to_beat(), self._budget, forbidding=half.forbidding)
            except NothingBelow as nothing:
                self._closed.append(max(half.bound, nothing.bound))
                return False
            except TooWide:
                self._closed.append(half.bound)
                return False
            except PlanError:  # there is nothing in it
                return False
            half.found += new
            half.bound = max(half.bound, new[0].total)
            self._take(new)
            if half.bound >= self._to_beat():
                self._closed.append(half.bound)
                return False
            half.price = self._next_price(half, last=len(asked) == OF_A_PART - 1)
        return True

    def _next_price(self, half: Branch, *, last: bool) -> float:
        lines = [one.line for one in half.found if one.line is not None]
        if (last or not lines) and self._nearest(half) is not None:
            return next_price(half.found, self._budget.limit_bytes)
        return highest(lines)

    def _take(self, new: Sequence[PricedChoice]) -> None:
        """Keep the cheapest that fits, some with more blocks computed again."""
        for one in new:
            fits = one.bytes <= self._budget.limit_bytes
            choice = one.choice if fits else self._budget.fewest(one.choice, self._budget.limit_bytes)
            if choice is not None and (choice.cost or 0.0) < (self.best.cost or 0.0):
                self.best = choice
