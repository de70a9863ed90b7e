"""The exact minimum of a sum of tables over discrete variables, by variable elimination.

    minimise   sum over tables t of  t[x at the variables of t]     over all assignments x

Eliminating a variable adds up the tables that mention it, minimises over it, and leaves one table over its
neighbours (Bertele and Brioschi, *Nonserial Dynamic Programming*, 1972). The next variable is one whose table is
small. On the graphs of neural networks, which are nearly trees, the tables stay small. Before one is made
that would not, `TooWide` is raised, never an answer that is not the minimum: `narrow.py` then leaves values out first.

Equal layers bring the same arrays, and what is made of the same arrays in the same way is made once: the eliminations
of a layer are worked out for one layer, whatever each layer then chooses. Tables count as larger around a variable
where more was eliminated before. So a chain of equal layers does not go from its end: every second variable goes in
the first round, every second one of the rest in the next. A round needs one product of tables, so that the depth enters
by its logarithm.
The order follows from the scopes of the tables alone, and is found once for all prices of a byte.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.common.stages import in_stage
from shardwright.compiler.plan.search.min_sum import Costs, min_sum
from shardwright.errors import PlanError

Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Table:
    """The costs of the choices of a few variables: one dim per variable of ``scope``; infinity forbids.

    ``loose`` names two of the variables that are tied loosely: for a value of the one, nearly all values of the other
    cost the same, and the rest less.
    """

    scope: tuple[int, ...]
    costs: Costs
    loose: tuple[int, int] | None = None

    def at(self, picked: Sequence[int]) -> float:
        """Return the cost where every variable has the value that was picked for it."""
        return float(self.costs[tuple(picked[v] for v in self.scope)])


@dataclass(frozen=True)
class Minimum:
    """A choice for every variable, what it costs, and what no choice is below."""

    cost: float
    bound: float
    picked: list[int]


def cost_at(tables: Iterable[Table], picked: Sequence[int]) -> float:
    """Return the sum of the tables where every variable has the value that was picked for it."""
    return sum(table.at(picked) for table in tables)


def nonzero_tables(tables: Iterable[Table]) -> list[Table]:
    """Return the tables with costs other than 0; what is one array is looked at once."""
    every = [*tables]
    nonzero = {key: bool(costs.any()) for key, costs in {id(table.costs): table.costs for table in every}.items()}
    return [table for table in every if nonzero[id(table.costs)]]


def without_singles(tables: Sequence[Table], domains: Sequence[int]) -> list[Table]:
    """Return the costs over the variables that have a choice; what is one array stays one array."""
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
        found.append(Table(scope, same, table.loose if table.loose and singles.isdisjoint(table.loose) else None))
    return found


def among(values: Sequence[Indices], tables: Sequence[Table], known: dict[Hashable, Costs]) -> list[Table]:
    """The tables for some values of every variable alone; equal ones are one array, and kept in ``known``."""
    found = []
    for table in tables:
        if all(len(values[v]) == size for v, size in zip(table.scope, table.costs.shape, strict=True)):
            found.append(table)
            continue
        key = "among", id(table.costs), tuple(values[v].tobytes() for v in table.scope)
        if key not in known:
            known[key] = table.costs[np.ix_(*(values[v] for v in table.scope))]
        found.append(Table(table.scope, known[key], table.loose))
    return found


def aligned(table: Table, scope: Sequence[int]) -> Costs:
    """The costs with a dim for every variable of ``scope``, of one entry for those that the table does not mention."""
    ordered = table.costs.transpose([table.scope.index(v) for v in scope if v in table.scope])
    sizes = iter(ordered.shape)
    return ordered.reshape([next(sizes) if v in table.scope else 1 for v in scope])


LIMIT = 1_000_000
"""The largest table that is built, in entries: to leave values out takes less time than larger ones."""

LARGEST = 20_000_000
"""The largest table that is kept, in entries: 160 MB."""
TIES = 4  # times what is left after a variable counts beside what is added up: it ties those around it to each other
MOST_KEPT = 150_000_000
"""So many entries of all tables are kept at most: 1.2 GB."""


class TooWide(PlanError):
    """The smallest next table would exceed the limit of entries."""


@in_stage("elimination")
def minimise(domains: Sequence[int], tables: Sequence[Table], limit: float = LIMIT) -> tuple[float, list[int]]:
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
    order = _steps(tuple(domains), tuple(table.scope for table in tables), limit, _loose_pairs(tables))
    if order.wider:
        raise TooWide(f"the search would need a table of {order.wider:,} entries")
    rest = _eliminated(order, tables)
    if not math.isfinite(rest.total):
        raise PlanError("no assignment is possible: every combination is forbidden")
    return rest.total, rest.completed([0] * len(domains))


@in_stage("elimination")
def without_narrow(domains: Sequence[int], tables: Sequence[Table], limit: int) -> Reduced:
    """Return the problem without the variables around which no table has more entries than ``limit``."""
    tables = without_singles(tables, domains)
    steps = _steps(tuple(domains), tuple(table.scope for table in tables), limit, _loose_pairs(tables))
    return _eliminated(steps, tables)


def work(domains: Sequence[int], tables: Sequence[Table], alike: Sequence[Hashable], most: float = math.inf) -> float:
    """Return how many entries `minimise` would add up without a limit, or infinity where that is more than ``most``.

    Steps of the same tables count once: those for which ``alike`` has the same. It is infinity, too, where the tables
    that are left would take more memory than there should be for them. Of the tables only their scopes are asked.
    """
    own = tuple(tuple(v for v in table.scope if domains[v] != 1) for table in tables)
    order = _steps(tuple(domains), own, most, _loose_pairs(tables, domains))
    every, total, kept = [*alike], 0, 0
    known: dict[Hashable, Hashable] = {}
    for step in order.steps:
        made = math.prod(domains[v] for v in step.neighbours)
        if made > LARGEST:
            return math.inf
        made_of = step.kind, *(every[number] for number in step.tables)
        if made_of not in known:
            known[made_of] = "made", len(known)
            total += step.entries
            kept += made
        every.append(known[made_of])
    return total if total <= most and kept <= MOST_KEPT and not order.wider else math.inf


@dataclass(frozen=True)
class Reduced:
    """The problem after some variables were eliminated: tables over the others, and a constant cost.

    The best value of the variable of each step follows from those of its neighbours, by the tables of the step:
    ``summed`` has the costs of these, as one tuple where several steps have the same.
    """

    total: float
    tables: tuple[Table, ...]
    steps: tuple[_Elimination, ...]
    summed: tuple[tuple[Costs, ...], ...]

    def completed(self, picked: Sequence[int]) -> list[int]:
        """Return the assignment with the best value for every variable that was eliminated."""
        found = [*picked]
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        for step, of in zip(reversed(self.steps), reversed(self.summed), strict=True):
            key = id(of), tuple([found[v] for v in step.neighbours])
            if (best := known.get(key)) is None:
                best = known[key] = _best(step, of, found)
            found[step.variable] = best
        return found


def _loose_pairs(tables: Sequence[Table], domains: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
    """Return the variables that are tied loosely, by one table alone; of those that have several values."""
    pairs = [table.loose for table in tables if table.loose]
    if domains is not None:
        pairs = [pair for pair in pairs if all(domains[v] != 1 for v in pair)]
    of: dict[int, set[int]] = defaultdict(set)  # by variable, the tables that mention it
    tied = {v for pair in pairs for v in pair}
    for number, table in enumerate(tables):
        for v in table.scope:
            if v in tied:
                of[v].add(number)
    return tuple(pair for pair in pairs if len(of[pair[0]] & of[pair[1]]) == 1)


def _eliminated(steps: _Eliminations, tables: Sequence[Table]) -> Reduced:
    total = sum(float(table.costs) for table in tables if not table.scope)
    every, found = [table.costs for table in tables], []
    # Cached by the identity of the tables, which are held, and by the places of variables in them: their sizes are the
    # tables' own.
    known: dict[Hashable, tuple[tuple[Costs, ...], Costs]] = {}
    for step in steps.steps:
        touching = tuple([every[number] for number in step.tables])
        made_of = step.kind, *map(id, touching)
        if (made := known.get(made_of)) is None:
            order = step.variable, *step.neighbours
            of = (Table(scope, costs) for scope, costs in zip(step.scopes, touching, strict=True))
            made = known[made_of] = touching, min_sum([aligned(table, order) for table in of], step.loose)
        found.append(made[0])
        every.append(made[1])
        if not step.neighbours:
            total += float(made[1])
    left = (tables[number] if number < len(tables) else Table(scope, every[number]) for number, scope in steps.left)
    return Reduced(total, tuple(left), steps.steps, tuple(found))


def _best(step: _Elimination, summed: Sequence[Costs], picked: Sequence[int]) -> int:
    """The best value of the variable of a step by those that were picked around it."""
    row: Costs = np.zeros(1)
    for scope, costs in zip(step.scopes, summed, strict=True):
        row = row + costs[tuple([slice(None) if v == step.variable else picked[v] for v in scope])]
    return int(row.argmin())


def widest(
    domains: Sequence[int], scopes: tuple[tuple[int, ...], ...], enough: float = math.inf
) -> tuple[int, tuple[int, ...]]:
    """The size and the scope of the largest table that `minimise` would build, from the scopes alone.

    Of those that are larger than ``enough`` it is the first.
    """
    largest: tuple[int, tuple[int, ...]] = 1, ()
    order = _Order(domains, scopes)
    while (following := order.next()) is not None:
        entries, variable = following
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
    while order.near:
        if (following := order.next(limit)) is not None:
            order.eliminate(following[1])
            continue
        _, variable = order.smallest()
        several = (variable, *sorted(order.near[variable]))
        chosen = max(several, key=lambda v: len(tied[v]))
        order.settle(chosen)
        yield chosen


@lru_cache(maxsize=8)  # of searches at several prices tables have the same scopes
def _neighbours(scopes: tuple[tuple[int, ...], ...]) -> dict[int, frozenset[int]]:
    """The other variables that each is in a table with.

    Cached by the scopes, of which it is a function; callers read it alone.
    """
    near: dict[int, set[int]] = defaultdict(set)
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    return {variable: frozenset(around - {variable}) for variable, around in near.items()}


class _Order:
    """The order in which variables are eliminated: by what that takes and leaves and by age, then by number.

    Variables of one value are none. The age of a variable is how many of those around it went one after the other; a
    table counts as larger by half for each.

    Args:
        loose: variables that are tied loosely, by one table alone.
    """

    def __init__(
        self,
        domains: Sequence[int],
        scopes: tuple[tuple[int, ...], ...],
        loose: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self._domains = domains
        self._loose: dict[int, set[int]] = defaultdict(set)
        for one, other in loose:
            self._loose[one].add(other)
            self._loose[other].add(one)
        single = frozenset(variable for variable, size in enumerate(domains) if size == 1)
        tied = _neighbours(scopes)
        self.near = {variable: {*(around - single)} for variable, around in tied.items() if variable not in single}
        """The variables around each that is left."""
        self._ranks: dict[int, _Rank] = {}
        self._heap: list[tuple[int, int, int]] = []
        for variable, around in self.near.items():
            entries = math.prod([domains[v] for v in around], start=domains[variable])
            self._ranks[variable] = self._rank(variable, entries, 0)
        self._heap = [(*rank.place, variable) for variable, rank in self._ranks.items()]
        heapq.heapify(self._heap)

    def next(self, most: float = math.inf) -> tuple[int, int] | None:
        """The entries that the next table takes, no more than ``most``, and its variable; None where none is left."""
        while self._heap:
            *place, variable = self._heap[0]
            known = self._ranks.get(variable)
            if known is not None and known.place == tuple(place) and known.work <= most:
                return known.work, variable
            heapq.heappop(self._heap)  # its table or its age is no longer this, or too large until it changes
        return None

    def smallest(self) -> tuple[int, int]:
        """The entries that the smallest table takes, and its variable."""
        return min((rank.work, variable) for variable, rank in self._ranks.items())

    def loosely(self, variable: int) -> int | None:
        """Return the variable with most values of those that one is tied to loosely."""
        return max(self._loose.get(variable, ()), key=self._domains.__getitem__, default=None)

    def eliminate(self, variable: int) -> set[int]:
        """Eliminate a variable, which ties all around it to each other; these."""
        gone = self._ranks.pop(variable)
        together, domains, size = self._apart(variable), self._domains, self._domains[variable]
        for v in together:
            around = self.near[v]
            more = together - around
            more.discard(v)
            entries, old = self._ranks[v].entries // size, self._ranks[v].age
            for new in more:
                entries *= domains[new]
            around |= more
            if v in self._loose:
                self._loose[v] -= together
            self._push(v, entries, max(gone.age, old) + 1)
        return together

    def settle(self, variable: int) -> None:
        """Take a variable away as if it had one value."""
        del self._ranks[variable]
        for v in self._apart(variable):
            known = self._ranks[v]
            self._push(v, known.entries // self._domains[variable], known.age)

    def _apart(self, variable: int) -> set[int]:
        """Take a variable away from those around it; these."""
        for v in self._loose.pop(variable, ()):
            self._loose[v].discard(variable)
        together = self.near.pop(variable)
        for v in together:
            self.near[v].discard(variable)
        return together

    def _push(self, variable: int, entries: int, age: int) -> None:
        self._ranks[variable] = rank = self._rank(variable, entries, age)
        heapq.heappush(self._heap, (*rank.place, variable))

    def _rank(self, variable: int, entries: int, age: int) -> _Rank:
        other, made, work = self.loosely(variable), entries // self._domains[variable], entries
        if other is not None:
            work = min(work, 2 * (entries // self._domains[other]) + made)
        return _Rank(entries, work, made, age)


class _Rank(NamedTuple):
    """The place of a variable in the order, by the entries of all around it.

    ``work`` are those that are added up, and ``made`` those of the table that is left.
    """

    entries: int
    work: int
    made: int
    age: int

    @property
    def place(self) -> tuple[int, int]:
        """By what the place goes."""
        return (self.work + TIES * self.made) * (2 + self.age), self.work


@dataclass(frozen=True)
class _Elimination:
    """The elimination of a variable: of which tables, by their numbers, and over which neighbours one is left.

    ``kind`` is the same for steps whose tables mention the variables in the same places. ``entries`` are those that are
    added up, and ``loose`` says which of the tables hardly varies with one of its dims, and with which (`min_sum`).
    """

    variable: int
    neighbours: tuple[int, ...]
    entries: int
    tables: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    kind: int
    loose: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Eliminations:
    """The order in which variables are eliminated; each step leaves a table, which has the next number.

    ``left`` are numbers and scopes of the tables that are there at the end. It comes before a table would be too wide:
    as many entries as the smallest would have are ``wider``, else 0.
    """

    steps: tuple[_Elimination, ...]
    left: tuple[tuple[int, tuple[int, ...]], ...]
    wider: int


@lru_cache(maxsize=64)  # at each price of a byte tables have the same scopes
def _steps(
    domains: tuple[int, ...],
    scopes: tuple[tuple[int, ...], ...],
    limit: float,
    loose: tuple[tuple[int, int], ...] = (),
) -> _Eliminations:
    """The order in which variables are eliminated while no table takes more entries than ``limit``.

    Cached by whole numbers, of which it is a function: costs do not enter.
    """
    every = list(scopes)
    pending: dict[int, dict[int, None]] = defaultdict(dict)
    for number, scope in enumerate(scopes):
        for variable in scope:
            pending[variable][number] = None
    order = _Order(domains, scopes, loose)
    found: list[_Elimination] = []
    kinds: dict[Hashable, int] = {}
    while (following := order.next(limit)) is not None:
        entries, variable = following
        touching, other = pending.pop(variable), order.loosely(variable)
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
        found.append(_Elimination(variable, neighbours, entries, tuple(touching), own, kind))
        if other is not None:
            [at] = [at for at, scope in enumerate(own) if other in scope]
            found[-1] = replace(found[-1], loose=(at, 1 + neighbours.index(other)))
    wider = order.smallest()[0] if order.near else 0
    gone = {number for step in found for number in step.tables}
    left = tuple((number, scope) for number, scope in enumerate(every) if scope and number not in gone)
    return _Eliminations(tuple(found), left, wider)
