"""Lower bounds of a sum of tables for every value of every variable, by messages between tables.

`narrow.py` says what messages are, and what the bounds are for.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.plan.search.exact import (
    Indices,
    Minimum,
    Table,
    aligned,
    among,
    minimise,
    settling,
    widest,
    work,
)
from shardwright.compiler.plan.search.min_sum import Costs
from shardwright.errors import PlanError


@dataclass(frozen=True)
class WarmStart:
    """The results of searches that help later ones over the same variables, at other costs.

    Messages, by the scope of the table and the variable, are a beginning. The values of every variable that are not
    among those ``left`` are in no assignment below what is to be beaten, which is of use where all costs are bounds of
    one thing.
    """

    domains: tuple[int, ...]
    left: list[Indices]
    messages: dict[tuple[tuple[int, ...], int], Costs] = field(default_factory=dict)

    @staticmethod
    def nothing(domains: Sequence[int]) -> WarmStart:
        """Return an empty start, for the first search."""
        return WarmStart((*domains,), [np.arange(size) for size in domains])

    def copied(self) -> WarmStart:
        """Return a copy to which a search may add what is not true for others."""
        return WarmStart(self.domains, list(self.left), dict(self.messages))

    @contextmanager
    def without(self, variables: Iterable[int]) -> Iterator[WarmStart]:
        """Inside, the same for a search that these variables are none of, which have one value there."""
        domains, left = list(self.domains), list(self.left)
        for v in variables:
            domains[v], left[v] = 1, np.zeros(1, dtype=np.intp)
        found = WarmStart(tuple(domains), left, self.messages)
        try:
            yield found
        finally:
            self.left[:] = [mine if size == 1 else of for mine, of, size in zip(self.left, left, domains, strict=True)]

    def message(self, scope: tuple[int, ...], v: int) -> Costs:
        """Return the message of a table to one of its variables, for the values that are left."""
        found = self.messages.get((scope, v))
        return np.zeros(len(self.left[v])) if found is None else found[self.left[v]]


NEAR = 1e-9  # what bounds may be off by rounding, as a share of the cost
FINE = 2.0**-28  # of the grid of messages, as a share of the bound
FIRST, FURTHER, STEPS = 1e-6, 1.5, 40  # the shares of the bound that e may be: the first, and how each follows


@dataclass(frozen=True)
class _Messages:
    """The messages of a variable to each of its tables, and the minima that follow.

    What it costs ``alone`` is held here, so that no other array is given its identity.
    """

    alone: Costs
    messages: tuple[Costs, ...]
    least_of_tables: tuple[float, ...]
    least_alone: float


class Bounds:
    """Tables with the messages that they were given, and what follows from them for every value."""

    def __init__(self, domains: Sequence[int], tables: Sequence[Table], learned: WarmStart | None = None) -> None:
        self._learned = learned or WarmStart.nothing(domains)
        self._first_left = list(self._learned.left)
        # Cached by the identity of arrays, which are held and never written to, and the dim or values that are taken.
        self._known: dict[Hashable, Costs] = {}
        self._answers: dict[Hashable, _Messages] = {}
        self._held: list[object] = []  # so that no identity is given to another object
        self._same: dict[bytes, Costs] = {}
        self._told_before: dict[tuple[int, int], Costs] = {}  # by table and dim: before values were left out
        self._left: list[Indices] = [np.arange(size) for size in domains]
        self._alone = [np.zeros(size) for size in domains]
        self._fixed = math.fsum(float(table.costs) for table in tables if not table.scope)
        for table in tables:
            if len(table.scope) == 1:
                self._alone[table.scope[0]] = self._alone[table.scope[0]] + table.costs
        self._alone = [self._one(costs) for costs in self._alone]
        self._tables = self._together([table for table in tables if len(table.scope) > 1])
        self._scopes = tuple(table.scope for table in self._tables)
        self._touching: list[list[tuple[int, int]]] = [[] for _ in domains]  # by variable: tables, and its dim there
        for at, table in enumerate(self._tables):
            for dim, v in enumerate(table.scope):
                self._touching[v].append((at, dim))
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for v, touching in enumerate(self._touching):
            alike[id(self._alone[v]), *((id(self._tables[at].costs), dim) for at, dim in touching)].append(v)
        self._alike = list(alike.values())
        # By direction and variable: which of its tables have a variable to come.
        self._ahead = {
            True: [tuple(max(self._scopes[at]) > v for at, _ in of) for v, of in enumerate(self._touching)],
            False: [tuple(min(self._scopes[at]) < v for at, _ in of) for v, of in enumerate(self._touching)],
        }
        self._messages = [[self._one(np.zeros(domains[v])) for v in table.scope] for table in self._tables]
        self._of_value = [np.full(size, -math.inf) for size in domains]  # what no assignment with a value is below
        least = {id(table.costs): float(table.costs.min()) for table in {id(t.costs): t for t in self._tables}.values()}
        self._least_of_table = [least[id(table.costs)] for table in self._tables]
        self._least_alone = [float(costs.min()) for costs in self._alone]
        self._sum = math.fsum([self._fixed, *self._least_of_table, *self._least_alone])
        if not math.isfinite(self._sum):
            raise PlanError("no assignment is possible: every combination is forbidden")
        if self._learned.messages:
            self._begin()
        self._upper = math.inf
        self.bound = self._sum
        """The lower bound of all assignments that are not left out."""
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
        """Leave the messages, of values that were left out the last that there were."""
        for at, table in enumerate(self._tables):
            for dim, v in enumerate(table.scope):
                self._learned.messages[table.scope, v] = self._whole_message(at, dim, v)

    def _whole_message(self, at: int, dim: int, v: int) -> Costs:
        """Return the message of a table for all values of a variable, each from when it was not yet left out."""
        before = self._told_before.get((at, dim))
        whole = np.zeros(self._learned.domains[v]) if before is None else before.copy()
        whole[self._first_left[v][self._left[v]]] = self._messages[at][dim]
        return whole

    def _whole_left(self) -> list[Indices]:
        """The values that are left, by their numbers among all."""
        return [first[left] for first, left in zip(self._first_left, self._left, strict=True)]

    def sweep(self) -> None:
        """Send messages from the first variable to the last and back.

        Raises:
            PlanError: where nothing is possible.
        """
        self._known, self._answers, self._held = {}, {}, []
        tied = [v for v, touching in enumerate(self._touching) if touching]
        for v in tied:
            self._visit(v, forward=True)
        self._leave_out()
        for v in reversed(tied):
            self._visit(v, forward=False)
        self._leave_out()

    def leave_out_above(self, cost: float) -> None:
        """Leave out, from now on, the values that no assignment of this cost or less has."""
        self._upper = min(self._upper, cost + NEAR * abs(cost))

    def widest(self) -> tuple[int, tuple[int, ...]]:
        """The size and the scope of the largest table that elimination would build."""
        return widest([len(values) for values in self._left], self._scopes)

    def least_near(self, most_work: float) -> tuple[Minimum | None, float]:
        """The least assignment of values that are near the bound, and what all others cost at least."""
        ladder = [*(abs(self.bound) * FIRST * FURTHER**step for step in range(STEPS)), math.inf]

        def is_much(above: float) -> bool:
            return self.work(most_work, above) > most_work

        step = -1 if is_much(ladder[0]) else bisect_left(ladder, True, lo=1, key=is_much) - 1
        if step < 0:
            return None, -math.inf
        proven = self.bound + ladder[step]
        try:
            return self._least_of(self._near(ladder[step]), math.inf), proven
        except PlanError:
            if proven == math.inf:
                raise
            return None, proven

    def least_settled(self, limit: int) -> Minimum | None:
        """The least assignment where what ties most together has the values that look best; None where there is none.

        Variables are settled until the rest is narrow: each at the value that is the best by its messages, given those
        that were settled before it.
        """
        values = [np.arange(len(left)) for left in self._left]
        settled = dict[int, int]()
        while widest(sizes := [len(of) for of in values], self._scopes, limit)[0] > limit:
            for v in settling(sizes, self._scopes, limit):
                told = (self._told(at, dim, settled) for at, dim in self._touching[v])
                settled[v] = int(sum(told, self._alone[v]).argmin())
                values[v] = values[v][settled[v]][None]
        with suppress(PlanError):
            return self._least_of(values, limit)
        return None

    def _told(self, at: int, dim: int, settled: Mapping[int, int]) -> Costs:
        """Return the minima of a table over one variable where others are settled, with the messages of the rest."""
        table = self._tables[at]
        told = table.costs
        for i, v in enumerate(table.scope):
            if i != dim and v in settled:
                told = told.take([settled[v]], axis=i)
            elif i != dim:
                told = told + self._messages[at][i].reshape([-1 if j == i else 1 for j in range(told.ndim)])
        return np.asarray(told.min(axis=tuple(i for i in range(told.ndim) if i != dim)))

    def work(self, most: float, above: float = math.inf) -> float:
        """Return how many entries elimination would add up, of the values with bounds so much above that of all."""
        near, tables = self._near(above), self._every_table()
        same: dict[bytes, int] = {}
        kept = [same.setdefault(values.tobytes(), len(same)) for values in near]
        alike = [(id(table.costs), *(kept[v] for v in table.scope)) for table in tables]
        return work([len(values) for values in near], tables, alike, most)

    def _every_table(self) -> list[Table]:
        return [*(Table((v,), costs) for v, costs in enumerate(self._alone)), *self._tables]

    def least(self, limit: float) -> Minimum:
        """The least assignment of all that is left; its bound says nothing of what was left out."""
        return self._least_of([np.arange(len(values)) for values in self._left], limit)

    def likeliest(self, scope: Sequence[int]) -> tuple[int, int]:
        """Of these variables the one with most values, and which of them is the best by the bounds."""
        variable = max(scope, key=lambda v: len(self._left[v]))
        return variable, int(self._of_value[variable].argmin())

    def with_values(self, v: int, values: Sequence[int], *, out: bool = False) -> Bounds | None:
        """Return the bounds for these values of a variable alone, or without them; None where nothing is possible."""
        found = copy(self)
        for name in ("_left", "_alone", "_tables", "_of_value", "_least_of_table", "_least_alone"):
            setattr(found, name, list(getattr(self, name)))
        found._messages = [list(of) for of in self._messages]
        found._told_before = dict(self._told_before)
        found._alike = [*([other for other in of if other != v] for of in self._alike if of != [v]), [v]]
        kept = np.setdiff1d(np.arange(len(self._left[v])), values) if out else np.array(values)
        if not len(kept):
            return None
        try:
            found._keep({v: kept})
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
                found.append(Table(table.scope, table.costs))  # what is added to it may tie all of it closely
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
        of_value = self._of_value[v] = np.maximum(self._of_value[v], around + total)
        if not np.isfinite(of_value).any():
            raise PlanError("no assignment is possible: every combination is forbidden")
        told = self._answer(v, heard, forward)
        self.bound = max(self.bound, float(of_value.min()))
        for (at, dim), message, least_of_table in zip(touching, told.messages, told.least_of_tables, strict=True):
            self._messages[at][dim] = message
            self._least_of_table[at] = least_of_table
        self._least_alone[v] = told.least_alone
        self._sum = math.fsum([around, told.least_alone, *told.least_of_tables])

    def _answer(self, v: int, heard: Sequence[Costs], forward: bool) -> _Messages:
        """Return the messages of a variable to its tables, once for all that hear and cost the same."""
        alone, ahead = self._alone[v], self._ahead[forward][v]
        key = id(alone), ahead, *map(id, heard)
        if key not in self._answers:
            self._held += heard
            self._answers[key] = self._told_to(alone, heard, ahead)
        return self._answers[key]

    def _told_to(self, alone: Costs, heard: Sequence[Costs], ahead: Sequence[bool]) -> _Messages:
        total = sum(heard, alone)
        possible = np.isfinite(total)
        share = total / max(sum(ahead), len(ahead) - sum(ahead), 1)
        messages, least, rest = [], [], alone
        for of, tell in zip(heard, ahead, strict=True):
            message = np.subtract(share if tell else 0.0, of, out=np.zeros(len(of)), where=possible)
            message -= message.min(where=possible, initial=math.inf)
            # What is impossible makes no table's minimum smaller.
            floor = (of + message).min(where=possible, initial=math.inf)
            np.maximum(floor - of, 0.0, out=message, where=~possible)
            message = self._one(np.round(message / self._grid) * self._grid)
            messages.append(message)
            least.append(float((of + message).min()))
            rest = rest - message
        return _Messages(alone, tuple(messages), tuple(least), float(rest.min(where=possible, initial=math.inf)))

    def _heard(self, at: int, dim: int) -> Costs:
        """Return the minima of a table over one of its variables, with the messages of the others."""
        told, messages = self._tables[at].costs, self._messages[at]
        for other in reversed(range(len(messages))):
            if other != dim:
                told = self._without(told, other if other < dim else told.ndim - 1, messages[other])
        return told

    def _without(self, costs: Costs, dim: int, message: Costs) -> Costs:
        """Return the minima of some costs over a dim, with the message of that; the dims after it are of others."""
        key = id(costs), dim, id(message)
        if key not in self._known:
            self._held += costs, message
            told = costs + message.reshape([-1, *(1 for _ in range(costs.ndim - dim - 1))])
            self._known[key] = np.minimum.reduce(told, axis=dim)
        return self._known[key]

    def _leave_out(self) -> None:
        """Leave out the values that no assignment has which costs as little as is looked for.

        Variables of the same tables keep the same values: those that one of them may have. So the tables of equal
        layers stay one array, and what follows from them is worked out once.

        Raises:
            PlanError: where nothing is possible.
        """
        kept: dict[int, Indices] = {}
        for variables in self._alike:
            least = np.minimum.reduce([self._of_value[v] for v in variables])
            needed = least <= min(self._upper, sys.float_info.max)
            if not needed.any():
                raise PlanError("no assignment is possible: every combination is forbidden")
            for v in variables:
                self._of_value[v] = least
            if not needed.all():
                kept.update(dict.fromkeys(variables, np.flatnonzero(needed)))
        self._keep(kept)

    def _keep(self, kept: Mapping[int, Indices]) -> None:
        """Leave out the other values of some variables."""
        touched = dict.fromkeys(at for v in kept for at, _ in self._touching[v])
        for at in touched:
            table, messages = self._tables[at], self._messages[at]
            for dim, v in enumerate(table.scope):
                if v in kept:
                    self._told_before[at, dim] = self._whole_message(at, dim, v)
                    messages[dim] = self._one(messages[dim][kept[v]])
            key = "kept", id(table.costs), *(kept[v].tobytes() if v in kept else b"" for v in table.scope)
            if key not in self._known:
                self._held.append(table.costs)
                every = (kept.get(v, np.arange(size)) for v, size in zip(table.scope, table.costs.shape, strict=True))
                self._known[key] = table.costs[np.ix_(*every)]
            self._tables[at] = Table(table.scope, self._known[key])
        for v, values in kept.items():
            self._left[v], self._of_value[v] = self._left[v][values], self._of_value[v][values]
            self._alone[v] = self._one(self._alone[v][values])

    def _near(self, above: float) -> list[Indices]:
        return [np.flatnonzero(of <= self.bound + above) for of in self._of_value]

    def _least_of(self, near: Sequence[Indices], limit: float) -> Minimum:
        self._held += (table.costs for table in self._tables)
        tables = among(near, self._every_table(), self._known)
        cost, picked = minimise([len(values) for values in near], tables, limit)
        chosen = [int(left[of[i]]) for left, of, i in zip(self._left, near, picked, strict=True)]
        return Minimum(cost + self._fixed, -math.inf, chosen)
