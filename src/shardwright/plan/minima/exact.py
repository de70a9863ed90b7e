"""The exact minimum of a sum of tables over discrete variables, by variable elimination.

    minimise   sum over tables t of  t[x at the variables of t]     over all assignments x

Eliminating a variable adds up the tables that mention it, minimises over it, and leaves one table over its
neighbours (Bertele and Brioschi, *Nonserial Dynamic Programming*, 1972). The next variable is always the one whose
table is smallest. On the graphs of neural networks, which are nearly trees, the tables stay small. Before one is made
that would not, `TooWide` is raised, never an answer that is not the minimum: `narrow.py` then leaves values out first.

Equal layers bring the same arrays, and what is made of the same arrays in the same way is made once: the eliminations
of a layer are worked out for one layer, whatever each layer then chooses. Among equal tables the variable comes first
around which least was eliminated. Of a chain of equal layers every second variable goes in the first round, every
second one of the rest in the next: a round needs one product of tables, so that the depth enters by its logarithm.
The order follows from the scopes of the tables alone, and is found once for all prices of a byte.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.errors import PlanError
from shardwright.plan.minima.tables import Costs, Indices, Table, join, without_singles

LIMIT = 1_000_000
"""The largest table that is built, in entries: to leave values out takes less time than larger ones."""

# As many entries of it are there at a time, which a processor's caches hold.
SLAB = 1 << 18


class TooWide(PlanError):
    """The smallest next table would exceed the limit of entries."""


def minimise(domains: Sequence[int], tables: Sequence[Table], limit: int = LIMIT) -> tuple[float, list[int]]:
    """The minimum and an assignment that attains it; among equals, the first value of a variable is preferred.

    Args:
        domains: the number of values of every variable.
        limit: the largest table that may be built, in entries.

    Raises:
        PlanError: where every assignment has infinite cost.
        TooWide: where a table would be larger than ``limit``.
    """
    # A variable of one value widens no table: nothing would keep the dims of tables below numpy's limit of 64.
    tables = without_singles(tables, domains)
    steps, wider = _steps(tuple(domains), tuple(table.scope for table in tables), limit)
    if wider:
        raise TooWide(f"the search would need a table of {wider:,} entries")
    rest = _eliminated(steps, tables, domains)
    if not math.isfinite(rest.total):
        raise PlanError("no assignment is possible: every combination is forbidden")
    return rest.total, rest.completed([0] * len(domains))


def without_narrow(domains: Sequence[int], tables: Sequence[Table], limit: int) -> Rest:
    """The same problem without the variables around which no table has more entries than ``limit``."""
    tables = without_singles(tables, domains)
    steps, _ = _steps(tuple(domains), tuple(table.scope for table in tables), limit)
    return _eliminated(steps, tables, domains)


@dataclass(frozen=True)
class Rest:
    """What is left of a problem when variables were eliminated: tables over the others, and what they all cost more.

    The best value of the variable of each step follows from those of its neighbours.
    """

    total: float
    tables: tuple[Table, ...]
    steps: tuple[_Step, ...]
    best: tuple[Indices, ...]

    def completed(self, picked: Sequence[int]) -> list[int]:
        """The same assignment with the best value for every variable that was eliminated."""
        found = [*picked]
        for step, of in zip(reversed(self.steps), reversed(self.best), strict=True):
            found[step.variable] = int(of[tuple(found[v] for v in step.neighbours)])
        return found


def _eliminated(steps: tuple[_Step, ...], tables: Sequence[Table], domains: Sequence[int]) -> Rest:
    """What is left after these steps."""
    total = sum(float(table.costs) for table in tables if not table.scope)
    every, found = [table.costs for table in tables], []
    known: dict[Hashable, tuple[Indices, Costs]] = {}
    for step in steps:
        touching = [every[number] for number in step.tables]
        made_of = step.kind, *map(id, touching)
        if made_of not in known:
            of = [Table(scope, costs) for scope, costs in zip(step.scopes, touching, strict=True)]
            known[made_of] = _least(of, (*step.neighbours, step.variable), domains)
        best, costs = known[made_of]
        found.append(best)
        every.append(costs)
        if not step.neighbours:
            total += float(costs)
    gone = {step.variable for step in steps}
    scopes = (*(table.scope for table in tables), *(step.neighbours for step in steps))
    left = (Table(of, costs) for of, costs in zip(scopes, every, strict=True) if of and gone.isdisjoint(of))
    return Rest(total, tuple(left), steps, tuple(found))


def widest(
    domains: Sequence[int], scopes: tuple[tuple[int, ...], ...], enough: float = math.inf
) -> tuple[int, tuple[int, ...]]:
    """The size and the scope of the largest table that `minimise` would build, from the scopes alone.

    Of those that are larger than ``enough`` it is the first.
    """
    largest: tuple[int, tuple[int, ...]] = 1, ()
    order = _Order(domains, scopes)
    while (following := order.next()) is not None:
        entries, _, variable = following
        together = order.eliminate(variable)
        if entries > largest[0]:
            largest = entries, tuple(sorted((variable, *together)))
        if entries > enough:
            break
    return largest


def settling(domains: Sequence[int], scopes: tuple[tuple[int, ...], ...], limit: float) -> Iterator[int]:
    """Variables without whose choice no table is larger than ``limit`` in the order that there is then.

    Of those that a table which is larger ties together, it is the one that most others are tied to.
    """
    order, tied = _Order(domains, scopes), _neighbours(scopes)
    while (following := order.next()) is not None:
        entries, _, variable = following
        if entries <= limit:
            order.eliminate(variable)
        else:
            several = (variable, *sorted(order.near[variable]))
            chosen = max(several, key=lambda v: len(tied[v]))
            order.settle(chosen)
            yield chosen


@lru_cache(maxsize=8)  # of searches at several prices tables have the same scopes
def _neighbours(scopes: tuple[tuple[int, ...], ...]) -> dict[int, frozenset[int]]:
    """The other variables that each is in a table with."""
    near: dict[int, set[int]] = defaultdict(set)
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    return {variable: frozenset(around - {variable}) for variable, around in near.items()}


class _Order:
    """In which order variables are eliminated: by the size of their table, then by age, then by number.

    Variables of one value are none. The age of a variable is how many of those around it went one after the other.
    """

    def __init__(self, domains: Sequence[int], scopes: tuple[tuple[int, ...], ...]) -> None:
        self._domains = domains
        single = frozenset(variable for variable, size in enumerate(domains) if size == 1)
        tied = _neighbours(scopes)
        self.near = {variable: {*(around - single)} for variable, around in tied.items() if variable not in single}
        """The variables around each that is left."""
        self._ranks = {
            variable: (math.prod([domains[v] for v in around], start=domains[variable]), 0)
            for variable, around in self.near.items()
        }
        self._heap = [(*rank, variable) for variable, rank in self._ranks.items()]
        heapq.heapify(self._heap)

    def next(self) -> tuple[int, int, int] | None:
        """The entries of the smallest table, the age of its variable, and that; None where none is left."""
        while self._heap:
            entries, age, variable = self._heap[0]
            if self._ranks.get(variable) == (entries, age):
                return entries, age, variable
            heapq.heappop(self._heap)  # its table or its age is no longer this
        return None

    def eliminate(self, variable: int) -> set[int]:
        """Eliminate a variable, which ties all around it to each other; these."""
        entries, age = self._ranks.pop(variable)
        together, domains, size = self.near.pop(variable), self._domains, self._domains[variable]
        for v in together:
            around = self.near[v]
            around.discard(variable)
            more = together - around
            more.discard(v)
            entries, old = self._ranks[v]
            entries //= size
            for new in more:
                entries *= domains[new]
            around |= more
            self._ranks[v] = rank = entries, max(age, old) + 1
            heapq.heappush(self._heap, (*rank, v))
        return together

    def settle(self, variable: int) -> None:
        """Take a variable away as if it had one value."""
        del self._ranks[variable]
        for v in self.near.pop(variable):
            self.near[v].discard(variable)
            entries, age = self._ranks[v]
            self._ranks[v] = rank = entries // self._domains[variable], age
            heapq.heappush(self._heap, (*rank, v))


@dataclass(frozen=True)
class _Step:
    """The elimination of a variable: of which tables, by their numbers, and over which neighbours one is left.

    ``kind`` is the same for steps whose tables mention the variables in the same places.
    """

    variable: int
    neighbours: tuple[int, ...]
    entries: int
    tables: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    kind: int


@lru_cache(maxsize=64)  # at each price of a byte tables have the same scopes
def _steps(
    domains: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], limit: float
) -> tuple[tuple[_Step, ...], int]:
    """The order in which variables are eliminated; each step leaves a table, which has the next number.

    It ends before a table would have more entries than ``limit``: with as many as the smallest would have, else with 0.
    """
    every = list(scopes)
    pending: dict[int, dict[int, None]] = defaultdict(dict)
    for number, scope in enumerate(scopes):
        for variable in scope:
            pending[variable][number] = None
    order = _Order(domains, scopes)
    found: list[_Step] = []
    kinds: dict[Hashable, int] = {}
    while (following := order.next()) is not None:
        entries, _, variable = following
        if entries > limit:
            return tuple(found), entries
        touching = pending.pop(variable)
        neighbours = tuple(sorted(order.eliminate(variable)))
        for number in touching:
            for v in every[number]:
                if v != variable:
                    del pending[v][number]
        for v in neighbours:
            pending[v][len(every)] = None
        every.append(neighbours)
        places = (*neighbours, variable)
        own = tuple(every[of] for of in touching)
        kind = kinds.setdefault(tuple(tuple(places.index(v) for v in scope) for scope in own), len(kinds))
        found.append(_Step(variable, neighbours, entries, tuple(touching), own, kind))
    return tuple(found), 0


def _least(tables: Sequence[Table], order: tuple[int, ...], domains: Sequence[int]) -> tuple[Indices, Costs]:
    """The best value of the last variable of ``order`` by those of the others, and the sum of the tables there."""
    entries = math.prod(domains[v] for v in order)
    at = next((i for i, v in enumerate(order[:-1]) if domains[v] > 1), None)
    if at is None or entries <= SLAB:
        joined = join(tables, order, domains)
        best = joined.argmin(axis=-1)
        return best, np.take_along_axis(joined, best[..., None], axis=-1)[..., 0]
    size = domains[order[at]]
    rows = max(1, SLAB * size // entries)
    found = [_least(*_slab(tables, order, domains, at, slice(i, min(i + rows, size)))) for i in range(0, size, rows)]
    return np.concatenate([best for best, _ in found], axis=at), np.concatenate([costs for _, costs in found], axis=at)


def _slab(
    tables: Sequence[Table], order: tuple[int, ...], domains: Sequence[int], at: int, some: slice
) -> tuple[list[Table], tuple[int, ...], list[int]]:
    """The same for some values of a variable."""
    variable, sizes = order[at], [*domains]
    sizes[variable] = some.stop - some.start
    cut = [Table(t.scope, t.costs[tuple(some if v == variable else slice(None) for v in t.scope)]) for t in tables]
    return cut, order, sizes
