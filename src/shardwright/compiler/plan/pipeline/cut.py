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
    first = _first(limits, count, len(costs))

    def takes(end: int) -> Floats:
        """Return the seconds of a stage that ends there, by where it begins."""
        costs: Floats = before[end] - before[:end]
        longest: Floats = np.maximum(costs, np.maximum(border[:end], border[end]))
        return longest if overlapped else costs + (border[:end] + float(border[end])) / 2

    slowest, _ = _best(takes, border, first, np.maximum, math.inf)
    if slowest[-1] == math.inf:
        return None
    most = float(slowest[-1]) * (1 + 1e-9)
    first = np.maximum(first, _first([[Limit(costs, most)]] * count, count, len(costs)))
    _, choices = _best(takes, border, first, np.add, most)
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


def _best(
    takes: Callable[[int], Floats],
    border: Floats,
    first: NDArray[np.int64],
    join: np.ufunc,
    limit: float,
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the least for the first operators in some stages, and where the last of these stages begins.

    With `numpy.maximum` that is the time of the slowest stage, with `numpy.add` what crosses, over cuts in which no
    stage takes more than ``limit``.

    Args:
        first: for each stage and where it ends, the first operator that it may begin with.
    """
    count, n = first.shape
    best = np.full((count + 1, n), math.inf)
    best[0, 0] = 0.0
    choices = np.zeros((count, n), dtype=np.int64)
    for end in range(1, n):
        costs = takes(end) if join is np.maximum else np.where(takes(end) <= limit, border[:end], math.inf)
        start = int(first[:, end].min())
        found = join(best[:-1, start:end], costs[start:])
        for stage in np.flatnonzero(first[:, end] > start).tolist():
            found[stage, : first[stage, end] - start] = math.inf
        chosen = found.argmin(axis=1) if start < end else np.zeros(count, dtype=np.int64)
        choices[:, end] = start + chosen
        best[1:, end] = found[np.arange(count), chosen] if start < end else math.inf
    return best[-1], choices


def _first(limits: Sequence[Sequence[Limit]], count: int, end: int) -> NDArray[np.int64]:
    """Return the first operator that each stage may begin with, by where it ends: no number of a limit is negative."""
    first = np.zeros((count, end + 1), dtype=np.int64)
    for stage, of in enumerate(limits):
        for each in of:
            before = np.concatenate([[0.0], np.cumsum(each.weights)])
            least = before - each.most - 1e-9 * before[-1]
            first[stage] = np.maximum(first[stage], np.searchsorted(before, least))
    return first
