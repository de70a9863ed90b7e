"""The minimum of a sum of tables where some variables tie all others together.

The output of an encoder, or a table of positions, is read by every layer: with it in the scope of every table,
elimination is too wide. A few *common* variables are taken out, and each table that reads them chooses them for itself:

    minimise   sum over tables t of   min over c of  t[x, c] + share_t[c] + price_t[c]

where what only the common variables cost is shared out evenly among the tables that read them, and the prices of one
choice sum to zero over the tables. Whatever the prices, that is no greater than the minimum (Lagrangian decomposition:
Guignard and Kim, *Mathematical Programming* 39, 1987). Prices rise where a table chooses otherwise than most
(a subgradient step). What most choose is tried for all, and everything else is decided anew: the least of those
is the answer, and with it comes the bound. Where all tables choose alike, it is the minimum.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from shardwright.errors import PlanError
from shardwright.plan.searching.exact import LIMIT, Costs, Table, TooWide, minimise, widest
from shardwright.plan.searching.tables import aligned, join

# Where it takes more variables, no few tie the others together.
MOST_COMMON = 16
ROUNDS = 6
ENOUGH = 1e-3  # a gap, as a share of the cost, that is worth no further round
TRIES = 1000  # of values for what ties all together, until something is possible


@dataclass(frozen=True)
class Minimum:
    """A choice for every variable, what it costs, and what no choice is below."""

    cost: float
    bound: float
    picked: list[int]


def least(domains: Sequence[int], tables: Sequence[Table], limit: int = LIMIT) -> Minimum:
    """The minimum, or, where elimination is too wide and a few variables are why, a choice near it and a bound.

    Args:
        domains: the number of values of every variable.
        limit: the largest table that may be built, in entries.

    Raises:
        PlanError: where every assignment has infinite cost.
        TooWide: where a table would be larger than ``limit``, and no few variables are why.
    """
    try:
        cost, picked = minimise(domains, tables, limit)
        return Minimum(cost, cost, picked)
    except TooWide:
        common = _common(domains, tables, limit)
        if not common:
            raise
    return _Cases(domains, tables, common, limit).found()


def _common(domains: Sequence[int], tables: Sequence[Table], limit: int) -> frozenset[int]:
    """The variables without which no table is larger than the limit: of each that is, the one that most tables read."""
    scopes = [table.scope for table in tables]
    readers = Counter(variable for scope in scopes for variable in scope)
    common: set[int] = set()
    while len(common) <= MOST_COMMON:
        left = [1 if variable in common else size for variable, size in enumerate(domains)]
        size, scope = widest(left, scopes)
        if size <= limit:
            return frozenset(common)
        common.add(max(scope, key=lambda variable: (readers[variable], variable)))
    return frozenset()


class _Cases:
    """One minimisation with common variables."""

    def __init__(self, domains: Sequence[int], tables: Sequence[Table], common: Set[int], limit: int) -> None:
        self._domains, self._tables, self._limit = domains, tables, limit
        self._common = sorted(common)
        self._apart = [table for table in tables if not common & set(table.scope)]
        reading = [table for table in tables if common & set(table.scope) and set(table.scope) - common]
        only = [table for table in tables if set(table.scope) <= common and table.scope]
        self._readers: dict[tuple[int, ...], list[int]] = defaultdict(list)  # by the common variables that they read
        self._costs: list[Costs] = []  # of each table that reads common variables, these first
        self._rest: list[tuple[int, ...]] = []
        for at, table in enumerate(reading):
            shared = tuple(variable for variable in table.scope if variable in common)
            self._rest.append(tuple(variable for variable in table.scope if variable not in common))
            self._costs.append(aligned(table, (*shared, *self._rest[-1])).reshape([self._size(shared), -1]))
            self._readers[shared].append(at)
        self._alone = sum(self._share_out(table) for table in only)
        self._prices = [np.zeros(len(costs)) for costs in self._costs]
        self._others = [1 if variable in common else size for variable, size in enumerate(domains)]
        self._best, self._tried = Minimum(math.inf, -math.inf, []), set[tuple[int, ...]]()

    def found(self) -> Minimum:
        """The best choice of some rounds, and the best bound.

        Raises:
            PlanError: where every assignment has infinite cost.
            TooWide: where none was found that is possible.
        """
        bound = -math.inf
        for at in range(ROUNDS):
            relaxed, chosen, picked = self._relaxed()
            bound = max(bound, relaxed)
            for case in self._candidates(chosen, picked):
                self._try(case)
            if at == 0 and not math.isfinite(self._best.cost):
                self._try(self._possible(chosen))
            if self._best.cost - bound <= ENOUGH * abs(self._best.cost):
                break
            possible = math.isfinite(self._best.cost)
            self._raise_prices(chosen, self._best.cost - relaxed if possible else abs(relaxed) / 100)
        if not math.isfinite(self._best.cost):
            raise TooWide("the search would need a larger table, and no possible choice was found for what ties it")
        return Minimum(self._best.cost, min(bound, self._best.cost), self._best.picked)

    def _try(self, case: tuple[int, ...] | None) -> None:
        """Keep the best of this case; where it is the best so far, try what is best beside it, too."""
        while case is not None and case not in self._tried:
            self._tried.add(case)
            decided = self._decided(case)
            if decided.cost >= self._best.cost:
                return
            self._best = decided
            case = self._best_beside(decided.picked)

    def _possible(self, chosen: Sequence[int]) -> tuple[int, ...] | None:
        """A case that is possible, one common variable settled after the other; None where none was found.

        A value is taken where everything else would be possible if each table chose what is not settled for itself.
        Where none of a variable is, the one before takes another.

        Raises:
            PlanError: where there is none.
        """
        votes = self._votes(chosen)
        in_turn = [
            [*dict.fromkeys([*(value for value, _ in votes[variable].most_common()), *range(self._domains[variable])])]
            for variable in self._common
        ]
        case: list[int] = []
        left = [list(in_turn[0])]
        for _ in range(TRIES):
            if left[-1]:
                case.append(left[-1].pop(0))
                if not self._may_be(case):
                    case.pop()
                elif len(case) == len(self._common):
                    return tuple(case)
                else:
                    left.append(list(in_turn[len(case)]))
            elif case:
                left.pop()
                case.pop()
            else:
                raise PlanError("no assignment is possible: every combination is forbidden")
        return None

    def _may_be(self, case: Sequence[int]) -> bool:
        """Whether anything is possible with the first common variables settled, each table choosing the others."""
        settled = dict(zip(self._common, case, strict=False))
        free = set(self._common) - settled.keys()
        tables = []
        for table in self._tables:
            at = _at(table, settled)
            dims = tuple(i for i, variable in enumerate(at.scope) if variable in free)
            tables.append(Table(at.scope, at.costs.min(axis=dims, keepdims=True)) if dims else at)
        try:
            minimise(self._others, tables, self._limit)
        except TooWide:
            raise
        except PlanError:
            return False
        return True

    def _size(self, variables: Sequence[int]) -> int:
        return math.prod(self._domains[variable] for variable in variables)

    def _share_out(self, table: Table) -> float:
        """Give each table that reads these variables its share of what they cost; the least of it where none does."""
        reading = [(shared, at) for shared, all_of in self._readers.items() for at in all_of]
        among = [(shared, at) for shared, at in reading if set(table.scope) <= set(shared)]
        for shared, at in among:
            whole = join([table], shared, self._domains)
            self._costs[at] = self._costs[at] + whole.reshape(-1, 1) / len(among)
        return 0.0 if among else float(table.costs.min())

    def _relaxed(self) -> tuple[float, list[int], list[int]]:
        """The least cost where each table chooses for itself: that, what each chooses, and the other variables."""
        tables = list(self._apart)
        for costs, prices, rest in zip(self._costs, self._prices, self._rest, strict=True):
            of = (costs + prices[:, None]).min(axis=0)
            tables.append(Table(rest, of.reshape([self._domains[variable] for variable in rest])))
        cost, picked = minimise(self._others, tables, self._limit)
        chosen = []
        for costs, prices, rest in zip(self._costs, self._prices, self._rest, strict=True):
            at = np.ravel_multi_index([picked[v] for v in rest], [self._domains[v] for v in rest])
            chosen.append(int((costs[:, at] + prices).argmin()))
        return cost + self._alone, chosen, picked

    def _candidates(self, chosen: Sequence[int], picked: list[int]) -> Iterator[tuple[int, ...]]:
        """What to try for the common variables: what most tables chose, and what is best for all others as picked."""
        votes = self._votes(chosen)
        yield tuple(votes[variable].most_common(1)[0][0] if votes[variable] else 0 for variable in self._common)
        best = self._best_beside(picked)
        if best is not None:
            yield best

    def _votes(self, chosen: Sequence[int]) -> Mapping[int, Counter[int]]:
        """How many tables chose each value of a common variable."""
        votes: dict[int, Counter[int]] = defaultdict(Counter)
        for shared, readers in self._readers.items():
            for at in readers:
                each = np.unravel_index(chosen[at], [self._domains[variable] for variable in shared])
                for variable, value in zip(shared, each, strict=True):
                    votes[variable][int(value)] += 1
        return votes

    def _best_beside(self, picked: Sequence[int]) -> tuple[int, ...] | None:
        """The common variables that are best where all others are as picked; None where nothing is possible."""
        domains = [size if v in self._common else 1 for v, size in enumerate(self._domains)]
        others = {variable: value for variable, value in enumerate(picked) if variable not in self._common}
        tables = [_at(table, others) for table in self._tables if set(table.scope) & set(self._common)]
        try:
            _, values = minimise(domains, tables, self._limit)
        except PlanError:
            return None
        return tuple(values[variable] for variable in self._common)

    def _decided(self, case: tuple[int, ...]) -> Minimum:
        """The best choice where the common variables are those of a case."""
        fixed = dict(zip(self._common, case, strict=True))
        tables = [_at(table, fixed) for table in self._tables]
        try:
            cost, picked = minimise(self._others, tables, self._limit)
        except TooWide:
            raise
        except PlanError:
            return Minimum(math.inf, -math.inf, [])
        return Minimum(cost, -math.inf, [fixed.get(variable, value) for variable, value in enumerate(picked)])

    def _raise_prices(self, chosen: Sequence[int], gap: float) -> None:
        """Make what a table chose dearer for it, and cheaper for the others that read the same, where they differ."""
        steps = []
        for readers in self._readers.values():
            size = len(self._prices[readers[0]])
            ones = np.array([np.eye(1, size, chosen[at])[0] for at in readers])
            steps.append(ones - ones.mean(axis=0))
        length = sum(float((step**2).sum()) for step in steps)
        if length:
            for readers, step in zip(self._readers.values(), steps, strict=True):
                for at, of in zip(readers, step, strict=True):
                    self._prices[at] = self._prices[at] + of * (gap / length)


def _at(table: Table, fixed: Mapping[int, int]) -> Table:
    """A table where some variables have but one value."""
    index = tuple(slice(fixed[v], fixed[v] + 1) if v in fixed else slice(None) for v in table.scope)
    return Table(table.scope, table.costs[index])
