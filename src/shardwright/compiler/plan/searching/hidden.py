"""The plan whose step takes least where the hardware hides the reduction of gradients behind the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from shardwright.compiler.plan.decided.decisions import Decisions
from shardwright.compiler.plan.decided.prices import Prices
from shardwright.compiler.plan.pricing.cost import Seconds

MOST_SHARES = 4  # of what is hidden, for each of which a search is made
CLOSE_SHARES = 1e-3
P = TypeVar("P", bound=Decisions)


def cheapest_with_hidden(search: Callable[[Seconds], P], objective: Seconds) -> P:
    """The plan whose step takes least of those that are found, what is hidden of its gradients taken off.

    What is hidden is no sum over operators and transfers, as searches minimise. But it is no more than what the
    hardware hides of the shorter of the two, reducing gradients and the backward, and so of any mean of both.
    So for each share from 0 to 1 the sums of ``objective.hiding(share)`` are bounds of what steps take: the least of
    them is a bound of all plans. The largest of these bounds is given, and the plan that takes least of all that
    were found, also as if nothing were hidden. That need not be the least of all, since a bucket begins when its
    gradients are there and not with the backward; how far it may be from it is the gap.

    As a function of the share the bound rises where the plan that it comes from reduces gradients in less time than its
    backward takes, falls where in more, and has no second top. So the first share is 1, and mostly the last one: most
    plans have the longer backward. Else 0 is the next, and then those where the sums of the two nearest plans meet.
    """
    hides, plan = objective.hardware.hides_gradients, search(objective)
    found = [_taking_less(plan, Prices(plan, objective.hardware), 0.0)]
    bounds: list[float | None] = []
    lines: dict[bool, tuple[float, float]] = {}  # of the last plan of a bound that rises, or falls: at share 0, slope
    share = 1.0
    for _ in range(MOST_SHARES):
        plan = search(objective.hiding(share))
        prices = Prices(plan, objective.hardware)
        hidden_s = hides * (share * prices.reducing_s + (1 - share) * prices.backward_s)
        found.append(_taking_less(plan, prices, hidden_s))
        bounds.append(plan.bound)
        slope = hides * (prices.backward_s - prices.reducing_s)
        lines[slope >= 0] = (plan.cost or 0.0) - slope * share, slope
        if (slope >= 0) == (share == 1) and share in (0, 1):
            break
        before, share = share, _meeting(lines) if len(lines) > 1 else 0.0
        if abs(share - before) < CLOSE_SHARES:
            break
    best = min(found, key=lambda one: one.cost or 0.0)
    known = [bound for bound in bounds if bound is not None]
    return replace(best, bound=min(max(known), best.cost or 0.0) if known else None)


def _taking_less(plan: P, prices: Prices, counted_s: float) -> P:
    """The plan with what a step takes, where a search has counted so much as hidden."""
    return replace(plan, cost=(plan.cost or 0.0) + counted_s - prices.hidden_s)


def _meeting(lines: Mapping[bool, tuple[float, float]]) -> float:
    (rising, up), (falling, down) = lines[True], lines[False]
    return min(1.0, max(0.0, (falling - rising) / (up - down)))
