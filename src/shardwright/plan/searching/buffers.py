"""The largest buffer of a collective under the choices of a problem, which is held beside what the choices weigh.

    bytes(choices) = what they weigh (`weights.py`) + the largest buffer of all their collectives

The second part is no sum, but it divides the choices: of those whose buffers are all within some size the least is
found as without such a limit, with all others forbidden. So the minimum of cost + price * bytes is found from above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from shardwright.errors import PlanError
from shardwright.plan.pricing.targets import Target
from shardwright.plan.searching.exact import Costs, Table, TooWide
from shardwright.plan.searching.narrow import NothingBelow
from shardwright.plan.searching.problem import Problem

WORTH = 1e-4
"""What smaller buffers could save, as a share of the total, that is worth another search."""
FAR = 3e-3
"""How far below the rest the bound of a part is, as a share, that is worth another search."""

T = TypeVar("T")


class Buffers:
    """The largest buffers, by tables over some variables, of which equal ones are one array."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._limited: dict[tuple[int, float], Costs] = {}
        self.tables = [table for table in tables if table.costs.any()]
        self.least_bytes = max((float(table.costs.min()) for table in self.tables), default=0.0)
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


def buffers_of(problem: Problem) -> Buffers:
    """The largest buffers under the choices of a problem."""
    return Buffers((*_of_operators(problem), *_of_ways(problem)))


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
    solve: Callable[[Sequence[Table]], tuple[T, float, list[int]]], buffers: Buffers, price: float
) -> tuple[list[T], float]:
    """What ``solve`` finds with limits for the largest buffer: first that with the least total, and a bound of totals.

    A total is what ``solve`` minimises and ``price`` for each byte of the largest buffer.

    Args:
        solve: what is chosen with more tables, a bound of what that costs with them, and what was picked by variable.

    The choices are divided by their largest buffer, those with the largest ones first. All that are left when some were
    looked at have smaller buffers, and cost no less than the last minimum did without a price for these. Once that is
    no better than what was found, or by less than is worth a search, they are left alone. Else the next minimum is
    taken of those whose buffers are at most half as large as in the last one: what lies between the two counts with its
    least buffer. Where that says less than it might, those of it are looked at once more whose buffers are not so large
    that they are worse than what was found. So the bound, the least of all parts, is one for every choice.
    """
    one, total, picked = solve(())
    largest = buffers.of(picked)
    found, totals = [one], [total + price * largest]
    parts: list[tuple[float, float]] = []  # the bound of each without buffers, and the least of these
    while largest > buffers.least_bytes:
        saved = min(totals) - total - price * buffers.least_bytes
        if saved <= WORTH * abs(min(totals)):
            break
        limit = max(largest / 2, buffers.least_bytes)
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
        if part_total + price * limit < bound - FAR * abs(bound):
            part_total = _of_smaller(solve, buffers, part_total, (bound - part_total) / price)
        bound = min(bound, part_total + price * limit)
    return found, bound


def _of_smaller(
    solve: Callable[[Sequence[Table]], tuple[T, float, list[int]]], buffers: Buffers, total: float, limit: float
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
