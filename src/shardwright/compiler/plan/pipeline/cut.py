"""The cut of a sequence of operators into stages: the slowest stage takes as little as any cut allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def cut(costs: Sequence[float], crossing: Sequence[float], count: int) -> list[int]:
    """Return where each of ``count`` stages begins.

    A stage takes the sum of its costs, and what crosses to it and from it. Of the cuts whose slowest stage takes the
    least, it is one where the least crosses in all. Dynamic programming over the first operators, for one stage more
    at a time: ``count`` times the square of the operators.

    >>> cut([1, 1, 1, 3], [0, 0, 0, 0], 2)
    [0, 3]
    >>> cut([1, 1, 1, 1], [0, 5, 2, 5], 2)
    [0, 2]

    Args:
        costs: seconds of each operator.
        crossing: seconds that what passes from before each operator to behind it takes; nothing before the first.

    Raises:
        ValueError: where there are fewer operators than stages.
    """
    if len(costs) < count:
        raise ValueError(f"{len(costs)} operators are no {count} stages")
    before = np.concatenate([[0.0], np.cumsum(costs)])
    border = np.concatenate([np.asarray(crossing, dtype=float), [0.0]])
    border[0] = 0.0
    slowest, _ = _best(before, border, count, np.maximum, np.full(len(before), math.inf))
    least = slowest[-1] * (1 + 1e-9)
    _, choices = _best(before, border, count, np.add, np.full(len(before), least))
    starts, end = [], len(costs)
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return starts[::-1]


def _best(
    before: Floats, border: Floats, count: int, join: np.ufunc, limit: Floats
) -> tuple[Floats, list[NDArray[np.int64]]]:
    """Return the least for the first operators in ``count`` stages, and where the last stage of each number begins.

    With `numpy.maximum` that is the time of the slowest stage, with `numpy.add` what crosses, over cuts in which no
    stage takes more than ``limit``.
    """
    n = len(before)
    best = np.full(n, math.inf)
    best[0] = 0.0
    choices = []
    for _ in range(count):
        then, choice = np.full(n, math.inf), np.zeros(n, dtype=np.int64)
        for end in range(1, n):
            takes = before[end] - before[:end] + border[:end] + border[end]
            costs = takes if join is np.maximum else np.where(takes <= limit[end], border[:end], math.inf)
            found = join(best[:end], costs)
            choice[end] = int(found.argmin())
            then[end] = found[choice[end]]
        best = then
        choices.append(choice)
    return best, choices
