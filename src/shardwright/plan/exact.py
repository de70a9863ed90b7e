"""The exact minimum of a sum of tables over discrete variables, by variable elimination.

    minimise   sum over factors f of  table_f[x at the variables of f]      over all assignments x

Eliminating a variable adds up the tables that mention it, minimises over it, and leaves one table over its
neighbours (Bertele and Brioschi, *Nonserial Dynamic Programming*, 1972). The next variable is always the one whose
table is smallest. On the graphs of neural networks, which are nearly trees, the tables stay small and the whole is
linear in depth; where one would not, `TooWide` is raised instead of an answer that is not the minimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwright.errors import PlanError

Table = npt.NDArray[np.float64]


class TooWide(PlanError):
    """The smallest next table would exceed the limit of entries."""


@dataclass(frozen=True)
class Factor:
    """A table of costs with one dim per variable of ``scope``; infinity forbids a combination."""

    scope: tuple[int, ...]
    table: Table


def minimise(domains: Sequence[int], factors: Sequence[Factor], limit: int = 40_000_000) -> tuple[float, list[int]]:
    """The minimum and an assignment that attains it; among equals, the first value of a variable is preferred.

    Args:
        domains: the number of values of every variable.
        limit: the largest table that may be built, in entries.

    Raises:
        PlanError: where every assignment has infinite cost.
        TooWide: where a table would be larger than ``limit``.
    """
    # A variable of one value widens no table, so that nothing would keep the dims of tables below numpy's limit of 64.
    factors = [_without_singles(factor, domains) for factor in factors]
    pending = {variable: [f for f in factors if variable in f.scope] for variable in range(len(domains))}
    total = sum(float(f.table) for f in factors if not f.scope)
    decisions: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]] = []
    while pending:
        variable = min(pending, key=lambda v: _width(v, pending[v], domains))
        if _width(variable, pending[variable], domains) > limit:
            raise TooWide(f"the search would need a table of {_width(variable, pending[variable], domains):,} entries")
        touching = pending.pop(variable)
        scope = tuple(sorted({v for f in touching for v in f.scope} - {variable}))
        joined = _join(touching, (*scope, variable), domains)
        best = joined.argmin(axis=-1)
        decisions.append((variable, scope, best))
        message = Factor(scope, np.take_along_axis(joined, best[..., None], axis=-1)[..., 0])
        if not scope:
            total += float(message.table)
        for neighbour in scope:
            pending[neighbour] = [f for f in pending[neighbour] if variable not in f.scope] + [message]
    if not math.isfinite(total):
        raise PlanError("no assignment is possible: every combination is forbidden")
    chosen: dict[int, int] = {}
    for variable, scope, best in reversed(decisions):
        chosen[variable] = int(best[tuple(chosen[v] for v in scope)])
    return total, [chosen[v] for v in range(len(domains))]


def _without_singles(factor: Factor, domains: Sequence[int]) -> Factor:
    """The same costs over the variables that have a choice."""
    scope = tuple(v for v in factor.scope if domains[v] != 1)
    return Factor(scope, factor.table.reshape([domains[v] for v in scope]))


def _width(variable: int, touching: list[Factor], domains: Sequence[int]) -> int:
    return math.prod(domains[v] for v in {variable, *(v for f in touching for v in f.scope)})


def _join(factors: list[Factor], scope: tuple[int, ...], domains: Sequence[int]) -> Table:
    """The sum of the tables, over all variables of ``scope``."""
    joined = np.zeros([domains[v] for v in scope])
    for factor in factors:
        order = [factor.scope.index(v) for v in scope if v in factor.scope]
        joined += factor.table.transpose(order).reshape([domains[v] if v in factor.scope else 1 for v in scope])
    return joined
