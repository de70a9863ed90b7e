"""Layouts: the placements of a tensor, which say what each rank holds of it.

A layout says for every dim over which axes it is cut, the major axis first, and over which axes the value is
*partial*: there the true value is the sum over the ranks along the axis. Over every axis that a layout does not
name, the value is replicated.

A dim of size n over axes of sizes (a, b) is cut as DTensor does: into a chunks of ceil(n/a) rows, the last ones
shorter or empty, and each chunk in turn into b. A *unit* above 1 means that the dim is cut between multiples of it
only: a merged dim (batch · sequence) that is cut over its batch has the sequence length as its unit.

A dim with a *holder* is not cut over the first of its axes: the ranks at one coordinate hold all of it, and cut it over
the other axes, and the ranks at other coordinates hold nothing. So one pipeline stage holds a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.mesh.cached_hash import kept_hash
from shardwright.compiler.mesh.mesh import Mesh


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """The ``index``-th of ``parts`` chunks of the range [start, stop): ceil-sized, the last ones shorter or empty.

    >>> [chunk(0, 10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = -(-(stop - start) // parts)
    return min(start + size * index, stop), min(start + size * (index + 1), stop)


@dataclass(frozen=True)
class Split:
    """The cut of one dim: by ``axes``, the major one first, between multiples of ``unit`` rows.

    ``holder`` is the coordinate on the first of the axes at which all rows are, if they are at one alone.

    >>> mesh = Mesh.of(pp=3, dp=2)
    >>> [Split(("pp", "dp"), holder=1).bounds(5, mesh, mesh.coordinates(rank)) for rank in range(6)]
    [(0, 0), (0, 0), (0, 3), (3, 5), (0, 0), (0, 0)]
    """

    axes: tuple[str, ...] = ()
    unit: int = 1
    holder: int | None = None

    def __bool__(self) -> bool:
        return bool(self.axes)

    def bounds(self, size: int, mesh: Mesh, coordinates: dict[str, int]) -> tuple[int, int]:
        """The rows [start, stop) of a dim of ``size`` rows that are held at these coordinates."""
        start, stop, axes = 0, size // self.unit, self.axes
        if self.holder is not None:
            if coordinates[axes[0]] != self.holder:
                return 0, 0
            axes = axes[1:]
        for axis in axes:
            start, stop = chunk(start, stop, mesh.sizes[axis], coordinates[axis])
        return start * self.unit, stop * self.unit

    def parts(self, mesh: Mesh) -> int:
        """Return into how many parts the rows are cut."""
        return mesh.extent(self.axes if self.holder is None else self.axes[1:])

    def without(self, axes: Collection[str]) -> Split:
        """Return the cut over the other axes."""
        kept = tuple(axis for axis in self.axes if axis not in axes)
        if not kept:
            return WHOLE
        return Split(kept, self.unit, self.holder if kept[0] == self.axes[0] else None)

    def __str__(self) -> str:
        if self.holder is None:
            return "·".join(self.axes) + (f"/{self.unit}" if self.unit > 1 else "") or "-"
        held = "·".join((f"{self.axes[0]}:{self.holder}", *self.axes[1:]))
        return held + (f"/{self.unit}" if self.unit > 1 else "")


WHOLE = Split()


@kept_hash
@dataclass(frozen=True)
class Layout:
    """The layout of a tensor: a `Split` per dim, and the axes over which the value is partial, in mesh order.

    >>> mesh = Mesh.of(a=2, b=2)
    >>> layout = Layout.split(1, {0: ["a", "b"]})
    >>> [layout.local_shape((10,), mesh, rank) for rank in range(4)]
    [(3,), (2,), (3,), (2,)]
    >>> print(layout, Layout.replicated(2), Layout.split(2, {1: ["b"]}, partial=["a"]))
    [a·b] [-, -] [-, b] Σa
    """

    dims: tuple[Split, ...]
    partial: tuple[str, ...] = ()

    @staticmethod
    def replicated(ndim: int) -> Layout:
        """Every rank holds the whole tensor."""
        return Layout((WHOLE,) * ndim)

    @staticmethod
    def split(ndim: int, axes: dict[int, Sequence[str]], partial: Iterable[str] = ()) -> Layout:
        """Each dim in ``axes`` is cut over its axes, the major one first."""
        return Layout(tuple(Split(tuple(axes.get(dim, ()))) for dim in range(ndim)), tuple(partial))

    @property
    def split_axes(self) -> frozenset[str]:
        """The axes over which some dim is cut."""
        return frozenset(axis for dim in self.dims for axis in dim.axes)

    @property
    def has_units(self) -> bool:
        """Return whether some dim is cut between multiples of a unit above 1."""
        return any(dim.unit > 1 for dim in self.dims)

    @property
    def held(self) -> tuple[str, int] | None:
        """Return the axis and the coordinate at which alone all entries are, None where there is no such one."""
        return next(((dim.axes[0], dim.holder) for dim in self.dims if dim.holder is not None), None)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)

    def whole(self) -> Layout:
        """Return the layout with the same dims and nothing partial."""
        return Layout(self.dims)

    def without(self, *axes: str) -> Layout:
        """Return the layout on a mesh that lacks some axes."""
        dims = tuple(dim.without(axes) for dim in self.dims)
        return Layout(dims, tuple(axis for axis in self.partial if axis not in axes))

    def local_slice(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[slice, ...]:
        """The part of a tensor of global ``shape`` that ``rank`` holds. The only answer to that question."""
        at = mesh.coordinates(rank)
        return tuple(slice(*dim.bounds(size, mesh, at)) for dim, size in zip(self.dims, shape, strict=True))

    def local_shape(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of that part."""
        return tuple(part.stop - part.start for part in self.local_slice(shape, mesh, rank))

    def slices(self, mesh: Mesh) -> tuple[int, ...]:
        """Return how many parts each dim is cut into: the strategy of this tensor, as users write it."""
        return tuple(dim.parts(mesh) for dim in self.dims)

    def normalised(self, shape: Sequence[int], mesh: Mesh) -> Layout:
        """An equal layout with every unit 1 that can be: where the parts are even, units make no difference."""
        if not self.has_units:
            return self
        dims = tuple(
            replace(dim, unit=1) if not dim.axes or size % (dim.parts(mesh) * dim.unit) == 0 else dim
            for dim, size in zip(self.dims, shape, strict=True)
        )
        return Layout(dims, self.partial)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.dims))}]" + (f" Σ{'·'.join(self.partial)}" if self.partial else "")
