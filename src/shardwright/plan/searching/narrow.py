"""The minimum of a sum of tables where elimination is too wide: most values are shown to be in no least assignment.

    minimise   sum over tables t of  t[x at the variables of t]

Tables may give each other what they say of a single variable, by which no sum changes: a *message* is added to one and
taken from another. Whatever the messages are, the sum of the least entries of all tables is no more than the minimum,
and with the least entry at a value x of a variable v it is no more than what any assignment with v = x costs. Messages
that raise these bounds are found variable by variable, there and back (sequential reweighted message passing:
Kolmogorov, *A new look at reweighted message passing*, PAMI 2015).

Let L be the bound of all. Of every variable only the values are looked at whose own bound is at most L + e, with as
large an e as elimination allows. Every other assignment costs more than L + e: where the least of these costs no more
than that, it is the minimum. Where not, what costs more than it is left out for good, and messages are sent once more:
tables become smaller as the bounds come nearer. What is found at last comes with its bound. Where too many values are
as good as each other for any e, what ties most together is settled at what looks best, for a first assignment.

Messages are rounded to a grid, which makes them no less true: along equal layers they are soon the very same, and what
follows from them is worked out once. For other costs they are no less true either, and where these are near, as those
at the next price of a byte, better than none.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.errors import PlanError
from shardwright.plan.searching.exact import LIMIT, TooWide, minimise, widest
from shardwright.plan.searching.tables import Costs, Indices, Table, aligned

ROUNDS = 10
WIDER, MOST = 4, 16  # the limit of a round, times that of the one before; at most so many times that of the first.
# Where nothing is left out, tables may be that much wider from the start: a round takes longer than these.
ENOUGH = 1e-6  # a gap, as a share of the cost, that is worth no further round where nothing else is said
WORTH = 0.8  # nor is one that the rounds before made no smaller than so much of what it was
NEAR = 1e-9  # what bounds may be off by rounding, as a share of the cost
FINE = 2.0**-28  # of the grid of messages, as a share of the bound
FIRST, FURTHER, STEPS = 1e-6, 1.5, 40  # the shares of the bound that e may be: the first, and how each follows
TRIES = 200  # of values for single variables, until something is possible


@dataclass(frozen=True)
class Minimum:
    """A choice for every variable, what it costs, and what no choice is below."""

    cost: float
    bound: float
    picked: list[int]


@dataclass(frozen=True)
class Learned:
    """What searches leave for later ones over the same variables, at other costs.

    Messages, by the scope of the table and the variable, are a beginning. The values of every variable that are not
    among those ``left`` are in no assignment below what is to be beaten, which is of use where all costs are bounds of
    one thing.
    """

    domains: tuple[int, ...]
    left: list[Indices]
    messages: dict[tuple[tuple[int, ...], int], Costs] = field(default_factory=dict)

    @staticmethod
    def nothing(domains: Sequence[int]) -> Learned:
        """What there is before the first search."""
        return Learned((*domains,), [np.arange(size) for size in domains])

    def copied(self) -> Learned:
        """The same, to which a search may add what is not true for others."""
        return Learned(self.domains, list(self.left), dict(self.messages))

    def message(self, scope: tuple[int, ...], v: int) -> Costs:
        """What a table tells of one of its variables, by the values that are left."""
        found = self.messages.get((scope, v))
        return np.zeros(len(self.left[v])) if found is None else found[self.left[v]]


class NothingBelow(PlanError):
    """No assignment was found that costs less than what is there already; ``bound`` is what none is below."""

    def __init__(self, bound: float) -> None:
        super().__init__(f"nothing cheaper was found; nothing costs less than {bound}")
        self.bound = bound


@contextmanager
def beside(more: float) -> Iterator[None]:
    """Inside, what is searched is a part: the rest costs ``more``, which is added to what nothing is below."""
    try:
        yield
    except NothingBelow as nothing:
        raise NothingBelow(nothing.bound + more) from None


def least(
    domains: Sequence[int],
    tables: Sequence[Table],
    limit: int = LIMIT,
    *,
    below: float = math.inf,
    enough: float = ENOUGH,
    learned: Learned | None = None,
) -> Minimum:
    """The minimum; or, where elimination is too wide and what can be left out is too little, a choice near it.

    Args:
        domains: the number of values of every variable.
        limit: the largest table, in entries, that is built at first where values are left out.
        below: what an assignment must be below to be of use: where elimination is too wide, values that are in none
            such are left out from the start.
        enough: a gap, as a share of the cost, that is worth no further round; a larger one than usual says, too, that
            wider tables are not worth their time where bounds rise slowly.
        learned: what earlier searches have left, to which this one adds.

    Raises:
        NothingBelow: where none is below that.
        PlanError: where every assignment has infinite cost.
        TooWide: where nothing possible was found.
    """
    learned = learned or Learned.nothing(domains)
    left, sizes = list(learned.left), [len(values) for values in learned.left]
    if sizes != [*domains]:
        tables = _among(left, tables, {})
    try:
        found = _least(sizes, tables, limit, below, enough, learned)
    except (TooWide, NothingBelow):
        raise
    except PlanError:
        if math.isfinite(below):
            raise NothingBelow(below) from None
        raise
    return replace(found, picked=[int(of[i]) for of, i in zip(left, found.picked, strict=True)])


def _least(
    domains: Sequence[int], tables: Sequence[Table], limit: int, below: float, enough: float, learned: Learned
) -> Minimum:
    """The same among the values that are left."""
    with suppress(TooWide):
        cost, picked = minimise(domains, tables, limit * WIDER)
        return Minimum(cost, cost, picked)
    return _narrowed(_Bounds(domains, tables, learned), limit, below, enough)


def _among(values: Sequence[Indices], tables: Sequence[Table], known: dict[Hashable, Costs]) -> list[Table]:
    """The tables for some values of every variable alone; equal ones are one array, and kept in ``known``."""
    found = []
    for table in tables:
        key = "among", id(table.costs), tuple(values[v].tobytes() for v in table.scope)
        if key not in known:
            known[key] = table.costs[np.ix_(*(values[v] for v in table.scope))]
        found.append(Table(table.scope, known[key]))
    return found


def _narrowed(bounds: _Bounds, limit: int, below: float, enough: float) -> Minimum:
    best = _nearer(bounds, limit, below, enough)
    bounds.leave_messages()
    if best.picked:
        return best
    if math.isfinite(below):
        raise NothingBelow(best.bound)
    return replace(_possible(bounds, limit * MOST), bound=best.bound)


def _nearer(bounds: _Bounds, limit: int, below: float, enough: float) -> Minimum:
    """The best assignment that was found; without one, that which is to be beaten, which nothing picks."""
    best, gap = Minimum(below, -math.inf, []), math.inf
    bounds.leave_out_above(below)
    for at in range(ROUNDS):
        bounds.sweep()
        if at == 0:
            bounds.leave_values()
        found, proven = bounds.least_near(limit * min(WIDER**at, MOST))
        if found is None and not best.picked:
            found = bounds.least_settled(limit)
        if found is not None and found.cost < best.cost:
            best = replace(found, bound=best.bound)
        best = replace(best, bound=min(max(best.bound, bounds.bound, proven), best.cost))
        if not math.isfinite(best.cost):
            continue
        before, gap = gap, best.cost - best.bound
        if gap <= enough * abs(best.cost) or ((WIDER**at > MOST or enough > ENOUGH) and gap > WORTH * before):
            break
        bounds.leave_out_above(best.cost)
    return best


def _possible(bounds: _Bounds, limit: int) -> Minimum:
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


class _Bounds:
    """Tables with the messages that they were given, and what follows from them for every value."""

    def __init__(self, domains: Sequence[int], tables: Sequence[Table], learned: Learned | None = None) -> None:
        self._learned = learned or Learned.nothing(domains)
        self._first_left = list(self._learned.left)
        self._known: dict[Hashable, Costs] = {}
        self._held: list[object] = []  # so that no identity is given to another object
        self._same: dict[bytes, Costs] = {}
        self._left: list[Indices] = [np.arange(size) for size in domains]
        self._alone = [np.zeros(size) for size in domains]
        self._fixed = math.fsum(float(table.costs) for table in tables if not table.scope)
        for table in tables:
            if len(table.scope) == 1:
                self._alone[table.scope[0]] = self._alone[table.scope[0]] + table.costs
        self._tables = self._together([table for table in tables if len(table.scope) > 1])
        self._touching: list[list[tuple[int, int]]] = [[] for _ in domains]  # by variable: tables, and its dim there
        for at, table in enumerate(self._tables):
            for dim, v in enumerate(table.scope):
                self._touching[v].append((at, dim))
        self._messages = [[self._one(np.zeros(domains[v])) for v in table.scope] for table in self._tables]
        self._of_value = [np.full(size, -math.inf) for size in domains]  # what no assignment with a value is below
        self._least_of_table = [float(table.costs.min()) for table in self._tables]
        self._least_alone = [float(costs.min()) for costs in self._alone]
        self._sum = math.fsum([self._fixed, *self._least_of_table, *self._least_alone])
        if not math.isfinite(self._sum):
            raise PlanError("no assignment is possible: every combination is forbidden")
        if self._learned.messages:
            self._begin()
        self._upper = math.inf
        self.bound = self._sum
        """What no assignment is below that isn't left out."""
        self._grid = FINE * 2.0 ** math.floor(math.log2(abs(self.bound) or 1.0))

    def _begin(self) -> None:
        """Begin with the messages that other searches have left, where these raise the bound."""
        before = self._messages
        self._messages = [[self._one(self._learned.message(t.scope, v)) for v in t.scope] for t in self._tables]
        of_table = [float((self._heard(at, 0) + of[0]).min()) for at, of in enumerate(self._messages)]
        alone = [
            float((costs - sum(self._messages[at][dim] for at, dim in self._touching[v])).min())
            for v, costs in enumerate(self._alone)
        ]
        total = math.fsum([self._fixed, *of_table, *alone])
        if total > self._sum:
            self._sum, self._least_of_table, self._least_alone = total, of_table, alone
        else:
            self._messages = before

    def leave_values(self) -> None:
        """Leave for other searches which values there are; what was left out is out for all of them."""
        self._learned.left[:] = self._whole_left()

    def leave_messages(self) -> None:
        """Leave the messages."""
        left = self._whole_left()
        for table, messages in zip(self._tables, self._messages, strict=True):
            for v, message in zip(table.scope, messages, strict=True):
                whole = np.zeros(self._learned.domains[v])
                whole[left[v]] = message
                self._learned.messages[table.scope, v] = whole

    def _whole_left(self) -> list[Indices]:
        """The values that are left, by their numbers among all."""
        return [first[left] for first, left in zip(self._first_left, self._left, strict=True)]

    def sweep(self) -> None:
        """Send messages from the first variable to the last and back.

        Raises:
            PlanError: where nothing is possible.
        """
        self._known, self._held = {}, []
        for v in range(len(self._left)):
            self._visit(v, forward=True)
        for v in reversed(range(len(self._left))):
            self._visit(v, forward=False)

    def leave_out_above(self, cost: float) -> None:
        """Leave out, from now on, the values that no assignment of this cost or less has."""
        self._upper = min(self._upper, cost + NEAR * abs(cost))

    def widest(self) -> tuple[int, tuple[int, ...]]:
        """The size and the scope of the largest table that elimination would build."""
        return widest([len(values) for values in self._left], [table.scope for table in self._tables])

    def least_near(self, limit: int) -> tuple[Minimum | None, float]:
        """The least assignment of values that are near the bound, and what all others cost at least."""
        ladder = [*(abs(self.bound) * FIRST * FURTHER**step for step in range(STEPS)), math.inf]
        scopes = [table.scope for table in self._tables]

        def is_wide(above: float) -> bool:
            return widest([len(values) for values in self._near(above)], scopes, limit)[0] > limit

        step = bisect_left(ladder, True, key=is_wide) - 1
        while step >= 0:
            proven = self.bound + ladder[step]
            try:
                return self._least_of(self._near(ladder[step]), limit), proven
            except TooWide:
                step -= 2
            except PlanError:
                if proven == math.inf:
                    raise
                return None, proven
        return None, -math.inf

    def least_settled(self, limit: int) -> Minimum | None:
        """The least assignment where what ties most together has the values that look best; None where there is none.

        A variable of the largest table that is in most tables is settled, and then the next, until the rest is narrow:
        each at the value that is the best by its messages, given those that were settled before it.
        """
        values = [np.arange(len(left)) for left in self._left]
        scopes, settled = [table.scope for table in self._tables], dict[int, int]()
        while True:
            size, scope = widest([len(of) for of in values], scopes)
            if size <= limit:
                break
            v = max((v for v in scope if v not in settled), key=lambda v: len(self._touching[v]))
            settled[v] = int(
                sum((self._told(at, dim, settled) for at, dim in self._touching[v]), self._alone[v]).argmin()
            )
            values[v] = values[v][settled[v]][None]
        with suppress(PlanError):
            return self._least_of(values, limit)
        return None

    def _told(self, at: int, dim: int, settled: Mapping[int, int]) -> Costs:
        """What a table says of one of its variables where others are settled, with the messages of the rest."""
        table = self._tables[at]
        told = table.costs
        for i, v in enumerate(table.scope):
            if i != dim and v in settled:
                told = told.take([settled[v]], axis=i)
            elif i != dim:
                told = told + self._messages[at][i].reshape([-1 if j == i else 1 for j in range(told.ndim)])
        return np.asarray(told.min(axis=tuple(i for i in range(told.ndim) if i != dim)))

    def least(self, limit: int) -> Minimum:
        """The least assignment of all that is left; its bound says nothing of what was left out."""
        return self._least_of([np.arange(len(values)) for values in self._left], limit)

    def likeliest(self, scope: Sequence[int]) -> tuple[int, int]:
        """Of these variables the one with most values, and which of them is the best by the bounds."""
        variable = max(scope, key=lambda v: len(self._left[v]))
        return variable, int(self._of_value[variable].argmin())

    def with_values(self, v: int, values: Sequence[int], *, out: bool = False) -> _Bounds | None:
        """The same with these values of a variable alone, or without them; None where nothing is possible then."""
        found = copy(self)
        for name in ("_left", "_alone", "_tables", "_of_value", "_least_of_table", "_least_alone"):
            setattr(found, name, list(getattr(self, name)))
        found._messages = [list(of) for of in self._messages]
        kept = np.setdiff1d(np.arange(len(self._left[v])), values) if out else np.array(values)
        if not len(kept):
            return None
        try:
            found._keep(v, kept)
            found.sweep()
        except PlanError:
            return None
        return found

    def _together(self, tables: Sequence[Table]) -> list[Table]:
        """The tables, each added to one that has all of its variables where there is one."""
        found: list[Table] = []
        of: dict[int, list[int]] = defaultdict(list)
        for table in sorted(tables, key=lambda t: -len(t.scope)):
            scope = set(table.scope)
            wide = next((i for i in of[table.scope[0]] if scope <= set(found[i].scope)), None)
            if wide is None:
                for v in table.scope:
                    of[v].append(len(found))
                found.append(table)
            else:
                found[wide] = self._added(found[wide], table)
        return found

    def _added(self, wide: Table, table: Table) -> Table:
        key = "added", id(wide.costs), id(table.costs), tuple(wide.scope.index(v) for v in table.scope)
        if key not in self._known:
            self._held += wide.costs, table.costs
            self._known[key] = wide.costs + aligned(table, wide.scope)
        return Table(wide.scope, self._known[key])

    def _one(self, message: Costs) -> Costs:
        """The one array of these entries."""
        return self._same.setdefault(message.tobytes(), message)

    def _visit(self, v: int, *, forward: bool) -> None:
        """Let a variable hear what its tables say of it, and tell those that have variables to come."""
        touching = self._touching[v]
        heard = [self._heard(at, dim) for at, dim in touching]
        total = sum(heard, self._alone[v])
        around = math.fsum([self._sum, -self._least_alone[v], *(-self._least_of_table[at] for at, _ in touching)])
        self._of_value[v] = np.maximum(self._of_value[v], around + total)
        needed = np.isfinite(total) & (self._of_value[v] <= self._upper)
        if not needed.all():
            if not needed.any():
                raise PlanError("no assignment is possible: every combination is forbidden")
            kept = np.flatnonzero(needed)
            self._keep(v, kept)
            heard, total = [of[kept] for of in heard], total[kept]
        self.bound = max(self.bound, float(self._of_value[v].min()))
        ahead = [self._goes_on(at, v, forward) for at, _ in touching]
        share = total / max(sum(ahead), len(ahead) - sum(ahead), 1)
        rest = self._alone[v]
        for (at, dim), of, tell in zip(touching, heard, ahead, strict=True):
            message = share - of if tell else -of
            message = self._one(np.round((message - message.min()) / self._grid) * self._grid)
            self._messages[at][dim] = message
            self._least_of_table[at] = float((of + message).min())
            rest = rest - message
        self._least_alone[v] = float(rest.min())
        self._sum = math.fsum([around, self._least_alone[v], *(self._least_of_table[at] for at, _ in touching)])

    def _heard(self, at: int, dim: int) -> Costs:
        """What a table says of one of its variables, with the messages of the others."""
        costs, messages = self._tables[at].costs, self._messages[at]
        others = [i for i in range(costs.ndim) if i != dim]
        key = "heard", id(costs), dim, tuple(id(messages[i]) for i in others)
        if key not in self._known:
            self._held.append(costs)
            told = costs
            for i in others:
                told = told + messages[i].reshape([-1 if j == i else 1 for j in range(costs.ndim)])
            self._known[key] = told.min(axis=tuple(others))
        return self._known[key]

    def _goes_on(self, at: int, v: int, forward: bool) -> bool:
        """Whether a table has a variable that comes after this one."""
        scope = self._tables[at].scope
        return max(scope) > v if forward else min(scope) < v

    def _keep(self, v: int, kept: Indices) -> None:
        """Leave out the other values of a variable."""
        self._left[v], self._of_value[v] = self._left[v][kept], self._of_value[v][kept]
        self._alone[v] = self._alone[v][kept]
        for at, dim in self._touching[v]:
            table, messages = self._tables[at], self._messages[at]
            key = "kept", id(table.costs), dim, kept.tobytes()
            if key not in self._known:
                self._held.append(table.costs)
                self._known[key] = np.ascontiguousarray(table.costs.take(kept, dim))
            self._tables[at] = Table(table.scope, self._known[key])
            messages[dim] = self._one(messages[dim][kept])

    def _near(self, above: float) -> list[Indices]:
        """Of every variable the values whose bound is at most so much above the bound of all."""
        return [np.flatnonzero(of <= self.bound + above) for of in self._of_value]

    def _least_of(self, near: Sequence[Indices], limit: int) -> Minimum:
        """The least assignment of these values."""
        self._held += (table.costs for table in self._tables)
        tables = [Table((v,), costs[near[v]]) for v, costs in enumerate(self._alone)]
        tables += _among(near, self._tables, self._known)
        cost, picked = minimise([len(values) for values in near], tables, limit)
        chosen = [int(left[of[i]]) for left, of, i in zip(self._left, near, picked, strict=True)]
        return Minimum(cost + self._fixed, -math.inf, chosen)
