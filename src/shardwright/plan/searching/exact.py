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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.errors import PlanError
from shardwright.plan.searching.tables import Costs, Indices, Table, join, without_singles

__all__ = ["LIMIT", "Costs", "Table", "TooWide", "minimise", "widest"]

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
    steps = _steps(tuple(domains), tuple(table.scope for table in tables))
    largest = max((step.entries for step in steps), default=1)
    if largest > limit:
        raise TooWide(f"the search would need a table of {largest:,} entries")
    total, best = _eliminated(steps, tables, domains)
    if not math.isfinite(total):
        raise PlanError("no assignment is possible: every combination is forbidden")
    chosen = [0] * len(domains)
    for step, of in zip(reversed(steps), reversed(best), strict=True):
        chosen[step.variable] = int(of[tuple(chosen[v] for v in step.neighbours)])
    return total, chosen


def _eliminated(steps: Sequence[_Step], tables: Sequence[Table], domains: Sequence[int]) -> tuple[float, list[Indices]]:
    """The minimum, and the best value of the variable of each step by those of its neighbours."""
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
    return total, found


def widest(
    domains: Sequence[int], scopes: Sequence[tuple[int, ...]], enough: float = math.inf
) -> tuple[int, tuple[int, ...]]:
    """The size and the scope of the largest table that `minimise` would build, from the scopes alone.

    Of those that are larger than ``enough`` it is the first.
    """
    near: dict[int, set[int]] = {variable: set() for variable, size in enumerate(domains) if size > 1}
    for scope in scopes:
        several = {variable for variable in scope if variable in near}
        for variable in several:
            near[variable] |= several
    heap = [(math.prod(domains[v] for v in scope), variable) for variable, scope in near.items()]
    widths = {variable: entries for entries, variable in heap}
    heapq.heapify(heap)
    largest: tuple[int, tuple[int, ...]] = 1, ()
    while near:
        entries, variable = heapq.heappop(heap)
        if widths.get(variable) != entries:
            continue
        del widths[variable]
        together = near.pop(variable)
        largest = max(largest, (entries, tuple(sorted(together))))
        if entries > enough:
            return largest
        for neighbour in together - {variable}:
            near[neighbour] = (near[neighbour] | together) - {variable}
            widths[neighbour] = math.prod(domains[v] for v in near[neighbour])
            heapq.heappush(heap, (widths[neighbour], neighbour))
    return largest


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


@lru_cache(maxsize=16)  # at each price of a byte tables have the same scopes
def _steps(domains: tuple[int, ...], scopes: tuple[tuple[int, ...], ...]) -> tuple[_Step, ...]:
    """The order in which variables are eliminated: by width, then by age. Each step leaves a table, the next number."""
    every = list(scopes)
    pending: dict[int, list[int]] = defaultdict(list)
    near: dict[int, set[int]] = defaultdict(set)
    for number, scope in enumerate(scopes):
        for variable in scope:
            pending[variable].append(number)
            near[variable].update(scope)
    ranks = {v: (math.prod(domains[of] for of in near[v]), 0) for v in pending}
    heap = [(*rank, variable) for variable, rank in ranks.items()]
    heapq.heapify(heap)
    found: list[_Step] = []
    kinds: dict[Hashable, int] = {}
    while pending:
        entries, age, variable = heapq.heappop(heap)
        if ranks.get(variable) != (entries, age):  # its width or age is no longer that of the variable
            continue
        del ranks[variable]
        touching = pending.pop(variable)
        neighbours = tuple(sorted(near.pop(variable) - {variable}))
        for v in neighbours:
            pending[v] = [of for of in pending[v] if variable not in every[of]] + [len(every)]
            near[v] = (near[v] | {*neighbours}) - {variable}
            ranks[v] = math.prod(domains[of] for of in near[v]), max(age, ranks[v][1]) + 1
            heapq.heappush(heap, (*ranks[v], v))
        every.append(neighbours)
        order = (*neighbours, variable)
        own = tuple(every[of] for of in touching)
        kind = kinds.setdefault(tuple(tuple(order.index(v) for v in scope) for scope in own), len(kinds))
        found.append(_Step(variable, neighbours, entries, tuple(touching), own, kind))
    return tuple(found)


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
