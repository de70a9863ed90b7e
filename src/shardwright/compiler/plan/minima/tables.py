"""Sums of tables over discrete variables: what the exact search works on."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Table:
    """What the choices of a few variables cost together: one dim per variable of ``scope``; infinity forbids."""

    scope: tuple[int, ...]
    costs: Costs

    def at(self, picked: Sequence[int]) -> float:
        """What it costs where every variable has the value that was picked for it."""
        return float(self.costs[tuple(picked[v] for v in self.scope)])


@dataclass(frozen=True)
class Minimum:
    """A choice for every variable, what it costs, and what no choice is below."""

    cost: float
    bound: float
    picked: list[int]


def cost_at(tables: Iterable[Table], picked: Sequence[int]) -> float:
    """What tables cost together where every variable has the value that was picked for it."""
    return sum(table.at(picked) for table in tables)


def without_singles(tables: Sequence[Table], domains: Sequence[int]) -> list[Table]:
    """The same costs over the variables that have a choice; what is one array stays one array."""
    reshaped: dict[tuple[int, tuple[int, ...]], Costs] = {}
    found = []
    singles = {variable for variable, size in enumerate(domains) if size == 1}
    for table in tables:
        if singles.isdisjoint(table.scope):
            found.append(table)
            continue
        scope = tuple(v for v in table.scope if domains[v] != 1)
        shape = tuple(domains[v] for v in scope)
        same = reshaped.setdefault((id(table.costs), shape), table.costs.reshape(shape))
        found.append(Table(scope, same))
    return found


def among(values: Sequence[Indices], tables: Sequence[Table], known: dict[Hashable, Costs]) -> list[Table]:
    """The tables for some values of every variable alone; equal ones are one array, and kept in ``known``."""
    found = []
    for table in tables:
        key = "among", id(table.costs), tuple(values[v].tobytes() for v in table.scope)
        if key not in known:
            known[key] = table.costs[np.ix_(*(values[v] for v in table.scope))]
        found.append(Table(table.scope, known[key]))
    return found


def join(tables: Sequence[Table], scope: tuple[int, ...], domains: Sequence[int]) -> Costs:
    """The sum of the tables, over all variables of ``scope``."""
    joined: Costs = np.zeros([1 for _ in scope])
    for table in tables:
        more = aligned(table, scope)
        shape = np.broadcast_shapes(joined.shape, more.shape)
        joined = np.add(joined, more, out=joined if joined.shape == shape else np.empty(shape))
    return np.broadcast_to(joined, [domains[v] for v in scope])


def aligned(table: Table, scope: Sequence[int]) -> Costs:
    """The costs with a dim for every variable of ``scope``, of one entry for those that the table does not mention."""
    ordered = table.costs.transpose([table.scope.index(v) for v in scope if v in table.scope])
    sizes = iter(ordered.shape)
    return ordered.reshape([next(sizes) if v in table.scope else 1 for v in scope])
