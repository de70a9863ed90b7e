"""The minimum over one variable of a sum of tables, of which eliminations consist.

    least[y, z]  =  minimum over x of  A[x, y] + B[x, y, z] + ...

Of each value of x the last sum and the minimum go over all entries: in parts that a processor's cache holds, and on all
cores where there are many. What mentions few variables is added up before.

Some tables hardly vary with a variable h: for a value of x they say one thing for nearly all values of h, and less for
the rest. With M(x, y) the most that B(x, y, h) says for any h, and the pairs (x, h) that ever say less,

    minimum over x of  A(x, z) + B(x, y, h)  =  min( minimum over x of           A(x, z) + M(x, y)
                                                     minimum over those pairs of A(x, z) + B(x, y, h) )

since B is M at all other pairs, and nowhere more. That takes as much less as h has values. M may as well be the most
for any x, of y and h.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shardwright.common.threads import thread_pool

Costs = npt.NDArray[np.float64]

FEW = 1 << 18  # entries that are added up at once
SLAB = 1 << 17  # entries of the result that are made at a time, which a processor's caches hold
MANY = 1 << 22  # entries that all cores add up
FEW_PAIRS = 2  # for each value of a dim, of those that say less than others


def min_sum(summands: Sequence[Costs], loose: tuple[int, int] | None = None) -> Costs:
    """Return the least of the sum of some arrays over their first dim.

    Args:
        summands: arrays of equally many dims, each as long in all of them or 1.
        loose: which of them hardly varies with a dim, and that dim, along which all others have one entry.

    Example:
        >>> min_sum([np.array([[0.0], [5.0]]), np.array([[3.0, 9.0], [1.0, 2.0]])])
        array([3., 7.])
    """
    shape = np.broadcast_shapes(*(of.shape for of in summands))
    if math.prod(shape) <= FEW or len(shape) == 1:
        return np.asarray(sum(sorted(summands, key=np.size)).min(axis=0))  # type: ignore[union-attr]
    if loose is not None and (found := _by_pairs(summands, *loose)) is not None:
        return found
    summands = _fewer(summands)
    dims = _order(summands)
    ordered = [_with_long_rows(of.transpose(dims)) for of in summands]
    least = np.empty([shape[dim] for dim in dims[1:]])

    def work_out(slab: tuple[slice, ...]) -> None:
        _work_out([of[(slice(None), *_within(of.shape[1:], slab))] for of in ordered], least[slab])

    slabs = _slabs(least.shape, SLAB)
    if math.prod(shape) <= MANY:
        for slab in slabs:
            work_out(slab)
    else:
        with thread_pool(len(os.sched_getaffinity(0))) as pool:  # numpy lets others compute meanwhile
            for _ in pool.map(work_out, slabs):
                pass
    return least.transpose(np.argsort(dims[1:]))


def _by_pairs(summands: Sequence[Costs], at: int, dim: int) -> Costs | None:
    """Return the least by the pairs in which an array says less than for others; None where these are too many."""
    of, others = summands[at], [*summands[:at], *summands[at + 1 :]]
    over, (usual, pairs) = min(((over, _usual(of, dim, over)) for over in (dim, 0)), key=lambda on: int(on[1][1].sum()))
    if pairs.sum() > FEW_PAIRS * max(pairs.shape):
        return None
    shape = np.broadcast_shapes(*(summand.shape[1:] for summand in summands))
    least = np.moveaxis(np.empty([shape[dim - 1], *shape[: dim - 1], *shape[dim:]]), 0, dim - 1)
    if over:
        least[...] = min_sum([usual, *others])
    else:
        least[...] = usual[0] + (min_sum(others) if others else 0.0)
    here: list[slice | npt.NDArray[np.intp]] = [slice(None)] * of.ndim
    for value in np.flatnonzero(pairs.any(axis=0)).tolist():
        kept = np.flatnonzero(pairs[:, value])
        here[dim] = slice(value, value + 1)
        parts = [of[kept][tuple(here)], *(other[kept] for other in others)]
        part = least[tuple(here[1:])]
        np.minimum(part, min_sum(parts), out=part)
    return least


def _usual(costs: Costs, dim: int, over: int) -> tuple[Costs, npt.NDArray[np.bool_]]:
    """Return the most along ``over``, and by the values of the first dim and of ``dim`` whether they ever have less."""
    usual = costs.max(axis=over, keepdims=True)
    return usual, (costs < usual).any(axis=tuple(i for i in range(1, costs.ndim) if i != dim))


def _fewer(summands: Sequence[Costs]) -> list[Costs]:
    """Return fewer arrays of the same sum: what another of them mentions, too, is added to that; the smallest first.

    Nothing is added to the largest, of which each entry is read once.
    """
    *found, largest = sorted(summands, key=np.size)
    at = 0
    while at < len(found):
        wider = [i for i in range(at + 1, len(found)) if _covers(found[i], found[at])]
        if wider:
            found[wider[0]] = found[wider[0]] + found[at]
            del found[at]
        else:
            at += 1
    return [*found, largest]


def _covers(wider: Costs, of: Costs) -> bool:
    return np.broadcast_shapes(wider.shape, of.shape) == wider.shape


def _order(summands: Sequence[Costs]) -> list[int]:
    """Return the order of the dims in which the inner loops are long: those of the largest array alone come last.

    These are in the order in which they lie in memory.
    """
    *others, largest = summands
    common = np.broadcast_shapes(*(of.shape for of in others)) if others else (1,) * largest.ndim

    def place(dim: int) -> tuple[int, int]:
        return (largest.shape[dim] > 1) * (1 + (common[dim] == 1)), -largest.strides[dim]

    return [0, *sorted(range(1, largest.ndim), key=place)]


def _with_long_rows(costs: Costs) -> Costs:
    """Return the array, copied where the entries along its last dim, of those of several, do not lie side by side."""
    strides = [stride for size, stride in zip(costs.shape[1:], costs.strides[1:], strict=True) if size > 1]
    return costs if strides and strides[-1] == costs.itemsize else np.ascontiguousarray(costs)


def _slabs(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield parts of an array, which have ``most`` entries or fewer."""
    if math.prod(shape) <= most:
        yield tuple(slice(None) for _ in shape)
        return
    rest = math.prod(shape[1:])
    rows = max(1, most // rest)
    for start in range(0, shape[0], rows):
        for part in _slabs(shape[1:], min(most, rest)):
            yield slice(start, start + rows), *part


def _within(shape: tuple[int, ...], slab: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return the part of an array of this shape that belongs to a part of the result."""
    return tuple(part if size > 1 else slice(None) for size, part in zip(shape, slab, strict=True))


def _work_out(summands: Sequence[Costs], least: Costs) -> None:
    """Write the least of the sum into ``least``."""
    narrow, *rest = summands
    while len(rest) > 1 and math.prod(np.broadcast_shapes(narrow.shape, rest[0].shape)[1:]) < least.size:
        narrow = narrow + rest.pop(0)
    if not rest:
        narrow.min(axis=0, out=least)
        return
    total = least
    for value in range(len(narrow)):
        np.add(narrow[value], rest[0][value], out=total)
        for more in rest[1:]:
            np.add(total, more[value], out=total)
        if value:
            np.minimum(least, total, out=least)
        else:
            total = np.empty_like(least)
