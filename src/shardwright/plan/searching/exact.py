"""The exact minimum of a sum of tables over discrete variables, by variable elimination.

    minimise   sum over tables t of  t[x at the variables of t]     over all assignments x

Eliminating a variable adds up the tables that mention it, minimises over it, and leaves one table over its
neighbours (Bertele and Brioschi, *Nonserial Dynamic Programming*, 1972). The next variable is always the one whose
table is smallest. On the graphs of neural networks, which are nearly trees, the tables stay small; where one would not,
`TooWide` is raised instead of an answer that is not the minimum.

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
import numpy.typing as npt

from shardwright.errors import PlanError

Costs = npt.NDArray[np.float64]


class TooWide(PlanError):
    """The smallest next table would exceed the limit of entries."""


@dataclass(frozen=True)
class Table:
    """What the choices of a few variables cost together: one dim per variable of ``scope``; infinity forbids."""

    scope: tuple[int, ...]
    costs: Costs


def minimise(domains: Sequence[int], tables: Sequence[Table], limit: int = 40_000_000) -> tuple[float, list[int]]:
    """The minimum and an assignment that attains it; among equals, the first value of a variable is preferred.

    Args:
        domains: the number of values of every variable.
        limit: the largest table that may be built, in entries.

    Raises:
        PlanError: where every assignment has infinite cost.
        TooWide: where a table would be larger than ``limit``.
    """
    # A variable of one value widens no table, so that nothing would keep the dims of tables below numpy's limit of 64.
    tables = _without_singles(tables, domains)
    kept = list(tables)  # so that no identity is given to another array
    pending: dict[int, list[Table]] = {variable: [] for variable in range(len(domains))}
    for table in tables:
        for variable in table.scope:
            pending[variable].append(table)
    total = sum(float(t.costs) for t in tables if not t.scope)
    decisions: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]] = []
    known: dict[Hashable, tuple[npt.NDArray[np.intp], Costs]] = {}
    # By width, then by age; an entry whose width or age is no longer that of its variable is passed over.
    ranks = {variable: (_width(variable, touching, domains), 0) for variable, touching in pending.items()}
    heap = [(*rank, variable) for variable, rank in ranks.items()]
    heapq.heapify(heap)
    while pending:
        width, age, variable = heapq.heappop(heap)
        if ranks.get(variable) != (width, age):
            continue
        if width > limit:
            raise TooWide(f"the search would need a table of {width:,} entries")
        del ranks[variable]
        touching = pending.pop(variable)
        scope = tuple(sorted({v for t in touching for v in t.scope} - {variable}))
        order = (*scope, variable)
        made_of = tuple((id(t.costs), tuple(order.index(v) for v in t.scope)) for t in touching)
        if made_of not in known:
            known[made_of] = _eliminated(touching, order, domains)
            kept += touching
        best, costs = known[made_of]
        decisions.append((variable, scope, best))
        message = Table(scope, costs)
        if not scope:
            total += float(costs)
        for neighbour in scope:
            pending[neighbour] = [t for t in pending[neighbour] if variable not in t.scope] + [message]
            ranks[neighbour] = _width(neighbour, pending[neighbour], domains), max(age, ranks[neighbour][1]) + 1
            heapq.heappush(heap, (*ranks[neighbour], neighbour))
    if not math.isfinite(total):
        raise PlanError("no assignment is possible: every combination is forbidden")
    chosen: dict[int, int] = {}
    for variable, scope, best in reversed(decisions):
        chosen[variable] = int(best[tuple(chosen[v] for v in scope)])
    return total, [chosen[v] for v in range(len(domains))]


def widest(domains: Sequence[int], scopes: Sequence[tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    """The size and the scope of the largest table that `minimise` would build, from the scopes alone."""
    near: dict[int, set[int]] = {variable: set() for variable, size in enumerate(domains) if size > 1}
    for scope in scopes:
        several = {variable for variable in scope if variable in near}
        for variable in several:
            near[variable] |= several
    heap = [(math.prod(domains[v] for v in scope), variable) for variable, scope in near.items()]
    widths = {variable: width for width, variable in heap}
    heapq.heapify(heap)
    largest: tuple[int, tuple[int, ...]] = 1, ()
    while near:
        width, variable = heapq.heappop(heap)
        if widths.get(variable) != width:
            continue
        del widths[variable]
        together = near.pop(variable)
        largest = max(largest, (width, tuple(sorted(together))))
        for neighbour in together - {variable}:
            near[neighbour] = (near[neighbour] | together) - {variable}
            widths[neighbour] = math.prod(domains[v] for v in near[neighbour])
            heapq.heappush(heap, (widths[neighbour], neighbour))
    return largest


def _without_singles(tables: Sequence[Table], domains: Sequence[int]) -> list[Table]:
    """The same costs over the variables that have a choice; what is one array stays one array."""
    reshaped: dict[tuple[int, tuple[int, ...]], Costs] = {}
    found = []
    for table in tables:
        scope = tuple(v for v in table.scope if domains[v] != 1)
        shape = tuple(domains[v] for v in scope)
        same = table.costs if len(scope) == len(table.scope) else table.costs.reshape(shape)
        found.append(Table(scope, reshaped.setdefault((id(table.costs), shape), same)))
    return found


def _width(variable: int, touching: list[Table], domains: Sequence[int]) -> int:
    return math.prod(domains[v] for v in {variable, *(v for t in touching for v in t.scope)})


def _eliminated(
    tables: list[Table], order: tuple[int, ...], domains: Sequence[int]
) -> tuple[npt.NDArray[np.intp], Costs]:
    """By the values of the others: the best value of the last variable of ``order``, and the sum there."""
    joined = _join(tables, order, domains)
    best = joined.argmin(axis=-1)
    return best, np.take_along_axis(joined, best[..., None], axis=-1)[..., 0]


def _join(tables: list[Table], scope: tuple[int, ...], domains: Sequence[int]) -> Costs:
    """The sum of the tables, over all variables of ``scope``."""
    joined = np.zeros([domains[v] for v in scope])
    for table in tables:
        order = [table.scope.index(v) for v in scope if v in table.scope]
        joined += table.costs.transpose(order).reshape([domains[v] if v in table.scope else 1 for v in scope])
    return joined
