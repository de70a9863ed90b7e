"""The time of collectives over links, the links that the ranks of a group have, and the meshes that links distinguish.

A collective's time is a `Curve` over the bytes of its whole buffer (`mesh.redistribute.Collective.bytes`), in segments
of latency plus bytes over bandwidth, one curve for every kind of collective, number of ranks, and kind of link:
"inside" a host or "between" hosts.

Ranks are numbered host by host, in row-major order over the mesh, so that a group along some axes spans blocks of
(stride x size of its major axis) ranks: it is inside a host where such blocks divide ``ranks_per_host``, else it is
between hosts. `Axis.link`, where given, counts instead. Groups that have more ranks on each host use more of its
network, as all groups along the same axes communicate at once.

A search runs on every mesh into which the devices can be cut so that links tell its axes apart: axes between hosts
differ from those inside a host, the order of axes of one kind does not count. Finer axes can do all that coarser ones
can, so that of the meshes of at most so many axes only the finest are searched: on 64 devices of 8 hosts and three
axes, 2 x 4 between with 8 inside and 8 between with 2 x 4 inside, and not 8 with 8.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwright.compiler.mesh.mesh import Axis, Mesh
from shardwright.compiler.mesh.redistribute import CollectiveKind
from shardwright.errors import UsageError

LinkKind = Literal["inside", "between"]


@dataclass(frozen=True)
class Segment:
    """From ``from_bytes`` on, a buffer of b bytes takes ``latency_s + b / bandwidth`` seconds.

    ``latency_s`` is below zero where larger buffers are slower by the byte.
    """

    from_bytes: int
    latency_s: float
    bandwidth: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bandwidth


@dataclass(frozen=True)
class Curve:
    """Seconds over bytes, in segments that begin at 0 and never fall.

    >>> curve = Curve((Segment(0, 1e-3, 1e9), Segment(1_000_000, 0.0, 5e8)))
    >>> round(curve.seconds(500_000), 6), round(curve.seconds(4_000_000), 6)
    (0.0015, 0.008)

    Raises:
        UsageError: where the segments do not begin at 0, are out of order, or fall.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments or self.segments[0].from_bytes != 0:
            raise UsageError("the segments of a curve begin with from_bytes 0")
        for segment in self.segments:
            if not (segment.bandwidth > 0 and segment.seconds(segment.from_bytes) > 0):
                raise UsageError(f"{segment} takes no time; latency and bandwidth must give more than 0 seconds")
        for left, right in zip(self.segments, self.segments[1:], strict=False):
            if right.from_bytes <= left.from_bytes:
                raise UsageError(f"the segments of a curve rise: {right.from_bytes} follows {left.from_bytes}")
            if right.seconds(right.from_bytes) < left.seconds(right.from_bytes) * (1 - 1e-6):
                raise UsageError(f"more bytes would take less time at {right.from_bytes} bytes: {left}, then {right}")

    @cached_property
    def _starts(self) -> list[int]:
        return [segment.from_bytes for segment in self.segments]

    def seconds(self, size_bytes: float) -> float:
        """The time of a collective on a buffer of so many bytes."""
        return self.segments[bisect_right(self._starts, size_bytes) - 1].seconds(size_bytes)


@dataclass(frozen=True)
class LinkCost:
    """The time of one kind of collective among ``ranks`` ranks; ``points`` are the (bytes, seconds) it was fitted to.

    Between hosts, ``per_host`` of the ranks stand on each host, and groups of the other ranks communicate beside them.
    """

    where: LinkKind
    collective: CollectiveKind
    ranks: int
    curve: Curve
    points: tuple[tuple[int, float], ...] = ()
    per_host: int = 1

    def residuals(self) -> list[float]:
        """Return the error of the curve at each fitted point, as a share: 0.1 is predicted 10 % too slow."""
        return [self.curve.seconds(size) / seconds - 1 for size, seconds in self.points]


@dataclass(frozen=True)
class LinkTime:
    """The time of a collective: a curve, what to scale the bytes by, and the seconds to add."""

    curve: Curve
    scale: float
    extra_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.curve.seconds(size_bytes * self.scale) + self.extra_s


def link_time(
    links: Sequence[LinkCost], kind: CollectiveKind, ranks: int, where: LinkKind, per_host: int = 1
) -> LinkTime | None:
    """Return what fits best of the measured collectives, None where nothing does; ``per_host`` as in `LinkCost`.

    A number of ranks that was not measured takes the next smaller one, or the smallest: as many bytes sent per
    rank take as long, and the latency grows with the steps of a tree, log2(ranks). Of the curves between hosts
    those count whose groups have as many ranks on each host, or the next smaller number.
    """
    if where == "inside":
        per_host = 1  # all ranks are on one host, whose network they do not share
    known = [c for c in links if c.collective == kind and c.where == where]
    if not known:
        return None
    side_by_side = _up_to({c.per_host for c in known}, per_host)
    curves = {c.ranks: c.curve for c in known if c.per_host == side_by_side}
    measured = _up_to(curves, ranks)
    curve = curves[measured]
    scale = _on_the_way(kind, ranks, per_host) / _on_the_way(kind, measured, side_by_side)
    return LinkTime(curve, scale, curve.seconds(0) * (math.log2(ranks) / math.log2(measured) - 1))


def _on_the_way(kind: CollectiveKind, ranks: int, per_host: int) -> float:
    """The part of a buffer that each rank sends over its share of a host's network, or of the links inside a host.

    Around a ring one rank of each host sends to the next host, with the shares of all ``per_host`` of them; in an
    all-to-all every rank sends by itself what is for the ranks of other hosts.
    """
    return 1 - per_host / ranks if kind == "all_to_all" else (1 - 1 / ranks) / per_host


def _up_to(known: Collection[int], asked: int) -> int:
    """The largest known number up to the one asked for, or the smallest."""
    return max((number for number in known if number <= asked), default=min(known))


def link_along(mesh: Mesh, axes: Sequence[str], ranks_per_host: int | None) -> LinkKind:
    """Return whether the groups along ``axes`` stay inside a host; see the top of this file.

    >>> mesh = Mesh.of(dp=2, tp=8)
    >>> link_along(mesh, ["tp"], 8), link_along(mesh, ["dp"], 8), link_along(mesh, ["dp"], 16)
    ('inside', 'between', 'inside')
    """
    if ranks_per_host is None:
        return "inside"
    stride = block = 1
    for axis in reversed(mesh.axes):
        stride *= axis.size
        if axis.name in axes and axis.size > 1:
            block = stride
    return "inside" if ranks_per_host % block == 0 else "between"


def per_host_along(mesh: Mesh, axes: Sequence[str], ranks_per_host: int) -> int:
    """Return how many ranks of each group along ``axes`` stand on one host.

    >>> mesh = Mesh.of(dp=8, tp=4)
    >>> per_host_along(mesh, ["dp"], 8), per_host_along(mesh, ["tp"], 8), per_host_along(mesh, ["dp", "tp"], 8)
    (2, 4, 8)
    """
    stride = found = 1
    for axis in reversed(mesh.axes):
        if axis.name in axes:
            found *= max(1, min(axis.size, ranks_per_host // stride))
        stride *= axis.size
    return found


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
