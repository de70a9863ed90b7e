"""The meshes that a search is made on: every way to cut the devices into axes that their links distinguish.

Axes between hosts and axes inside of a host are told apart, the order of axes of one kind is not. Finer axes can do all
that coarser ones can, so that of the ways into at most so many axes only the finest are searched: on 64 devices of 8
hosts and three axes, 2 x 4 between with 8 inside and 8 between with 2 x 4 inside, and not 8 with 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiler.mesh.mesh import Axis, Mesh


def cuts(mesh: Mesh, ranks_per_host: int | None, most_axes: int) -> tuple[Mesh, ...]:
    """The finest ways to cut a mesh of one axis into at most so many, the even ones first; several are left as given.

    A host's axes come last, whatever their sizes: ranks that follow each other are on one host.

    >>> for mesh in cuts(Mesh.of(d=64), 8, 3): print(mesh)
    d.0=2 d.1=4 d.2=8
    d.0=8 d.1=2 d.2=4
    >>> for mesh in cuts(Mesh.of(d=12), 2, 3): print(mesh)
    d.0=2 d.1=3 d.2=2
    """
    given, most_axes = mesh.without_ones(), min(most_axes, len(mesh.atomic().axes))
    if len(given.axes) != 1 or most_axes == 1:
        return (mesh.grouped(most_axes),)
    [axis] = given.axes
    inside = ranks_per_host if ranks_per_host and axis.size % ranks_per_host == 0 else axis.size
    found = [
        (*between, *within)
        for count in range(most_axes + 1)
        for between in _factors(axis.size // inside, count)
        for within in _factors(inside, most_axes - count)
    ]
    sizes = sorted(set(found), key=lambda of: (max(of), of)) or [(axis.size,)]
    named = ([Axis(f"{axis.name}.{i}", size, axis.link) for i, size in enumerate(of)] for of in sizes)
    return tuple(Mesh(tuple(axes)) for axes in named)


def _factors(size: int, count: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """The ways to write a size as a product of ``count`` factors that do not fall."""
    if count == 0:
        if size == 1:
            yield ()
        return
    for factor in range(least, size + 1):
        if size % factor == 0:
            yield from ((factor, *others) for others in _factors(size // factor, count - 1, factor))
