"""Redistributions between layouts whose parts are all even, for any shape of the value and any names of axes.

Where all parts are even, the steps of a redistribution follow from the dims that change alone. They do not depend on
the sizes of the axes, but for where partial sums are added up: where the tensor is smallest. The bytes of every
collective are those of the value by a whole number. So the steps are found once for all values and for all axes that
take the same parts in them, and a search can ask for hundreds of thousands of pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import Axis, Mesh
from shardwright.compiler.mesh.redistribute import (
    COLLECTIVES,
    CollectiveKind,
    Move,
    moves_between,
    sums_between,
    where_to_sum,
)

Axes = tuple[int, ...]
"""Axes by number, counted as they first appear in a change."""

Part = tuple[CollectiveKind, Axes, int]
"""One collective: its kind, the axes, and by what the bytes of the value are to be divided to have its buffer's."""


@dataclass(frozen=True)
class Change:
    """The dims that are cut otherwise, each as (before, after), and the axes over which there are partial sums.

    ``partial`` and ``still_partial`` are those of the value, before and after; ``gradient_partial`` those of the
    gradient that comes back.
    """

    dims: tuple[tuple[Axes, Axes], ...]
    partial: Axes = ()
    still_partial: Axes = ()
    gradient_partial: Axes = ()


@dataclass(frozen=True)
class Way:
    """The collectives of a change of layout, in the order of the steps.

    ``copies`` says whether the value then lies in memory of its own, ``alone`` whether nothing is summed, ``enters``
    whether nothing happens but that the gradient is summed. ``early`` are how many of forward and of backward are of an
    all-gather with which it begins, or of the sum of the gradient before that.
    """

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    copies: bool
    alone: bool
    enters: bool
    early: tuple[int, int]


@lru_cache(maxsize=1 << 18)
def way_of(change: Change, sizes: tuple[int, ...]) -> Way:
    """Return what a change communicates on axes of these sizes, as the steps of `redistribute` do; sizes are above 1.

    Cached by both, frozen values of whole numbers, of which it is a function.
    """
    route = _route(change)
    forward: list[Part] = []
    backward: list[Part] = []
    sum_at = enter_at = -1
    cuts = [math.prod([sizes[axis] for axis in stage]) for stage in route.stages]
    if route.summed or route.entered:
        sum_at, enter_at = where_to_sum([-parts for parts in cuts], route.moves, _names(route.summed))
    early = 0, 0
    for at, stage_parts in enumerate(cuts):
        if route.summed and at == sum_at:
            forward.append(("all_reduce", route.summed, stage_parts))
        if route.entered and at == enter_at:
            backward.append(("all_reduce", route.entered, stage_parts))
        if at < len(route.moves):
            move, axes, held = route.moves[at], route.axes[at], route.held[at]
            divisor = math.prod([sizes[axis] for axis in held]) // math.prod([sizes[axis] for axis in axes])
            if move.kind in COLLECTIVES:
                forward.append((COLLECTIVES[move.kind], axes, divisor))
            if move.adjoint in COLLECTIVES:
                backward.append((COLLECTIVES[move.adjoint], axes, divisor))
        if at == 0 and not route.summed:
            gathers = bool(route.moves) and route.moves[0].kind == "all_gather"
            early = (len(forward), len(backward)) if gathers else (0, int(enter_at == 0))
    copies = bool(route.moves or route.summed)
    alone = not route.summed and all(move.kind != "reduce_scatter" for move in route.moves)
    return Way(tuple(forward), tuple(backward), copies, alone, bool(route.entered) and not copies, early)


@dataclass(frozen=True)
class _Route:
    """The steps of a change, of which all but the places of the sums are known.

    ``stages`` are the axes that cut the tensor before each move and after the last, ``axes`` those of each move, and
    ``held`` those that cut the smaller of the tensors before and after it, dim by dim.
    """

    moves: tuple[Move, ...]
    summed: Axes
    entered: Axes
    stages: tuple[Axes, ...]
    axes: tuple[Axes, ...]
    held: tuple[Axes, ...]


@lru_cache(maxsize=1 << 18)
def _route(change: Change) -> _Route:
    """Cached by the change, of which it is a function: sizes enter in `way_of`."""
    count = 1 + max(_numbers(change), default=-1)
    mesh = Mesh(tuple(Axis(str(axis), 2) for axis in range(count)))  # whose sizes say nothing
    src = Layout(tuple(Split(_names(before)) for before, _ in change.dims), _names(change.partial))
    dst = Layout(tuple(Split(_names(after)) for _, after in change.dims), _names(change.still_partial))
    gradient_partial = _names(change.gradient_partial)
    moves = moves_between(src, dst, gradient_partial, (mesh.size,) * len(src.dims), mesh)
    summed, entered = sums_between(src, dst, gradient_partial, moves, mesh)
    stages = [[split.axes for split in dims] for dims in (src.dims, *[move.dims for move in moves])]
    held = [
        [axis for a, b in zip(before, after, strict=True) for axis in (a if len(a) >= len(b) else b)]
        for before, after in itertools.pairwise(stages)
    ]
    return _Route(
        tuple(moves),
        _back(summed),
        _back(entered),
        tuple([_back([axis for axes in dims for axis in axes]) for dims in stages]),
        tuple([_back(move.axes) for move in moves]),
        tuple([_back(axes) for axes in held]),
    )


def _numbers(change: Change) -> Iterator[int]:
    for dim in change.dims:
        for axes in dim:
            yield from axes
    yield from (*change.partial, *change.still_partial, *change.gradient_partial)


def _names(axes: Axes) -> tuple[str, ...]:
    return tuple([str(axis) for axis in axes])


def _back(names: Iterable[str]) -> Axes:
    return tuple([int(name) for name in names])
