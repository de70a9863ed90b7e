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
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from shardwright.common.stages import in_stage
from shardwright.compiler.plan.pricing.memory import OptimizerStates
from shardwright.compiler.plan.search.choices import Choice, OverBudget
from shardwright.compiler.plan.search.exact import Table, TooWide
from shardwright.compiler.plan.search.narrow import NothingBelow

MOST_PRICES = 16
FURTHER = 4.0  # a price follows others, where the bound rises or falls at all of these
CLOSE = 5e-4  # a gap that is not worth another search
ALIKE = (
    1e-2  # prices that differ by a smaller share find the same, mostly: one where the bound cannot rise is not tried
)
# At these prices a part of the budget counts as much as the whole step, a third and then a millionth, until something
# fits; then with buffers of collectives that are not the largest. More is held than is counted, and by what counts
# least at the highest price more than by others: so the first price comes again at last, with buffers.
_DEAR = ((3.0, True), (1e6, True), (1e6, False), (3.0, False))
# Transient tensors are not counted: where all of these would fit without, something may fit that is found at less.
_LESS_DEAR = (1.0, 0.3, 0.1, 0.03)


def _same(choice: Choice) -> Choice:
    return choice


def _none(choice: Choice, limit_bytes: int) -> Choice | None:
    return None


@dataclass(frozen=True)
class Budget:
    """The bytes that a device may hold, and how those that it holds under a choice are counted, after the search."""

    limit_bytes: int
    optimizer: OptimizerStates
    weigh: Callable[[Choice], int]
    refuse: Callable[[Choice, float], OverBudget]
    """The error where even the choice that holds least holds too much, made from that choice and the bound."""
    settle: Callable[[Choice], Choice] = _same
    """A choice with what it costs to compute its blocks, and to gather its values, again."""
    fewest: Callable[[Choice, int], Choice | None] = _none
    """The same with the fewest blocks computed again with which it holds no more; None where it always does."""
    price: float = 0.0
    """Of a byte, at which a plan was found that is to be beaten; 0 where there is none."""
    once: bool = False
    """True where no other price is tried."""
    promise: float = math.inf
    """Where no other price is tried, what the bound at that one must be below for anything further to be asked."""
    alternatives: Callable[[Choice], Choice] | None = None
    """A choice or what costs less of other ways to plan: what is to be beaten where choices are divided, as a gap is
    left. Without it they are not divided."""
    near: float = 1e-3
    """The share by which a price must differ from others to be looked at."""
    close: float = CLOSE
    """A gap, as a share of the cost, that is not worth another search."""


@dataclass(frozen=True)
class PricedChoice:
    """A choice that was found at a price of a byte, its cost, and that cost with the bytes above the budget."""

    choice: Choice
    cost: float
    total: float
    bytes: int
    line: BoundLine | None = None
    """The upper limit of the bound at other prices, by the first choice that a search has found."""

    @staticmethod
    def of(choice: Choice, total: float, budget: Budget, line: BoundLine | None = None) -> PricedChoice:
        return PricedChoice(choice, choice.cost or 0.0, total, budget.weigh(choice), line)


@dataclass(frozen=True)
class BoundLine:
    """By a choice that was found at a price: the bound there, and by how much it rises with the price at most."""

    price: float
    total: float
    above: float

    def at(self, price: float) -> float:
        """Return the largest bound that is possible at a price."""
        return self.total + (price - self.price) * self.above


class Solve(Protocol):
    """The minimum at a price of a byte."""

    def __call__(
        self, price: float, below: float, *, alone: bool = False, forbidding: Sequence[Table] = ()
    ) -> tuple[Sequence[Choice], float, float]:
        """Return the choice with the least cost + price * (bytes - budget) and others near it, a bound, and bytes.

        The bytes are those that the first is above the budget, as they are counted. The bound is one for all choices
        but those where it is no less than ``below``, which is to be beaten. With ``alone`` there are no others: largest
        buffers count nothing. Choices that the tables of ``forbidding`` forbid are left out.
        """


class CloseGap(Protocol):
    """The search for cheaper choices, and for a better bound, where a gap is left."""

    def __call__(self, best: Choice, found: Sequence[PricedChoice], price: float) -> Choice:
        """The cheapest choice that fits, with the bound of all, by those that were found at prices up to the last."""


@in_stage("budget")
def fitting(
    free: Callable[[], Choice],
    solve: Solve,
    budget: Budget,
    below: float = math.inf,
    closer: CloseGap | None = None,
) -> Choice:
    """The cheapest choice found that fits ``budget``.

    Args:
        free: finds the choice without a budget, which is not asked for where what is found at the price of the budget
            leaves no gap that is worth it.
        solve: what is chosen at a price of a byte.
        below: what a plan costs that is known; the search ends where nothing that fits costs less.
        closer: what is done where a gap is left.

    Raises:
        NothingBelow: where none that fits costs less than ``below``.
        OverBudget: where none fits.
    """
    if budget.once:
        return _beating(below, free, solve, budget)
    tried = _PriceSearch(solve, budget, below)
    if budget.price:
        with suppress(TooWide):
            tried.at(budget.price)
    if not tried.is_close:
        try:
            choice = free()
        except (NothingBelow, TooWide):
            if not tried.fit:
                raise
            return tried.best()
        over = PricedChoice.of(choice, choice.bound or 0.0, budget)
        if over.bytes <= budget.limit_bytes:
            best = min([choice, *(one.choice for one in tried.fit)], key=lambda one: one.cost or 0.0)
            return replace(best, bound=None if choice.bound is None else min(choice.bound, best.cost or 0.0))
        tried.take(over)
    for times, alone in _DEAR:
        if tried.fit:
            break
        tried.at(times * max(tried.free_cost, 1e-9) / budget.limit_bytes, alone=alone)
    for times in _LESS_DEAR if tried.fits_without_transient else ():
        tried.at(times * max(tried.free_cost, 1e-9) / budget.limit_bytes)
        if tried.fit:
            break
    if not tried.fit:
        tried.hold_less()
    while tried.is_worth_another:
        tried.another()
    best = tried.best()
    return best if closer is None else closer(best, [*tried.fit, *tried.above], best.price)


def priced(
    solve: Solve,
    price: float,
    below: float,
    budget: Budget,
    *,
    alone: bool = False,
    forbidding: Sequence[Table] = (),
) -> list[PricedChoice]:
    """Return the choices that are found at a price of a byte."""
    choices, total, above = solve(price, below, alone=alone, forbidding=forbidding)
    lines = [BoundLine(price, total, above), *(None for _ in choices[1:])]
    return [PricedChoice.of(choice, total, budget, line) for choice, line in zip(choices, lines, strict=True)]


class _PriceSearch:
    """The search over prices of a byte: what was found at each, and the bound of all that fits.

    At one price of a byte all blocks that are alike are computed again or none. Between the two it is some of them: so
    what is found first at a price is looked at with as few blocks computed again as the budget asks for, too.
    """

    def __init__(self, solve: Solve, budget: Budget, below: float) -> None:
        self._solve, self._budget, self._below = solve, budget, below
        self._prices, self._price = [0.0], 0.0
        self._bound = -math.inf
        self.free_cost = 0.0
        """The cost of the choice that was found without a price."""
        self._with_fewest: set[int] = set()  # choices, by identity: all are held
        self.fit: list[PricedChoice] = []
        """The choices that fit."""
        self.above: list[PricedChoice] = []
        """The choices that do not fit."""
        self.is_worth_another = True
        """True as long as one more price may give a choice that costs less, or a higher bound."""

    def take(self, free: PricedChoice) -> None:
        """Take what was found without a price, which does not fit."""
        self.free_cost = free.cost
        self._bound = max(self._bound, free.total)
        self._add([free])

    @property
    def is_close(self) -> bool:
        """Return whether something fits whose gap is not worth another search."""
        return bool(self.fit) and self._least - self._bound <= self._budget.close * self._least

    def at(self, price: float, *, alone: bool = False) -> None:
        """Try a price.

        Raises:
            NothingBelow: where none that fits costs less than what is to be beaten, or nothing was found.
        """
        self._price = price
        self._prices.append(price)
        try:
            found = priced(self._solve, price, min(self._below, self._least), self._budget, alone=alone)
        except NothingBelow as nothing:
            self._raise_to(nothing.bound)
            if not self.fit:
                raise
            self.is_worth_another = False
            return
        self._raise_to(found[0].total)
        self._add(found)

    @property
    def fits_without_transient(self) -> bool:
        """Return whether nothing fits, and something would by what the search counts."""
        return not self.fit and any(one.line is not None and one.line.above <= 0 for one in self.above)

    def hold_less(self) -> None:
        """Compute as many more blocks again of what holds least of all that was found as it takes to fit.

        Raises:
            OverBudget: where it never does.
        """
        least = min(self.above, key=lambda one: one.bytes)
        self._compute_fewer_again(least)
        if not self.fit:
            error = self._budget.refuse(least.choice, self._bound)
            error.by_transient = self.fits_without_transient
            raise error

    def another(self) -> None:
        """Try the next price, where one is worth it."""
        least, bound, budget = self._least, self._bound, self._budget
        if self.is_close:
            self.is_worth_another = False
            return
        self._price = next_price([*self.fit, *self.above], budget.limit_bytes)
        near = budget.near if self._may_rise(self._price) else max(budget.near, ALIKE)
        known = any(math.isclose(self._price, of, rel_tol=near) for of in self._prices)
        if known or len(self._prices) > MOST_PRICES:
            self.is_worth_another = False
        else:
            self.at(self._price)
            self.is_worth_another &= self._bound > bound or self._least < least

    def _may_rise(self, price: float) -> bool:
        """Return whether the bound may be larger at a price, by what was found at others."""
        lines = (one.line for one in (*self.fit, *self.above))
        return all(line.at(price) > self._bound for line in lines if line is not None)

    def best(self) -> Choice:
        """The cheapest that fits."""
        looked_at = [min(self.fit, key=lambda one: one.cost)]
        looked_at += sorted(self.above, key=lambda one: one.cost + self._price * one.bytes)[:1]
        for one in looked_at:
            self._compute_fewer_again(one)
        best = min(self.fit, key=lambda one: one.cost).choice
        return replace(best, bound=min(self._bound, best.cost or 0.0), price=self._price)

    @property
    def _least(self) -> float:
        return min((one.cost for one in self.fit), default=math.inf)

    def _raise_to(self, bound: float) -> None:
        self._bound = max(self._bound, bound)
        if self._bound >= self._below:
            raise NothingBelow(self._bound)

    def _add(self, found: Sequence[PricedChoice]) -> None:
        for one in found:
            (self.fit if one.bytes <= self._budget.limit_bytes else self.above).append(one)
        self._compute_fewer_again(found[0])

    def _compute_fewer_again(self, one: PricedChoice) -> None:
        limit_bytes = self._budget.limit_bytes
        needs = one.bytes > limit_bytes or one.choice.recomputed
        if needs and id(one.choice) not in self._with_fewest:
            self._with_fewest.add(id(one.choice))
            if (fewest := self._budget.fewest(one.choice, limit_bytes)) is not None:
                self._with_fewest.add(id(fewest))
                self.fit.append(replace(one, choice=fewest, cost=fewest.cost or 0.0, bytes=limit_bytes))


def highest(lines: Sequence[BoundLine]) -> float:
    """Return the price at which the bound may be the largest: no line is below it there.

    This is a step of Kelley, *The cutting-plane method for solving convex programs*, 1960. Where all lines rise it is a
    higher price, and where none does a lower one.
    """
    rising, falling = [of for of in lines if of.above > 0], [of for of in lines if of.above <= 0]
    if not rising or not falling:
        return FURTHER * max(of.price for of in rising) if rising else min(of.price for of in falling) / FURTHER
    meeting = ((low.at(0.0) - up.at(0.0)) / (up.above - low.above) for up in rising for low in falling)
    prices = [price for price in meeting if price > 0] or [of.price for of in lines]
    return max(prices, key=lambda price: min(of.at(price) for of in lines))


def next_price(found: Sequence[PricedChoice], limit_bytes: int) -> float:
    """The price of a byte at which of those that fit, and of those that do not, the best of each cost the same.

    The lower convex hull of what was found, as costs over bytes, falls so steeply where it passes the limit.
    """
    fit, above = ([one for one in found if (one.bytes <= limit_bytes) == fits] for fits in (True, False))

    def steepest(fit: PricedChoice) -> float:
        return max((fit.cost - over.cost) / (over.bytes - fit.bytes) for over in above)

    return max(0.0, min(map(steepest, fit)))


def _beating(below: float, free: Callable[[], Choice], solve: Solve, budget: Budget) -> Choice:
    """The cheapest that fits and costs less than ``below``, at the price of the plan which costs that.

    None is looked for where the bound at that price is no less than what a search is worth.

    Where what is found there holds more than the budget, the bound is smaller at lower prices, and none is looked for
    without a price. At a price of 0 that is all there is to look for.

    Raises:
        NothingBelow: where none was found.
    """
    looked_at, found, bound, above = list[Choice](), list[Choice](), -math.inf, -math.inf
    left_out_from = math.inf  # choices that cost as much are left out, so that no larger bound is proven after that
    if budget.price:
        left_out_from = min(below, budget.promise)
        at_price, bound, above = solve(budget.price, left_out_from)
        looked_at += at_price
    if above < 0:
        try:
            without = free()
        except NothingBelow as nothing:
            raise NothingBelow(max(bound, min(nothing.bound, left_out_from))) from None
        bound = max(bound, min(without.bound or 0.0, left_out_from))
        (found if budget.weigh(without) <= budget.limit_bytes else looked_at).append(without)
    tried = (budget.fewest(choice, budget.limit_bytes) for choice in looked_at)
    found += [choice for choice in tried if choice is not None]
    best = min(found, key=lambda choice: choice.cost or 0.0, default=None)
    if best is None or (best.cost or 0.0) >= below:
        raise NothingBelow(bound)
    return replace(best, bound=min(bound, best.cost or 0.0), price=budget.price)
