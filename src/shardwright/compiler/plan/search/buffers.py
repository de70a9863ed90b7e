"""The largest buffer of a collective under the choices of a problem, which is held beside what the choices weigh.

    bytes(choices) = what they weigh (`weights.py`) + the largest buffer of all their collectives

The second part is no sum, but it divides the choices: of those whose buffers are all within some size the least is
found as without such a limit, with all others forbidden. So the minimum of cost + price * bytes is found from above.

Some of these buffers are sums themselves: that of the gradients which are reduced together, up to the bytes of a
bucket, and those of small parameters that are gathered together. Where one is the largest, it counts in place of all
others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from shardwright.compiler.capture.ir import Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.redistribute import redistribute
from shardwright.compiler.plan.pricing.graph import Target
from shardwright.compiler.plan.pricing.joined import GATHERED_BYTES, SMALL_WHOLE_BYTES, small_gather, together_bytes
from shardwright.compiler.plan.pricing.memory import SavedTensors, local_bytes
from shardwright.compiler.plan.search.exact import Table, TooWide, cost_at, nonzero_tables
from shardwright.compiler.plan.search.min_sum import Costs
from shardwright.compiler.plan.search.narrow import NothingBelow
from shardwright.compiler.plan.search.problem import Problem
from shardwright.distributed.gradients import BUCKET_BYTES
from shardwright.errors import PlanError

WORTH = 1e-3
"""The saving by smaller buffers, as a share of the total, that is worth another search."""
FAR = 3e-3
"""The distance of the bound of a part below the rest, as a share, that is worth another search."""
NEAR = 1e-9  # what bounds may be off by rounding, as a share
LEAST_TIMES = 2
"""So often at least, with its buffers, a small parameter is there while it is gathered."""

T = TypeVar("T")


class LargestBuffers:
    """The largest buffers, by tables over some variables, of which equal ones are one array."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._limited: dict[tuple[int, float], Costs] = {}  # Cached by a table's costs, which are held, and the limit
        self.tables = nonzero_tables(tables)
        different = {id(table.costs): table.costs for table in self.tables}
        self.least_bytes = max((float(costs.min()) for costs in different.values()), default=0.0)
        """No choice has none that is larger."""

    def of(self, picked: Sequence[int]) -> float:
        """The largest buffer of one choice for every variable."""
        return max((table.at(picked) for table in self.tables), default=0.0)

    def within(self, most_bytes: float) -> list[Table]:
        """Tables that forbid what has larger ones."""
        found = []
        for table in self.tables:
            key = id(table.costs), most_bytes
            if key not in self._limited:
                self._limited[key] = np.where(table.costs > most_bytes, math.inf, 0.0)
            if self._limited[key].any():
                found.append(Table(table.scope, self._limited[key]))
        return found


class JoinedBuffers:
    """The buffers of joined collectives: gradients of replicated parameters, and small parameters that are gathered.

    Gradients are joined by the axes and the dtype that they share. Parameters are those that are stored split and that
    the backward never gathers again.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        # Cached by all that is read of a parameter, and by the identity of lists, which are held.
        self._known: dict[Hashable, Costs] = {}
        self._gathers: dict[Hashable, Mapping[Hashable, Costs]] = {}
        self._held: list[object] = []  # so that no identity is given to another object
        self._groups: dict[Hashable, list[Table]] = defaultdict(list)
        self._again = {name for block in problem.space.blocks for name in block.names}
        self._most_bytes: dict[Hashable, int] = {}  # that what is joined surely has, where there is more of it
        for value in problem.space.graph.capture.of_kind("parameter"):
            if value.needs_gradient:
                self._add(value)
            if self._is_gathered_once(value):
                self._add_gathers(value)
        self._shares = {
            group: min(1.0, self._most_bytes[group] / sum(float(table.costs.max()) for table in tables))
            for group, tables in self._groups.items()
        }
        """Of a sum that may be larger than what is joined so much, so that none counts more than that."""

    def largest(self, picked: Sequence[int]) -> tuple[Hashable, float]:
        """The largest of these buffers under one choice for every variable, at least, and whose it is."""
        sizes = {group: self._shares[group] * cost_at(tables, picked) for group, tables in self._groups.items()}
        return max(sizes.items(), key=lambda of: of[1], default=(None, 0.0))

    def at(self, group: Hashable, price: float) -> list[Table]:
        """Tables of what one of them counts at so much for a byte."""
        times = price * self._shares[group]
        priced = {id(table.costs): table.costs * times for table in self._groups[group]}
        return [Table(table.scope, priced[id(table.costs)]) for table in self._groups[group]]

    def _add(self, value: Value) -> None:
        """Whoever reads a parameter counts an equal part of its gradient: those who demand the same sum it once."""
        producer, layouts = self._problem.produced(value.name)
        readers = self._problem.consumers(value.name)
        for variable, targets in readers:
            for axes in dict.fromkeys(target.gradient_partial for target in targets if target.gradient_partial):
                key = value.shape, value.dtype, layouts, id(targets), axes, len(readers)
                if key not in self._known:
                    self._held.append(targets)
                    self._known[key] = self._entering(value, layouts, targets, axes) / len(readers)
                if self._known[key].any():
                    self._groups[axes, value.dtype].append(Table((producer, variable), self._known[key]))
                    self._most_bytes[axes, value.dtype] = BUCKET_BYTES

    def _is_gathered_once(self, value: Value) -> bool:
        """Return whether no backward gathers a small parameter again: nobody saves it, or recomputes with it."""
        space = self._problem.space
        graph, kept = space.graph, space.graph.once(SavedTensors)
        if value.bytes > SMALL_WHOLE_BYTES * space.mesh.size:  # no way gathers it with others
            return False
        uses = graph.uses[value.name]
        return not any(use.node.name in self._again or kept.times(use.node, use.index) for use in uses)

    def _add_gathers(self, value: Value) -> None:
        """Whoever reads a parameter counts an equal part of what it takes to gather it with others."""
        producer, layouts = self._problem.produced(value.name)
        readers = self._problem.consumers(value.name)
        for variable, targets in readers:
            key = value.shape, value.dtype, value.needs_gradient, layouts, id(targets), len(readers)
            if key not in self._gathers:
                self._held.append(targets)
                self._gathers[key] = self._gathered(value, layouts, targets, len(readers))
            for alike, sizes in self._gathers[key].items():
                self._groups[alike].append(Table((producer, variable), sizes))
                self._most_bytes[alike] = LEAST_TIMES * (GATHERED_BYTES - SMALL_WHOLE_BYTES)

    def _gathered(
        self, value: Value, layouts: Sequence[Layout], targets: Sequence[Target], readers: int
    ) -> Mapping[Hashable, Costs]:
        """Return the bytes held where a parameter is gathered with others, by what these have in common."""
        mesh = self._problem.space.mesh
        found: dict[Hashable, Costs] = defaultdict(lambda: np.zeros((len(layouts), len(targets))))
        moves = self._problem.known.pairs.ways.moves(value.shape, layouts, targets)
        for i, j in np.argwhere(moves.possible & moves.copies).tolist():
            target = targets[j]
            step = redistribute(layouts[i], target.layout, target.gradient_partial, value.shape, mesh)[0]
            gathered = small_gather(value, step, mesh)
            if gathered is not None and gathered.bytes:
                found[gathered.alike][i, j] = together_bytes([(value, step)], mesh) / readers
        return found

    def _entering(
        self, value: Value, layouts: Sequence[Layout], targets: Sequence[Target], axes: tuple[str, ...]
    ) -> Costs:
        """The bytes of a gradient that is summed over these axes and stays where it is."""
        mesh = self._problem.space.mesh
        sizes = np.array([local_bytes(value, layout, mesh) for layout in layouts], dtype=float)
        summed = np.array([target.gradient_partial == axes for target in targets])
        moves = self._problem.known.pairs.ways.moves(value.shape, layouts, targets)
        return np.where(moves.possible & moves.enters & summed, sizes[:, None], 0.0)


def buffers_of(problem: Problem) -> LargestBuffers:
    """The largest buffers under the choices of a problem."""
    return LargestBuffers((*_of_operators(problem), *_of_ways(problem)))


def _of_operators(problem: Problem) -> Iterator[Table]:
    for node in problem.space.graph.capture.nodes:
        if (variable := problem.node_variables.get(node.name)) is not None:
            yield Table((variable,), problem.known.largest_inside(node, problem.space.strategies[node.name]))


def _of_ways(problem: Problem) -> Iterator[Table]:
    graph, outputs, known = problem.space.graph, problem.space.outputs, problem.known
    for name, facts in graph.capture.values.items():
        maker = graph.producers.get(name)
        if maker is not None and maker[0].name not in problem.node_variables:
            continue
        producer, layouts = problem.produced(name)
        for variable, targets in problem.consumers(name):
            yield Table((producer, variable), known.largest_buffers(facts, layouts, targets))
        if name in outputs:
            brought = facts if name == graph.capture.loss else replace(facts, needs_gradient=False)
            yield Table((producer,), known.largest_buffers(brought, layouts, (Target(outputs[name]),))[:, 0])


def by_buffers(
    solve: Callable[[Sequence[Table]], tuple[T, float, list[int]]],
    buffers: LargestBuffers,
    price: float,
    worth: float = WORTH,
    enough: float = math.inf,
) -> tuple[list[T], float]:
    """Return the choices found under limits of the largest buffer, the cheapest first, and a bound of their totals.

    A total is what ``solve`` minimises and ``price`` for each byte of the largest buffer.

    Args:
        solve: what is chosen with more tables, a bound of what that costs with them, and what was picked by variable.
        worth: what smaller buffers could save, as a share of the total, that is worth another search.
        enough: a bound that is worth no search for a larger one.

    The choices are divided by their largest buffer, those with the largest ones first. All that are left when some were
    looked at have smaller buffers, and cost no less than the last minimum did without a price for these. Once that is
    no better than what was found, or by less than is worth a search, they are left alone. Else the next minimum is
    taken of those whose buffers are at most half as large as in the last one, or so small that larger ones are at
    least ``enough``: what lies between the two counts with its least buffer. Where that says less than it might, those
    of it are looked at once more whose buffers are not so large that they are worse than what was found. So the bound,
    the least of all parts, is one for every choice.
    """
    one, total, picked = solve(())
    largest = buffers.of(picked)
    found, totals = [one], [total + price * largest]
    parts: list[tuple[float, float]] = []  # the bound of each without buffers, and the least of these
    while largest > buffers.least_bytes:
        saved = min(totals) - total - price * buffers.least_bytes
        if saved <= worth * abs(min(totals)) or total + price * buffers.least_bytes >= enough:
            break
        enough_from = (enough - total) / price * (1 + NEAR)  # larger buffers make the total no less than enough
        limit = max(largest / 2, buffers.least_bytes, enough_from if enough_from < largest else 0.0)
        parts.append((total, limit))
        try:
            one, total, picked = solve(buffers.within(limit))
        except NothingBelow as nothing:
            total = max(total, nothing.bound)
            break
        except TooWide:
            break
        except PlanError:  # there are none
            total = math.inf
            break
        largest = buffers.of(picked)
        found.append(one)
        totals.append(total + price * largest)
    best = min(range(len(found)), key=totals.__getitem__)
    found.insert(0, found.pop(best))
    bound = min(totals[best], total + price * buffers.least_bytes)
    for part_total, limit in parts:
        if part_total + price * limit < min(enough, bound - FAR * abs(bound)):
            part_total = _of_smaller(solve, buffers, part_total, (bound - part_total) / price)
        bound = min(bound, part_total + price * limit)
    return found, bound


def _of_smaller(
    solve: Callable[[Sequence[Table]], tuple[T, float, list[int]]], buffers: LargestBuffers, total: float, limit: float
) -> float:
    """A bound of what choices cost whose buffers are within ``limit``, where ``total`` is one for all."""
    try:
        return max(total, solve(buffers.within(limit))[1])
    except NothingBelow as nothing:
        return max(total, nothing.bound)
    except TooWide:
        return total
    except PlanError:  # there are none
        return math.inf
