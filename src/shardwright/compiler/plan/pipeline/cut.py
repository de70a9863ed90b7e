"""The cut of a sequence of operators into stages: the slowest stage takes as little as any cut allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.compiler.plan.pricing.schedule import Floats

_EARLIER = 0.999  # of the time: a border is moved for no less
_AT_ONCE = 256  # places where a stage may end that are looked at together


Takes = Callable[[NDArray[np.int64], NDArray[np.int64]], Floats]
"""Returns the seconds of the stages that end at some operators, a row for each, by where they begin."""


class Limit(NamedTuple):
    """A sum over the operators of a stage, of one number for each, that may be at most so much, as its bytes may."""

    weights: Sequence[float] | Floats
    most: float


def cut(
    costs: Sequence[float] | Floats,
    crossing: Sequence[float] | Floats,
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
    takes, border, first = _stages(costs, crossing, count, limits, overlapped)
    least, _ = _best(takes, border, first, np.maximum, math.inf)
    if least == math.inf:
        return None
    most = least * (1 + 1e-9)
    first = np.maximum(first, _first([[Limit(costs, most)]] * count, count, len(costs)))
    _, choices = _best(takes, border, first, np.add, most)
    starts, end = [], len(costs)
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return starts[::-1]


def slowest(costs: Sequence[float] | Floats, crossing: Sequence[float] | Floats, count: int) -> float:
    """Return what the slowest stage takes in the cut that `cut` returns.

    >>> slowest([1, 1, 1, 3], [0, 0, 0, 0], 2), slowest([1, 1, 1, 3], [0, 0, 0, 4], 2)
    (3.0, 4.0)

    Raises:
        ValueError: where there are fewer operators than stages.
    """
    return _best(*_stages(costs, crossing, count), np.maximum, math.inf)[0]


def _stages(
    costs: Sequence[float] | Floats,
    crossing: Sequence[float] | Floats,
    count: int,
    limits: Sequence[Sequence[Limit]] = (),
    overlapped: bool = False,
) -> tuple[Takes, Floats, NDArray[np.int64]]:
    """Return what stages take, what crosses where they begin, and the first operator of each, by where it ends.

    The last leaves out what limits do, and stages that take longer than those of a cut that is easily found.
    """
    if len(costs) < count:
        raise ValueError(f"{len(costs)} operators are no {count} stages")
    before: Floats = np.concatenate([[0.0], np.cumsum(costs)])
    border: Floats = np.concatenate([np.asarray(crossing, dtype=float), [0.0]])
    border[0] = 0.0
    first = _first(limits, count, len(costs))

    def takes(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Floats:
        costs: Floats = before[ends, None] - before[starts]
        here, there = border[starts], border[ends, None]
        return np.maximum(costs, np.maximum(here, there)) if overlapped else costs + (here + there) / 2

    some = _even(before, count)
    if some is not None and _keep(some[None], len(costs), limits).all():
        most = float(takes(some, np.append(some[1:], len(costs))).diagonal().max()) * (1 + 1e-9)
        first = np.maximum(first, _first([[Limit(costs, most)]] * count, count, len(costs)))
    return takes, border, first


def _even(before: Floats, count: int) -> NDArray[np.int64] | None:
    """Return where each stage begins if all take about as long, nothing counted that crosses; None where some lack."""
    starts = np.searchsorted(before, before[-1] * np.arange(count) / count)
    return starts if starts[-1] < len(before) - 1 and (np.diff(starts) > 0).all() else None


def improved(
    starts: Sequence[int],
    end: int,
    seconds: Callable[[NDArray[np.int64]], Floats],
    limits: Sequence[Sequence[Limit]] = (),
) -> list[int]:
    """Return stages that begin elsewhere if all together end earlier so: no border moved by 1, 2, 4, ... is better.

    A cut whose slowest stage takes the least is the best of all where there are many microbatches. With few, or where
    messages are waited for, another one can be. The border whose move gains most is moved first.

    >>> improved([0, 1], 4, lambda starts: abs(starts[:, 1] - 3.0))
    [0, 3]

    Args:
        end: the number of operators.
        seconds: until all is done, for stages that begin at given operators, a row for each cut.
    """
    steps = [sign * 2**power for power in range(end.bit_length()) for sign in (-1, 1)]
    borders = np.eye(len(starts), dtype=np.int64)[1:]
    moves = np.concatenate([borders * step for step in steps]) if len(starts) > 1 else borders
    best, least_s = np.asarray(starts, dtype=np.int64), math.inf
    while True:
        tried = np.concatenate([best[None], best + moves])
        tried = tried[(np.diff(tried, append=end) > 0).all(axis=1)]
        tried = tried[_keep(tried, end, limits)]
        took_s = seconds(tried) if len(tried) else np.array([math.inf])
        if took_s.min() >= least_s * _EARLIER:
            return [int(start) for start in best]
        best, least_s = tried[took_s.argmin()], float(took_s.min())


def _keep(starts: NDArray[np.int64], end: int, limits: Sequence[Sequence[Limit]]) -> NDArray[np.bool_]:
    """Return of each cut, a row of ``starts``, whether all its stages keep their limits."""
    found = np.ones(len(starts), dtype=bool)
    ends = np.concatenate([starts[:, 1:], np.full((len(starts), 1), end)], axis=1)
    for stage, of in enumerate(limits):
        for each in of:
            before = np.concatenate([[0.0], np.cumsum(each.weights)])
            found &= before[ends[:, stage]] - before[starts[:, stage]] <= each.most + 1e-9 * before[-1]
    return found


def _best(
    takes: Takes,
    border: Floats,
    first: NDArray[np.int64],
    join: np.ufunc,
    limit: float,
) -> tuple[float, NDArray[np.int64]]:
    """Return the least for all operators in all stages, and where each stage begins, by where it ends.

    With `numpy.maximum` that is the time of the slowest stage, with `numpy.add` what crosses, over cuts in which no
    stage takes more than ``limit``.

    Args:
        first: for each stage and where it ends, the first operator that it may begin with.
    """
    (count, n), (low, high) = first.shape, _reach(first)
    best = np.full(n, math.inf)
    best[0] = 0.0
    choices = np.zeros((count, n), dtype=np.int64)
    for stage in range(count):
        before, best = best, np.full(n, math.inf)
        for at in range(low[stage + 1], high[stage + 1] + 1, _AT_ONCE):
            ends = np.arange(at, min(at + _AT_ONCE, high[stage + 1] + 1))
            starts = np.arange(max(low[stage], first[stage, at]), min(high[stage] + 1, ends[-1]))
            if not len(starts):
                continue
            took = takes(starts, ends)
            found = join(
                before[starts], took if join is np.maximum else np.where(took <= limit, border[starts], math.inf)
            )
            found[(starts < first[stage, ends, None]) | (starts >= ends[:, None])] = math.inf
            chosen = found.argmin(axis=1)
            best[ends], choices[stage, ends] = found[np.arange(len(ends)), chosen], starts[chosen]
    return float(best[-1]), choices


def _reach(first: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Return the first and the last operator that each stage can begin with, and at last where all end.

    No limit lets a stage end so late that it begins behind the last of these, nor begin so early that those behind it
    do not reach the end.
    """
    count, n = first.shape
    low, high = [n - 1], [0]
    for stage in reversed(range(count)):
        low.append(min(max(stage, int(first[stage, low[-1]])), n - 1))
    for stage in range(count):
        furthest = int(np.searchsorted(first[stage], high[-1], side="right")) - 1
        high.append(min(furthest, n - count + stage))
    return low[::-1], high


def _first(limits: Sequence[Sequence[Limit]], count: int, end: int) -> NDArray[np.int64]:
    """Return the first operator that each stage may begin with, by where it ends: no number of a limit is negative."""
    first = np.zeros((count, end + 1), dtype=np.int64)
    for stage, of in enumerate(limits):
        for each in of:
            before = np.concatenate([[0.0], np.cumsum(each.weights)])
            least = before - each.most - 1e-9 * before[-1]
            first[stage] = np.maximum(first[stage], np.searchsorted(before, least))
    return first
