"""The cheapest plan that holds no more than a budget of bytes, and a bound that none of these is below.

    minimise cost(x)  where  bytes(x) <= budget      is at least      minimise cost(x) + price * (bytes(x) - budget)

for every price of a byte from 0 on (Everett, *Generalized Lagrange multiplier method*, 1963). The search on the right
is as exact as one without a budget. The price is raised until what it finds fits, and then brought, between a plan that
does not fit and one that does, to where both cost the same (Handler and Zang, *A dual algorithm for the
constrained shortest path problem*, 1980). The largest right side is the bound; the cheapest plan found that fits is the
answer, and what lies between them the gap.

What the search counts is never more than what is held, nor more than what it costs to compute blocks again: a bound by
what it counts is one for what is true. What was found is weighed and priced by what is true (`Budget.weigh`, `settle`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shardwright.errors import PlanError
from shardwright.plan.pricing.optimizers import OptimizerStates
from shardwright.plan.searching.narrow import NothingBelow
from shardwright.plan.searching.space import Choice

MOST_PRICES = 16
CLOSE = 1e-4  # a gap that is not worth another search
# At these prices a part of the budget counts as much as the whole step, a third and then a millionth, until something
# fits; at last with buffers of collectives that are not the largest.
_DEAR = ((3.0, True), (1e6, True), (1e6, False))


def _same(choice: Choice) -> Choice:
    return choice


def _none(choice: Choice) -> Choice | None:
    return None


class OverBudget(PlanError):
    """Nothing that was found fits the budget."""


@dataclass(frozen=True)
class Budget:
    """How much a device may hold, and what it holds under a choice: all of it, counted after the search."""

    limit_bytes: int
    optimizer: OptimizerStates
    weigh: Callable[[Choice], int]
    refuse: Callable[[Choice], str]
    """What is said of the choice that holds least, where that is too much."""
    settle: Callable[[Choice], Choice] = _same
    """A choice with what it costs to compute its blocks, and to gather its values, again."""
    fewest: Callable[[Choice], Choice | None] = _none
    """The same with the fewest blocks computed again with which it fits; None where it never does."""
    price: float = 0.0
    """Of a byte, at which a plan was found that is to be beaten; 0 where there is none."""
    once: bool = False
    """Whether nothing is looked at but that price."""
    near: float = 1e-3
    """The share by which a price must differ from others to be looked at."""


@dataclass(frozen=True)
class Priced:
    """What a search found at a price: the choice, and its cost with the bytes that it holds above the budget."""

    choice: Choice
    cost: float
    total: float
    bytes: int

    @staticmethod
    def of(choice: Choice, total: float, budget: Budget) -> Priced:
        return Priced(choice, choice.cost or 0.0, total, budget.weigh(choice))


class Solve(Protocol):
    """What is asked at a price of a byte."""

    def __call__(self, price: float, below: float, *, alone: bool = False) -> tuple[Sequence[Choice], float]:
        """The choice with the least cost + price * (bytes - budget), others that are near it, and a bound of that.

        The bound is one for all choices but those where it is no less than ``below``, which is to be beaten. With
        ``alone`` there are no others: largest buffers count nothing.
        """


def fitting(
    free: Choice,
    solve: Solve,
    budget: Budget,
    below: float = math.inf,
) -> Choice:
    """The cheapest choice found that fits ``budget``.

    Args:
        free: the choice without a budget.
        solve: what is chosen at a price of a byte.
        below: what a plan costs that is known; the search ends where nothing that fits costs less.

    Raises:
        NothingBelow: where none that fits costs less than ``below``.
        OverBudget: where none fits.
    """
    over = Priced.of(free, free.bound or 0.0, budget)
    if over.bytes <= budget.limit_bytes:
        return free
    if budget.once:
        return _beating(below, free, solve, budget)
    bound = over.total
    found, tried = [over], [0.0]
    if budget.price:
        tried.append(budget.price)
        found += _priced(solve, budget.price, below, budget)
        bound = max(bound, found[-1].total)
        if bound >= below:
            raise NothingBelow(bound)
    for times, alone in _DEAR:
        if _those_that_fit(found, budget.limit_bytes):
            break
        tried.append(times * max(over.cost, 1e-9) / budget.limit_bytes)
        found += _priced(solve, tried[-1], below, budget, alone=alone)
    if not _those_that_fit(found, budget.limit_bytes):
        raise OverBudget(budget.refuse(min(found, key=lambda one: one.bytes).choice))
    for _ in range(MOST_PRICES):
        price = _next_price(found, budget.limit_bytes)
        cheapest = min(_those_that_fit(found, budget.limit_bytes), key=lambda one: one.cost)
        if any(math.isclose(price, of, rel_tol=budget.near) for of in tried):
            break
        if cheapest.cost - bound <= CLOSE * cheapest.cost:
            break
        tried.append(price)
        try:
            new = _priced(solve, price, min(below, cheapest.cost), budget)
        except NothingBelow as nothing:
            bound = max(bound, nothing.bound)
            if bound >= below:
                raise NothingBelow(bound) from None
            break
        found += new
        if new[0].total >= below:
            raise NothingBelow(new[0].total)
        if new[0].total <= bound and all(one.cost >= cheapest.cost for one in _those_that_fit(new, budget.limit_bytes)):
            break
        bound = max(bound, new[0].total)
    near = min(_above(found, budget.limit_bytes), key=lambda one: one.cost + price * one.bytes)
    cheapest = min(_those_that_fit(found, budget.limit_bytes), key=lambda one: one.cost)
    best = _with_fewest([cheapest.choice, near.choice, free], bound, budget)
    return replace(best, price=price)


def _those_that_fit(found: Sequence[Priced], limit_bytes: int) -> list[Priced]:
    return [one for one in found if one.bytes <= limit_bytes]


def _above(found: Sequence[Priced], limit_bytes: int) -> list[Priced]:
    return [one for one in found if one.bytes > limit_bytes]


def _next_price(found: Sequence[Priced], limit_bytes: int) -> float:
    """The price of a byte at which of those that fit, and of those that do not, the best of each cost the same.

    The lower convex hull of what was found, as costs over bytes, falls so steeply where it passes the limit.
    """
    above = _above(found, limit_bytes)

    def steepest(fit: Priced) -> float:
        return max((fit.cost - over.cost) / (over.bytes - fit.bytes) for over in above)

    return max(0.0, min(map(steepest, _those_that_fit(found, limit_bytes))))


def _beating(below: float, free: Choice, solve: Solve, budget: Budget) -> Choice:
    """The cheapest that fits and costs less than ``below``, at the price of the plan which costs that.

    Raises:
        NothingBelow: where none was found.
    """
    choices, total = solve(budget.price, below)
    bound = max(free.bound or 0.0, total)
    found = [choice for choice in map(budget.fewest, [*choices, free]) if choice is not None]
    best = min(found, key=lambda choice: choice.cost or 0.0, default=None)
    if best is None or (best.cost or 0.0) >= below:
        raise NothingBelow(bound)
    return replace(best, bound=min(bound, best.cost or 0.0), price=budget.price)


def _priced(solve: Solve, price: float, below: float, budget: Budget, *, alone: bool = False) -> list[Priced]:
    choices, total = solve(price, below, alone=alone)
    return [Priced.of(choice, total, budget) for choice in choices]


def _with_fewest(found: Sequence[Choice], bound: float, budget: Budget) -> Choice:
    """The cheapest of those that were found, each with as few blocks computed again as the budget asks for.

    At one price of a byte all blocks that are alike are computed again or none. Between the two it is some of them.
    """
    fitting_ones = [found[0], *(choice for choice in map(budget.fewest, found) if choice is not None)]
    best = min(fitting_ones, key=lambda choice: choice.cost or 0.0)
    return replace(best, bound=min(bound, best.cost or 0.0))
