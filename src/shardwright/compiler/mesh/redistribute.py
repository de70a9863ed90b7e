"""From one layout to another, as a sequence of steps that each know their adjoint.

Per axis, with the value's state before and after (R replicated, S split, P partial) and *g* where the gradient of the
consumers is partial over the axis:

    R -> R, g      enter            | all-reduce
    R -> S         slice            | all-gather
    S -> R         all-gather       | slice
    S -> R, g      all-gather       | reduce-scatter
    S(d) -> S(e)   all-to-all       | all-to-all
    P -> R         all-reduce       | nothing          (with g followed by enter)
    P -> S         reduce-scatter   | all-gather
    P -> P         nothing
    R, S -> P      impossible

Forward, a redistribution turns a value from the source layout into the target layout. Backward, it turns a gradient
that is cut as the target is and partial over ``gradient_partial`` into one that is cut as the source is and whole.

Only the trailing axes of a dim can be removed or appended. What makes the local tensor smaller comes first (slices,
reduce-scatters, all-to-alls), sums are made where it is smallest, and all-gathers come last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal

from shardwright.compiler.mesh.layout import WHOLE, Layout, Split
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.errors import PlanError

Shape = tuple[int, ...]
StepKind = Literal["slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "enter"]
AdjointKind = Literal["slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "nothing"]
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"]

COLLECTIVES: dict[str, CollectiveKind] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}
SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Collective:
    """One collective among the ranks along ``axes``.

    ``bytes`` is the size of the full buffer on rank 0, which holds the largest parts: what an all-reduce reduces in
    place, what an all-gather results in, what a reduce-scatter or an all-to-all starts from, what a shift gives to the
    next rank. Where a dim does not divide, every part of the buffer is counted as long as the longest, since that is
    what travels.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: int

    def sent_bytes(self, mesh: Mesh) -> float:
        """Return what each device sends when the collective runs around a ring."""
        parts = mesh.extent(self.axes)
        if self.kind == "shift":
            return self.bytes
        return self.bytes * (parts - 1) / parts * (2 if self.kind == "all_reduce" else 1)


@dataclass(frozen=True)
class Step:
    """One step of a redistribution, from the layout ``before`` to the layout ``after``.

    ``dim`` is the dim that is sliced, gathered or scattered; an all-to-all gathers ``dim`` and cuts ``to_dim``.
    ``axes`` stand in the order in which they cut the dim, the major one first (mesh order for sums).
    """

    kind: StepKind
    adjoint: AdjointKind
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    dim: int | None = None
    to_dim: int | None = None

    def collectives(
        self, shape: Shape, itemsize: int, mesh: Mesh, reduced_itemsize: int | None = None
    ) -> tuple[Collective | None, Collective | None]:
        """Return what a step and its adjoint communicate of a tensor of this global shape and bytes per entry.

        Args:
            reduced_itemsize: the bytes per entry of a gradient where it is summed, if others.
        """
        parts = mesh.extent(self.axes)
        if parts == 1:
            return None, None
        piece = 1
        for size, before, after in zip(shape, self.before.dims, self.after.dims, strict=True):
            piece *= min(_longest(size, before, mesh), _longest(size, after, mesh))
        entries = piece if self.kind in ("all_reduce", "enter") else piece * parts

        def collective(kind: str, size: int) -> Collective | None:
            return Collective(COLLECTIVES[kind], self.axes, entries * size) if kind in COLLECTIVES else None

        backward = reduced_itemsize if self.sums_gradient and reduced_itemsize else itemsize
        return collective(self.kind, itemsize), collective(self.adjoint, backward)

    @property
    def sums_gradient(self) -> bool:
        """Return whether its adjoint sums a gradient over ranks."""
        return self.adjoint in SUMS

    def forward_bytes(self, shape: Shape, itemsize: int, mesh: Mesh) -> float:
        """The bytes that each device sends for the step."""
        forward, _ = self.collectives(shape, itemsize, mesh)
        return forward.sent_bytes(mesh) if forward else 0.0

    def backward_bytes(self, shape: Shape, itemsize: int, mesh: Mesh) -> float:
        """The bytes that each device sends for the adjoint."""
        _, backward = self.collectives(shape, itemsize, mesh)
        return backward.sent_bytes(mesh) if backward else 0.0

    @property
    def function(self) -> str:
        """The name of the function of `shardwright.compiler.mesh.collectives` that performs the step."""
        return "local_slice" if self.kind == "slice" else self.kind

    def arguments(self, shape: Shape) -> dict[str, Any]:
        """The keyword arguments of the function that performs the step on a tensor of global ``shape``."""
        if self.dim is None:
            return {"axes": self.axes}
        count = len(self.axes)
        if self.kind == "all_to_all":
            assert self.to_dim is not None
            source, target = self.before.dims[self.dim], self.after.dims[self.to_dim]
            found: dict[str, Any] = {"dim": self.dim, "to_dim": self.to_dim, "axes": self.axes}
            found |= {"size": shape[self.dim], "to_size": shape[self.to_dim]}
            found |= _unless_default(within=source.axes[:-count], to_within=target.axes[:-count])
            return found | _unless_default(unit=source.unit, to_unit=target.unit)
        cut = (self.before if self.kind == "all_gather" else self.after).dims[self.dim]
        found = {"dim": self.dim, "axes": self.axes, "size": shape[self.dim]}
        found |= _unless_default(within=cut.axes[:-count], unit=cut.unit)
        return found | ({"adjoint": self.adjoint} if self.kind == "all_gather" else {})

    def __str__(self) -> str:
        kind = self.kind.replace("_", "-")
        return f"{kind} over {'·'.join(self.axes)}: {self.before} -> {self.after}"


def _unless_default(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value not in ((), 1)}


def _longest(size: int, split: Split, mesh: Mesh) -> int:
    """The rows of a dim that the rank holds which holds most: rank 0, unless others alone hold any."""
    return -(-(size // split.unit) // split.parts(mesh)) * split.unit if split.axes else size


def possible(src: Layout, dst: Layout) -> bool:
    """Return whether ``src`` can be turned into ``dst``: only a partial value can be partial afterwards."""
    return set(dst.partial) <= set(src.partial)


def copies(steps: Sequence[Step]) -> bool:
    """Return whether a tensor that takes these steps comes to lie in memory of its own."""
    return any(step.kind != "enter" for step in steps)


def enters(steps: Sequence[Step]) -> bool:
    """Return whether a value stays as it is and its gradient is summed."""
    return [step.kind for step in steps] == ["enter"]


def moves_alone(steps: Sequence[Step]) -> bool:
    """Return whether these steps sum nothing, so that to do them twice gives the same to the last bit."""
    return all(step.kind in ("all_gather", "all_to_all", "slice", "enter") for step in steps)


def redistribute(
    src: Layout, dst: Layout, gradient_partial: tuple[str, ...], shape: Shape, mesh: Mesh
) -> tuple[Step, ...]:
    """The steps that turn a tensor of global ``shape`` from ``src`` into ``dst``; none where nothing is to be done.

    ``gradient_partial`` are the axes over which the gradient of the result comes in as partial sums. The last step's
    ``after`` equals ``dst`` up to units that make no difference (`Layout.normalised`).

    Raises:
        PlanError: where ``dst`` is partial over an axis over which ``src`` is not, or ``gradient_partial`` names an
            axis over which ``dst`` is not replicated.
    """
    if all(size % mesh.size == 0 and size for size in shape) and not (src.has_units or dst.has_units):
        shape = (mesh.size,) * len(shape)  # all parts are even: the steps do not depend on the sizes
    return _redistribute(src, dst, gradient_partial, shape, mesh)


@lru_cache(maxsize=1 << 18)
def _redistribute(
    src: Layout, dst: Layout, gradient_partial: tuple[str, ...], shape: Shape, mesh: Mesh
) -> tuple[Step, ...]:
    """Return what `redistribute` does.

    Cached by frozen values of whole numbers and names, of which it is a function.
    """
    if held := src.held or dst.held:
        raise PlanError(
            f"what the ranks at {held[1]} of {held[0]} hold alone is handed over by them, and by no redistribution of "
            f"{src} to {dst} (a defect, to be reported)"
        )
    if not possible(src, dst):
        made = ", ".join(axis for axis in dst.partial if axis not in src.partial)
        raise PlanError(f"a value laid out as {src} cannot become {dst}: it is not a partial sum over {made}")
    wrong = [axis for axis in gradient_partial if axis in dst.split_axes or axis in dst.partial]
    if wrong:
        raise PlanError(
            f"a gradient can be partial only over axes on which its value is replicated; {dst} with a gradient "
            f"partial over {', '.join(wrong)} is not such a value"
        )
    moves = moves_between(src, dst, gradient_partial, shape, mesh)
    return tuple(_steps(src, moves, *sums_between(src, dst, gradient_partial, moves, mesh), shape, mesh))


def moves_between(src: Layout, dst: Layout, gradient_partial: Sequence[str], shape: Shape, mesh: Mesh) -> list[Move]:
    """The steps that change how dims are cut, adjacent all-gathers of one dim as one."""
    return _merged(Route(src, dst, shape, mesh).moves(frozenset(gradient_partial)))


def sums_between(
    src: Layout, dst: Layout, gradient_partial: Sequence[str], moves: Sequence[Move], mesh: Mesh
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes over which the value, and those over which its gradient, is added up beside the moves."""
    if not (src.partial or gradient_partial):
        return (), ()
    scattered = {axis for move in moves if move.kind == "reduce_scatter" for axis in move.axes}
    summed = mesh.ordered(set(src.partial) - set(dst.partial) - scattered)
    return summed, mesh.ordered(set(gradient_partial) - src.split_axes)


def where_to_sum(sizes: Sequence[int], moves: Sequence[Move], summed: Sequence[str]) -> tuple[int, int]:
    """Before which move the value, and before which its gradient is added up: where the local tensor is smallest.

    ``sizes`` are those of the local tensor before each move and after the last.
    """
    # An axis has to be summed over before it cuts a dim.
    cut = [index for index, move in enumerate(moves) if move.kind == "slice" and set(move.axes) & set(summed)]
    return sizes.index(min(sizes[: min(cut, default=len(moves)) + 1])), sizes.index(min(sizes))


@dataclass(frozen=True)
class Move:
    """A step without the partial axes: the dims after it say enough."""

    kind: StepKind
    adjoint: AdjointKind
    axes: tuple[str, ...]
    dim: int
    dims: tuple[Split, ...]
    to_dim: int | None = None


class Route:
    """Finds the moves, one at a time, from the dims as they stand towards the target's."""

    def __init__(self, src: Layout, dst: Layout, shape: Shape, mesh: Mesh) -> None:
        self.dims = list(src.dims)
        self.partial = set(src.partial)
        self.target = dst.dims
        self.target_axes = dst.split_axes
        self.shape = shape
        self.mesh = mesh
        self.kept: list[int] = []  # for every dim, how many of its major axes already cut it as the target demands

    def moves(self, gradient_partial: frozenset[str]) -> Iterator[Move]:
        """Whatever shrinks the local tensor, as long as there is such a move; else one all-gather; until done."""
        while True:
            self.kept = [self._kept(dim) for dim in range(len(self.dims))]
            move = self._slice() or self._reduce_scatter() or self._all_to_all() or self._all_gather(gradient_partial)
            if move is None:
                return
            yield move

    def _kept(self, dim: int) -> int:
        now, goal = self.dims[dim], self.target[dim]
        if now == goal:
            return len(goal.axes)
        count = 0
        extent = 1
        for axis, wanted in zip(now.axes, goal.axes, strict=False):
            extent *= self.mesh.sizes[axis]
            even = self.shape[dim] % (extent * now.unit) == 0 == self.shape[dim] % (extent * goal.unit)
            if axis != wanted or not (now.unit == goal.unit or even):
                break
            count += 1
        return count

    def _excess(self, dim: int) -> tuple[str, ...]:
        return self.dims[dim].axes[self.kept[dim] :]

    def _missing(self, dim: int) -> tuple[str, ...]:
        """The axes to append to the dim, where nothing has to be removed from it before."""
        kept = self.kept[dim]
        return self.target[dim].axes[kept:] if kept == len(self.dims[dim].axes) else ()

    def _append(self, dim: int, axes: tuple[str, ...]) -> None:
        goal = self.target[dim]
        self.dims[dim] = Split(self.dims[dim].axes + axes, goal.unit)

    def _remove(self, dim: int, count: int) -> None:
        now = self.dims[dim]
        self.dims[dim] = Split(now.axes[:-count], now.unit) if now.axes[:-count] else WHOLE

    def _slice(self) -> Move | None:
        held = self.partial.union(*(split.axes for split in self.dims))
        for dim in range(len(self.dims)):
            run = tuple(takewhile(lambda axis: axis not in held, self._missing(dim)))
            if run:
                self._append(dim, run)
                return Move("slice", "all_gather", run, dim, tuple(self.dims))
        return None

    def _reduce_scatter(self) -> Move | None:
        for dim in range(len(self.dims)):
            run = tuple(takewhile(lambda axis: axis in self.partial, self._missing(dim)))
            if run:
                self._append(dim, run)
                self.partial.difference_update(run)
                return Move("reduce_scatter", "all_gather", run, dim, tuple(self.dims))
        return None

    def _all_to_all(self) -> Move | None:
        for to_dim in range(len(self.dims)):
            missing = self._missing(to_dim)
            if not missing:
                continue
            for dim in range(len(self.dims)):
                excess = self._excess(dim)
                for count in range(min(len(excess), len(missing)), 0, -1):
                    if excess[-count:] == missing[:count]:
                        self._remove(dim, count)
                        self._append(to_dim, missing[:count])
                        return Move("all_to_all", "all_to_all", missing[:count], dim, tuple(self.dims), to_dim)
        return None

    def _all_gather(self, gradient_partial: frozenset[str]) -> Move | None:
        """Gather the trailing axis that stands most in the way, or, where none does, any that has to go."""

        def key(dim: int) -> tuple[bool, bool, int]:
            excess = self._excess(dim)
            blocks = len(self.target[dim].axes) > self.kept[dim] or any(a in self.target_axes for a in excess[:-1])
            return not blocks, excess[-1] in self.target_axes, dim

        dim = min((dim for dim in range(len(self.dims)) if self._excess(dim)), key=key, default=None)
        if dim is None:
            return None
        # What could not be reduce-scattered so far is cheaper to sum now and slice later: afterwards the tensor is at
        # least twice as large.
        self.partial -= self.target_axes
        axis = self.dims[dim].axes[-1]
        self._remove(dim, 1)
        adjoint: AdjointKind = "reduce_scatter" if axis in gradient_partial else "slice"
        return Move("all_gather", adjoint, (axis,), dim, tuple(self.dims))


def _merged(moves: Iterator[Move]) -> list[Move]:
    """Adjacent all-gathers of one dim become one."""
    merged: list[Move] = []
    for move in moves:
        last = merged[-1] if merged else None
        if last and move.kind == "all_gather" and (last.kind, last.adjoint, last.dim) == (
            move.kind, move.adjoint, move.dim,
        ):  # fmt: skip
            merged[-1] = Move(move.kind, move.adjoint, move.axes + last.axes, move.dim, move.dims)
        else:
            merged.append(move)
    return merged


def _steps(
    src: Layout, moves: Sequence[Move], summed: tuple[str, ...], entered: tuple[str, ...], shape: Shape, mesh: Mesh
) -> Iterator[Step]:
    """The moves as steps, with the all-reduces, forward and backward, where the local tensor is smallest."""
    sum_at = enter_at = 0
    if moves and (summed or entered):
        stages = [src.dims, *(move.dims for move in moves)]
        sizes = [math.prod(map(_longest, shape, dims, [mesh] * len(shape))) for dims in stages]
        sum_at, enter_at = where_to_sum(sizes, moves, summed)
    now = src
    for index in range(len(moves) + 1):
        if index == sum_at and summed:
            after = Layout(now.dims, tuple(axis for axis in now.partial if axis not in summed))
            yield Step("all_reduce", "nothing", summed, now, after)
            now = after
        if index == enter_at and entered:
            yield Step("enter", "all_reduce", entered, now, now)
        if index < len(moves):
            move = moves[index]
            scattered = move.axes if move.kind == "reduce_scatter" else ()
            after = Layout(move.dims, tuple(axis for axis in now.partial if axis not in scattered))
            yield Step(move.kind, move.adjoint, move.axes, now, after, move.dim, move.to_dim)
            now = after
