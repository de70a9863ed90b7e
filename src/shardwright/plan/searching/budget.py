"""The cheapest plan that holds no more than a budget of bytes, and a bound that none of these is below.

    minimise cost(x)  where  bytes(x) <= budget      is at least      minimise cost(x) + price * (bytes(x) - budget)

for every price of a byte from 0 on (Everett, *Generalized Lagrange multiplier method*, 1963). The search on the right
is as exact as one without a budget. The price is raised until what it finds fits, and then brought, between one plan
that does not fit and one that does, to where both cost the same (Handler and Zang, *A dual algorithm for the
constrained shortest path problem*, 1980). The largest right side is the bound; the cheapest plan found that fits is the
answer, and what lies between them the gap.

What the search counts is never more than what is held, nor more than what it costs to compute blocks again: a bound by
what it counts is one for what is true. What was found is weighed and priced by what is true (`Budget.weigh`, `settle`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwright.errors import PlanError
from shardwright.plan.pricing.optimizers import OptimizerStates
from shardwright.plan.searching.narrow import NothingBelow
from shardwright.plan.searching.space import Choice

MOST_PRICES = 16
CLOSE = 1e-4  # a gap that is not worth another search
_DEAR = 1e6  # at such a price a millionth of the budget counts as much as the whole step


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
    """A choice with what it costs to compute its blocks again."""
    fewest: Callable[[Choice], Choice | None] = _none
    """The same with the fewest blocks computed again with which it fits; None where it never does."""
    price: float = 0.0
    """Of a byte, at which a plan was found that is to be beaten; 0 where there is none."""


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


def fitting(
    free: Choice,
    solve: Callable[[float], tuple[Sequence[Choice], float]],
    budget: Budget,
    below: float = math.inf,
) -> Choice:
    """The cheapest choice found that fits ``budget``.

    Args:
        free: the choice without a budget.
        solve: the choice at a price of a byte, others that are near it, and a lower bound of
            cost + price * (bytes - budget).
        below: what a plan costs that is known; the search ends where nothing that fits costs less.

    Raises:
        NothingBelow: where none that fits costs less than ``below``.
        OverBudget: where none fits.
    """
    over = Priced.of(free, free.bound or 0.0, budget)
    if over.bytes <= budget.limit_bytes:
        return free
    if budget.price:
        return _beating(below, free, solve, budget)
    dear = _DEAR * max(over.cost, 1e-9) / budget.limit_bytes
    fits = min(_priced(solve, dear, budget), key=lambda found: found.bytes)
    if fits.bytes > budget.limit_bytes:
        raise OverBudget(budget.refuse(fits.choice))
    cheapest = fits
    bound, last = over.total, dear
    for _ in range(MOST_PRICES):
        price = (fits.cost - over.cost) / max(over.bytes - fits.bytes, 1)
        if price <= 0 or fits.cost - bound <= CLOSE * fits.cost:
            break
        last = price
        found, *others = _priced(solve, price, budget)
        fitting_ones = (one for one in (found, *others) if one.bytes <= budget.limit_bytes)
        cheapest = min([cheapest, *fitting_ones], key=lambda one: one.cost)
        bound = max(bound, found.total)
        if bound >= below:
            raise NothingBelow(bound)
        if (found.cost, found.bytes) in ((over.cost, over.bytes), (fits.cost, fits.bytes)):
            break
        if found.bytes > budget.limit_bytes:
            over = found
        elif found.cost <= fits.cost:
            fits = found
        else:
            break
    best = _with_fewest([cheapest.choice, over.choice, free], bound, budget)
    return replace(best, price=last)


def _beating(
    below: float, free: Choice, solve: Callable[[float], tuple[Sequence[Choice], float]], budget: Budget
) -> Choice:
    """The cheapest that fits and costs less than ``below``, at the price of the plan which costs that.

    Raises:
        NothingBelow: where none was found.
    """
    choices, total = solve(budget.price)
    bound = max(free.bound or 0.0, total)
    found = [choice for choice in map(budget.fewest, [*choices, free]) if choice is not None]
    best = min(found, key=lambda choice: choice.cost or 0.0, default=None)
    if best is None or (best.cost or 0.0) >= below:
        raise NothingBelow(bound)
    return replace(best, bound=min(bound, best.cost or 0.0), price=budget.price)


def _priced(solve: Callable[[float], tuple[Sequence[Choice], float]], price: float, budget: Budget) -> list[Priced]:
    choices, total = solve(price)
    return [Priced.of(choice, total, budget) for choice in choices]


def _with_fewest(found: Sequence[Choice], bound: float, budget: Budget) -> Choice:
    """The cheapest of those that were found, each with as few blocks computed again as the budget asks for.

    At one price of a byte all blocks that are alike are computed again or none. Between the two it is some of them.
    """
    fitting_ones = [found[0], *(choice for choice in map(budget.fewest, found) if choice is not None)]
    best = min(fitting_ones, key=lambda choice: choice.cost or 0.0)
    return replace(best, bound=min(bound, best.cost or 0.0))
