"""The minimum of a sum of tables where elimination is too wide: most values are shown to be in no least assignment.

    minimise   sum over tables t of  t[x at the variables of t]

Tables may give each other what they say of a single variable, by which no sum changes: a *message* is added to one and
taken from another. Whatever the messages are, the sum of the least entries of all tables is no more than the minimum,
and with the least entry at a value x of a variable v it is no more than what any assignment with v = x costs. Messages
that raise these bounds are found variable by variable, there and back (sequential reweighted message passing:
Kolmogorov, *A new look at reweighted message passing*, PAMI 2015).

Before bounds are asked, all variables are eliminated around which tables are small. Few are left, with fewer messages,
and each of their tables knows what was around it.

Let L be the bound of all. Of every variable only the values are looked at whose own bound is at most L + e, with as
large an e as elimination allows. Every other assignment costs more than L + e: where the least of these costs no more
than that, it is the minimum. Where not, what costs more than it is left out for good, and messages are sent once more:
tables become smaller as the bounds come nearer. What is found at last comes with its bound. Where too many values are
as good as each other for any e, what ties most together is settled at what looks best, for a first assignment.

What elimination takes is known before it begins (`exact.work`), equal layers counted once. Little is done at once, and
so is what a round has not made much less. Where most likely nothing is below what is to be beaten, one round shows it.

Messages are rounded to a grid, which makes them no less true: along equal layers they are soon the very same, and what
follows from them is worked out once; equal layers keep the same values for that (`Bounds`). For other costs they are no
less true either, and where these are near, as those at the next price of a byte, better than none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from shardwright.common.stages import in_stage
from shardwright.compiler.plan.search.bounds import Bounds, WarmStart
from shardwright.compiler.plan.search.exact import LIMIT, Minimum, Table, TooWide, among, minimise, without_narrow
from shardwright.compiler.plan.search.exact import work as work_of
from shardwright.errors import PlanError

EARLY = 16  # before bounds are asked variables are eliminated by tables so many times smaller: they tie little
ROUNDS = 10
MOST_WORK = 1e10
"""So many entries are added up at most, which takes some twenty seconds."""
LITTLE_WORK = 5e9  # what takes less time than further rounds
QUICK_WORK = 5e8  # what takes less time than the first of these
FEWER = 0.5  # where a round leaves more than this share of the work, the rest is done
FIRST_ROUNDS = 3  # which may leave the gap as it is, where it is to be the smallest
WIDER = 16  # where single values are tried tables may be so many times larger
ENOUGH = 1e-6  # a gap, as a share of the cost, that is worth no further round where nothing else is said
WORTH = 0.8  # nor is one that the rounds before made no smaller than so much of what it was
SETTLED = 16  # a choice where values are settled is as good with tables so many times smaller
TRIES = 200  # of values for single variables, until something is possible


class NothingBelow(PlanError):
    """No assignment was found that costs less than what is there already; ``bound`` is what none is below."""

    def __init__(self, bound: float) -> None:
        super().__init__(f"nothing cheaper was found; nothing costs less than {bound}")
        self.bound = bound


@contextmanager
def plus(more: float) -> Iterator[None]:
    """Inside, what is searched is a part: the rest costs ``more``, which is added to what nothing is below."""
    try:
        yield
    except NothingBelow as nothing:
        raise NothingBelow(nothing.bound + more) from None


@in_stage("bounds")
def least(
    domains: Sequence[int],
    tables: Sequence[Table],
    limit: int = LIMIT,
    *,
    work: float = MOST_WORK,
    below: float = math.inf,
    enough: float = ENOUGH,
    learned: WarmStart | None = None,
    messages_first: bool = False,
) -> Minimum:
    """The minimum; or, where elimination is too wide and what can be left out is too little, a choice near it.

    Args:
        domains: the number of values of every variable.
        limit: the largest table, in entries, that is built at first where values are left out.
        work: so many entries elimination may add up; more are too wide.
        below: what an assignment must be below to be of use: where elimination is too wide, values that are in none
            such are left out from the start.
        enough: a gap, as a share of the cost, that is worth no further round; a larger one than usual says, too, that
            wider tables are not worth their time where bounds rise slowly.
        learned: what earlier searches have left, to which this one adds.
        messages_first: whether messages are sent before elimination, as most likely nothing is ``below``.

    Raises:
        NothingBelow: where none is below that, if elimination alone does not tell what the least is.
        PlanError: where every assignment has infinite cost.
        TooWide: where nothing possible was found.
    """
    rest = without_narrow(domains, tables, limit // EARLY)
    try:
        with (learned or WarmStart.nothing(domains)).without(step.variable for step in rest.steps) as of_rest:
            left = [*rest.tables, Table((), np.array(rest.total))]
            found = _among_left(left, limit, work, below, enough, of_rest, messages_first)
    except (TooWide, NothingBelow):
        raise
    except PlanError:
        if math.isfinite(below):
            raise NothingBelow(below) from None
        raise
    return replace(found, picked=rest.completed(found.picked))


def _among_left(
    tables: Sequence[Table],
    limit: int,
    work: float,
    below: float,
    enough: float,
    learned: WarmStart,
    messages_first: bool,
) -> Minimum:
    """Return the problem among the values that other searches have left."""
    left, sizes = list(learned.left), [len(values) for values in learned.left]
    if sizes != [*learned.domains]:
        tables = among(left, tables, {})
    most = min(work, QUICK_WORK if messages_first else LITTLE_WORK if math.isfinite(below) else work)
    if work_of(sizes, tables, [id(table.costs) for table in tables], most) <= most:
        cost, picked = minimise(sizes, tables, most)
        found = Minimum(cost, cost, picked)
    else:
        found = _narrowed(Bounds(sizes, tables, learned), limit, work, below, enough)
    return replace(found, picked=[int(of[i]) for of, i in zip(left, found.picked, strict=True)])


def _narrowed(bounds: Bounds, limit: int, work: float, below: float, enough: float) -> Minimum:
    best = _nearer(bounds, limit, work, below, enough)
    bounds.leave_messages()
    if best.picked:
        return best
    if math.isfinite(below):
        raise NothingBelow(best.bound)
    return replace(_possible(bounds, limit * WIDER), bound=best.bound)


def _nearer(bounds: Bounds, limit: int, work: float, below: float, enough: float) -> Minimum:
    """The best assignment that was found; without one, that which is to be beaten, which nothing picks."""
    best, gap, before = Minimum(below, -math.inf, []), math.inf, math.inf
    bounds.leave_out_above(below)
    for at in range(ROUNDS):
        bounds.sweep()
        if at == 0:
            bounds.leave_values()
        all_work = bounds.work(work)
        if all_work <= min(work, LITTLE_WORK) or FEWER * before < all_work <= work:
            rest = bounds.least(math.inf)
            return replace(rest, bound=rest.cost) if rest.cost < best.cost else replace(best, bound=best.cost)
        before = all_work
        found, proven = bounds.least_near(min(work, LITTLE_WORK))
        if found is None and not best.picked:
            found = bounds.least_settled(max(1, limit // SETTLED))
        if found is not None and found.cost < best.cost:
            best = replace(found, bound=best.bound)
        best = replace(best, bound=min(max(best.bound, bounds.bound, proven), best.cost))
        if not math.isfinite(best.cost):
            continue
        gap_before, gap = gap, best.cost - best.bound
        if gap <= enough * abs(best.cost) or ((at >= FIRST_ROUNDS or enough > ENOUGH) and gap > WORTH * gap_before):
            break
        bounds.leave_out_above(best.cost)
    return best


def _possible(bounds: Bounds, limit: int) -> Minimum:
    """An assignment that is possible, one variable settled after the other until the rest is narrow enough.

    Raises:
        PlanError: where there is none.
        TooWide: where none was found.
    """
    settled = [bounds]
    for _ in range(TRIES):
        if not settled:
            raise PlanError("no assignment is possible: every combination is forbidden")
        size, scope = settled[-1].widest()
        try:
            if size <= limit:
                return settled[-1].least(limit)
            variable, value = settled[-1].likeliest(scope)
        except PlanError:
            settled.pop()
            continue
        further = settled[-1].with_values(variable, [value])
        settled[-1:] = [of for of in (settled[-1].with_values(variable, [value], out=True), further) if of is not None]
    raise TooWide("the search would need a larger table, and no possible choice was found without")
