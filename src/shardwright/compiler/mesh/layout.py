"""Layouts: the placements of a tensor, which say what each rank holds of it.

A layout says for every dim over which axes it is cut, the major axis first, and over which axes the value is
*partial*: there the true value is the sum over the ranks along the axis. Over every axis that a layout does not
name, the value is replicated.

A dim of size n over axes of sizes (a, b) is cut as DTensor does: into a chunks of ceil(n/a) rows, the last ones
shorter or empty, and each chunk in turn into b. A *unit* above 1 means that the dim is cut between multiples of it
only: a merged dim (batch · sequence) that is cut over its batch has the sequence length as its unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    """The cut of one dim: by ``axes``, the major one first, between multiples of ``unit`` rows."""

    axes: tuple[str, ...] = ()
    unit: int = 1

    def __bool__(self) -> bool:
        return bool(self.axes)

    def bounds(self, size: int, mesh: Mesh, coordinates: dict[str, int]) -> tuple[int, int]:
        """The rows [start, stop) of a dim of ``size`` rows that are held at these coordinates."""
        start, stop = 0, size // self.unit
        for axis in self.axes:
            start, stop = chunk(start, stop, mesh.sizes[axis], coordinates[axis])
        return start * self.unit, stop * self.unit


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
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)

    def whole(self) -> Layout:
        """Return the layout with the same dims and nothing partial."""
        return Layout(self.dims)

    def without(self, *axes: str) -> Layout:
        """Return the layout on a mesh that lacks some axes."""
        dims = tuple(Split(tuple(axis for axis in dim.axes if axis not in axes), dim.unit) for dim in self.dims)
        kept = tuple(dim if dim.axes else WHOLE for dim in dims)
        return Layout(kept, tuple(axis for axis in self.partial if axis not in axes))

    def local_slice(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[slice, ...]:
        """The part of a tensor of global ``shape`` that ``rank`` holds. The only answer to that question."""
        at = mesh.coordinates(rank)
        return tuple(slice(*dim.bounds(size, mesh, at)) for dim, size in zip(self.dims, shape, strict=True))

    def local_shape(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of that part."""
        return tuple(part.stop - part.start for part in self.local_slice(shape, mesh, rank))

    def slices(self, mesh: Mesh) -> tuple[int, ...]:
        """Return how many parts each dim is cut into: the strategy of this tensor, as users write it."""
        return tuple(mesh.extent(dim.axes) for dim in self.dims)

    def normalised(self, shape: Sequence[int], mesh: Mesh) -> Layout:
        """An equal layout with every unit 1 that can be: where the parts are even, units make no difference."""
        if not self.has_units:
            return self
        dims = tuple(
            Split(dim.axes) if not dim.axes or size % (mesh.extent(dim.axes) * dim.unit) == 0 else dim
            for dim, size in zip(self.dims, shape, strict=True)
        )
        return Layout(dims, self.partial)

    def __str__(self) -> str:
        dims = ", ".join("·".join(d.axes) + (f"/{d.unit}" if d.unit > 1 else "") or "-" for d in self.dims)
        return f"[{dims}]" + (f" Σ{'·'.join(self.partial)}" if self.partial else "")
