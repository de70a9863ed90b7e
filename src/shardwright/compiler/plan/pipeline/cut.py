"""The cut of a sequence of operators into stages: the slowest stage takes as little as any cut allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_EARLIER = 0.999  # of the time: a border is moved for no less


class Limit(NamedTuple):
    """A sum over the operators of a stage, of one number for each, that may be at most so much, as its bytes may."""

    weights: Sequence[float]
    most: float


def cut(
    costs: Sequence[float],
    crossing: Sequence[float],
    count: int,
    limits: Sequence[Sequence[Limit]] = (),
    overlapped: bool = False,
) -> list[int] | None:
    """Return where each of ``count`` stages begins; None where no cut keeps the limits.

    A stage takes the sum of its costs, and half of what crosses its borders: it waits for what comes, forward over one
    of them and backward over the other. ``overlapped``, where messages go beside computing, it takes the longest of its
    costs and what crosses each border. Of the cuts whose slowest stage takes the least, it is one where the
    least crosses in all. Dynamic programming over the first operators, for one stage more at a time: ``count`` times
    the square of the operators.

    >>> cut([1, 1, 1, 3], [0, 0, 0, 0], 2)
    [0, 3]
    >>> cut([1, 1, 1, 1], [0, 5, 2, 5], 2)
    [0, 2]
    >>> cut([2, 2, 2, 2], [0, 1, 6, 1], 2), cut([2, 2, 2, 2], [0, 1, 3, 1], 2, overlapped=True)
    ([0, 1], [0, 2])
    >>> cut([1, 1, 1, 3], [0, 0, 0, 0], 2, [[Limit([4, 4, 4, 4], 8)]] * 2)
    [0, 2]

    Args:
        costs: seconds of each operator.
        crossing: seconds that what passes from before each operator to behind it takes, there and back; nothing before
            the first.
        limits: those of each stage, if there are any.

    Raises:
        ValueError: where there are fewer operators than stages.
    """
    if len(costs) < count:
        raise ValueError(f"{len(costs)} operators are no {count} stages")
    before: Floats = np.concatenate([[0.0], np.cumsum(costs)])
    border: Floats = np.concatenate([np.asarray(crossing, dtype=float), [0.0]])
    border[0] = 0.0
    sums = [[_Sum(np.concatenate([[0.0], np.cumsum(of.weights)]), of.most) for of in stage] for stage in limits]

    def takes(end: int) -> Floats:
        """Return the seconds of a stage that ends there, by where it begins."""
        costs: Floats = before[end] - before[:end]
        longest: Floats = np.maximum(costs, np.maximum(border[:end], border[end]))
        return longest if overlapped else costs + (border[:end] + float(border[end])) / 2

    slowest, _ = _best(takes, border, count, np.maximum, math.inf, sums)
    if slowest[-1] == math.inf:
        return None
    _, choices = _best(takes, border, count, np.add, slowest[-1] * (1 + 1e-9), sums)
    starts, end = [], len(costs)
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return starts[::-1]


def improved(
    starts: Sequence[int],
    end: int,
    seconds: Callable[[Sequence[int], float], float],
    limits: Sequence[Sequence[Limit]] = (),
) -> list[int]:
    """Return stages that begin elsewhere if all together end earlier so: no border moved by 1, 2, 4, ... is better.

    A cut whose slowest stage takes the least is the best of all where there are many microbatches. With few, or where
    messages are waited for, another one can be.

    >>> improved([0, 1], 4, lambda starts, most: abs(starts[1] - 3))
    [0, 3]

    Args:
        end: the number of operators.
        seconds: until all is done, for stages that begin at given operators; any number from ``most`` on where it is
            as large.
    """
    best, least_s = list(starts), seconds(starts, math.inf)
    steps = [sign * 2**power for power in range(end.bit_length()) for sign in (-1, 1)]
    moves = [(border, step) for border in range(1, len(starts)) for step in steps]
    while True:
        before_s = least_s
        for border, step in moves:
            tried = [*best[:border], best[border] + step, *best[border + 1 :]]
            in_order = tried[border - 1] < tried[border] < [*tried, end][border + 1]
            if not in_order or not _keeps(tried, end, limits):
                continue
            most_s = least_s * _EARLIER
            if (took_s := seconds(tried, most_s)) < most_s:
                best, least_s = tried, took_s
        if least_s == before_s:
            return best


def _keeps(starts: Sequence[int], end: int, limits: Sequence[Sequence[Limit]]) -> bool:
    """Return whether each stage keeps its limits."""
    stages = zip(starts, [*starts[1:], end], strict=True)
    return all(
        sum(each.weights[a:b]) <= each.most * (1 + 1e-9)
        for (a, b), of in zip(stages, limits, strict=False)
        for each in of
    )


class _Sum(NamedTuple):
    """A limit, with the sums over the first operators."""

    before: Floats
    most: float

    def keeps(self, end: int) -> NDArray[np.bool_]:
        """Return whether stages that end there keep it, by where they begin."""
        kept: NDArray[np.bool_] = self.before[end] - self.before[:end] <= self.most + 1e-9 * self.before[-1]
        return kept


def _best(
    takes: Callable[[int], Floats],
    border: Floats,
    count: int,
    join: np.ufunc,
    limit: float,
    sums: Sequence[Sequence[_Sum]],
) -> tuple[Floats, list[NDArray[np.int64]]]:
    """Return the least for the first operators in ``count`` stages, and where the last stage of each number begins.

    With `numpy.maximum` that is the time of the slowest stage, with `numpy.add` what crosses, over cuts in which no
    stage takes more than ``limit``, and each keeps its ``sums``.
    """
    n = len(border)
    best = np.full(n, math.inf)
    best[0] = 0.0
    choices = []
    for stage in range(count):
        then, choice = np.full(n, math.inf), np.zeros(n, dtype=np.int64)
        for end in range(1, n):
            costs = takes(end) if join is np.maximum else np.where(takes(end) <= limit, border[:end], math.inf)
            for each in sums[stage] if sums else ():
                costs = np.where(each.keeps(end), costs, math.inf)
            found = join(best[:end], costs)
            choice[end] = int(found.argmin())
            then[end] = found[choice[end]]
        best = then
        choices.append(choice)
    return best, choices
