"""Values of variables that no least assignment needs, and a proof that none does.

Let the tables that mention a variable v be T_1 ... T_k, and for two of its values

    D(s, t) = sum over i of the largest T_i[v = t, c] - T_i[v = s, c] over all choices c of the table's other variables.

*Dominated values.* Where D(s, t) <= 0, every assignment x with x_v = s costs at least as much as the same one with
x_v = t instead: no table without v changes, and those with v change by the sum over i of T_i[t, x] - T_i[s, x], which
is at most D(s, t). So some least assignment does without s, and s may be left out. Two values of equal rows dominate
each other; the first one stays. What is left is a problem of the same kind with the same minimum, and the argument
holds for it again: other values are then dominated, as the largest difference is over fewer choices (Desmet and others,
*The dead-end elimination theorem*, 1992; this is Goldstein's criterion). An entry that is infinite for both values
forbids both assignments, and does not count.

*Impossible values.* Where a table is infinite for s whatever its other variables are, every assignment with s costs
infinity, and s may be left out.

Tables whose variables lie among another's are added to it first, which makes D smaller and changes no sum. Values are
left out one at a time, those of a variable from the last to the first, each for the sake of one that is still there: so
one stays, and ties are kept for the first value.

Variables around which the very same arrays stand have the same answer, which is worked out once: equal layers are
pruned at the price of one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shardwright.plan.searching.tables import Costs, Indices, Table, aligned

# Of every table so many columns are looked at first, for all pairs of values, and then so many for those that are left:
# where a value is better in one of them, it is not dominated.
COLUMNS, MORE_COLUMNS = 48, 512
# As many pairs are looked at together.
PAIRS = 4096


class Pruned:
    """What is known of values around equal arrays, from one pruning to the next."""

    def __init__(self) -> None:
        self.kept: list[Costs] = []  # so that no identity is given to another array
        self.answers: dict[Hashable, Indices] = {}
        self.smaller: dict[Hashable, Costs] = {}


def needed(
    tables: Sequence[Table], domains: Mapping[int, int], before: Pruned | None = None
) -> tuple[list[Table], dict[int, Indices]]:
    """The tables over the values that are left, and which those are for each variable of ``domains``.

    Args:
        before: what earlier prunings found, of which most may hold still.
    """
    pruning = _Pruning(list(tables), dict(domains), before or Pruned())
    while pruning.round():
        pass
    return pruning.tables, pruning.left


class _Pruning:
    """The tables as they become smaller."""

    def __init__(self, tables: list[Table], domains: dict[int, int], known: Pruned) -> None:
        self.tables, self._known = tables, known
        self.left: dict[int, Indices] = {variable: np.arange(size) for variable, size in domains.items()}
        self._positions: dict[int, list[int]] = {variable: [] for variable in domains}
        for position, table in enumerate(tables):
            for variable in table.scope:
                self._positions[variable].append(position)
        self._changed = set(domains)  # the variables around which something changed

    def round(self) -> bool:
        """Look at every variable around which a table changed; whether there is more to do."""
        for variable in sorted(self._changed):
            self._changed.discard(variable)
            touching = [self.tables[position] for position in self._positions[variable]]
            order = {v: i for i, v in enumerate(dict.fromkeys(v for t in touching for v in t.scope))}
            key = (
                variable in order and order[variable],
                *((id(t.costs), *(order[v] for v in t.scope)) for t in touching),
            )
            if key not in self._known.answers:
                self._known.kept += [table.costs for table in touching]
                self._known.answers[key] = _undominated(_rows(touching, variable), len(self.left[variable]))
            if len(self._known.answers[key]) < len(self.left[variable]):
                self._keep(variable, self._known.answers[key])
        return bool(self._changed)

    def _keep(self, variable: int, values: Indices) -> None:
        self.left[variable] = self.left[variable][values]
        for position in self._positions[variable]:
            table = self.tables[position]
            axis = table.scope.index(variable)
            key = id(table.costs), axis, values.tobytes()
            if key not in self._known.smaller:
                self._known.kept.append(table.costs)
                self._known.smaller[key] = np.ascontiguousarray(table.costs.take(values, axis))
            self.tables[position] = Table(table.scope, self._known.smaller[key])
            self._changed.update(v for v in table.scope if v != variable)


def _rows(tables: Sequence[Table], variable: int) -> list[Costs]:
    """The tables as a row per value of the variable, added up where one has all the variables of another."""
    found: list[Table] = []
    for table in sorted(tables, key=lambda t: -len(t.scope)):
        wide = next((i for i, t in enumerate(found) if set(table.scope) <= set(t.scope)), None)
        if wide is None:
            found.append(table)
        else:
            scope = found[wide].scope
            found[wide] = Table(scope, found[wide].costs + aligned(table, scope))
    return [np.moveaxis(t.costs, t.scope.index(variable), 0).reshape(t.costs.shape[t.scope.index(variable)], -1)
            for t in found]  # fmt: skip


def _undominated(tables: Sequence[Costs], size: int) -> Indices:
    """The values, rows of all the tables, that are possible and that no other one dominates."""
    possible = np.ones(size, dtype=bool)
    for table in tables:
        possible &= np.isfinite(table).any(axis=1)
    if not possible.any():
        return np.arange(size)  # nothing is possible at all, which who minimises finds out
    alive = possible.copy()
    likely = _likelier(tables, _likely(tables, size))
    for s in range(size - 1, -1, -1):
        if alive[s]:
            others = likely[s] & alive
            alive[s] = not any(_dominates(tables, t, s) for t in np.flatnonzero(others).tolist())
    return np.flatnonzero(alive)


def _likely(tables: Sequence[Costs], size: int) -> npt.NDArray[np.bool_]:
    """Whether t may dominate s, for all s and t, by a few columns of every table: at most what all columns say."""
    total = np.zeros((size, size))
    for table in tables:
        some = table[:, np.unique(np.linspace(0, table.shape[1] - 1, COLUMNS).astype(int))]
        with np.errstate(invalid="ignore"):  # what is forbidden here and free there is not known to be better
            total += _largest(some[None], some[:, None])
    return total <= 0


def _likelier(tables: Sequence[Costs], likely: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The same by more columns, for the pairs that are left."""
    np.fill_diagonal(likely, False)
    pairs = np.argwhere(likely)
    for start in range(0, len(pairs), PAIRS):
        s, t = pairs[start : start + PAIRS].T
        total = np.zeros(len(s))
        for table in tables:
            some = table[:, np.unique(np.linspace(0, table.shape[1] - 1, MORE_COLUMNS).astype(int))]
            with np.errstate(invalid="ignore"):
                total += _largest(some[t], some[s])
        likely[s, t] = total <= 0
    return likely


def _dominates(tables: Sequence[Costs], t: int, s: int) -> bool:
    """Whether D(s, t) <= 0."""
    return sum(float(_largest(table[t], table[s])) for table in tables) <= 0


def _largest(better: Costs, worse: Costs) -> Costs:
    """The largest difference along the last dim, where not both are infinite; negative infinity where all are."""
    with np.errstate(invalid="ignore"):
        difference = better - worse
    return np.asarray(np.where(np.isnan(difference), -np.inf, difference).max(axis=-1))
