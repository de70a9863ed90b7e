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
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.errors import PlanError
from shardwright.plan.searching.tables import Costs, Indices, Table, join, width, without_singles

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
    elimination = _Elimination(list(domains), tables)
    elimination.run(limit)
    if not math.isfinite(elimination.total):
        raise PlanError("no assignment is possible: every combination is forbidden")
    return elimination.total, elimination.assignment()


def widest(domains: Sequence[int], scopes: Sequence[tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    """The size and the scope of the largest table that `minimise` would build, from the scopes alone."""
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
        for neighbour in together - {variable}:
            near[neighbour] = (near[neighbour] | together) - {variable}
            widths[neighbour] = math.prod(domains[v] for v in near[neighbour])
            heapq.heappush(heap, (widths[neighbour], neighbour))
    return largest


@dataclass(frozen=True)
class _Decision:
    """The best value of a variable by the values of its neighbours."""

    variable: int
    scope: tuple[int, ...]
    best: Indices


class _Elimination:
    """The tables as variables leave them."""

    def __init__(self, domains: list[int], tables: Sequence[Table]) -> None:
        self.domains = domains
        self.decisions: list[_Decision] = []
        self._known: dict[Hashable, tuple[Indices, Costs]] = {}
        self._kept: list[Table] = []  # so that no identity is given to another array
        # A variable of one value widens no table: nothing would keep the dims of tables below numpy's limit of 64.
        tables = without_singles(tables, domains)
        self.total = sum(float(table.costs) for table in tables if not table.scope)
        self.pending: dict[int, list[Table]] = {variable: [] for variable in range(len(domains))}
        for table in tables:
            for variable in table.scope:
                self.pending[variable].append(table)
        # The order of the remaining variables: by width, then by age.
        self._ranks = {v: (width(v, touching, domains), 0) for v, touching in self.pending.items()}
        self._heap = [(*rank, variable) for variable, rank in self._ranks.items()]
        heapq.heapify(self._heap)

    def run(self, limit: int) -> None:
        """Eliminate every variable; above ``limit`` entries give up."""
        while self.pending:
            entries, age, variable = heapq.heappop(self._heap)
            if self._ranks.get(variable) == (entries, age):  # else its width or age is no longer that of the variable
                if entries > limit:
                    raise TooWide(f"the search would need a table of {entries:,} entries")
                self._eliminate(variable, age)

    def _eliminate(self, variable: int, age: int) -> None:
        del self._ranks[variable]
        touching = self.pending.pop(variable)
        scope = tuple(sorted({v for t in touching for v in t.scope} - {variable}))
        order = (*scope, variable)
        made_of = tuple((id(t.costs), *(order.index(v) for v in t.scope)) for t in touching)
        if made_of not in self._known:
            self._known[made_of] = _least(touching, order, self.domains)
            self._kept += touching
        best, costs = self._known[made_of]
        self.decisions.append(_Decision(variable, scope, best))
        if not scope:
            self.total += float(costs)
        self._pass_on(Table(scope, costs), variable, age)

    def _pass_on(self, message: Table, variable: int, age: int) -> None:
        """Give the neighbours what the variable leaves."""
        for v in message.scope:
            self.pending[v] = [t for t in self.pending[v] if variable not in t.scope] + [message]
            self._ranks[v] = width(v, self.pending[v], self.domains), max(age, self._ranks[v][1]) + 1
            heapq.heappush(self._heap, (*self._ranks[v], v))

    def assignment(self) -> list[int]:
        """The values that attain the minimum, the last decision first."""
        chosen: dict[int, int] = {}
        for decision in reversed(self.decisions):
            at = tuple(chosen[v] for v in decision.scope)
            chosen[decision.variable] = int(decision.best[at])
        return [chosen[v] for v in range(len(chosen))]


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
