"""Devices as a mesh of named axes.

A mesh is an ordered list of named axes; rank r stands at the coordinates of r in row-major order, the first
axis being the major one. Planning happens on the *atomic* mesh, in which every axis is split into prime
factors: on `dp=2, tp=4` a dim can then be cut into 4 over (dp, tp.0) and another into 2 over (tp.1,).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.common.words import in_time
from shardwright.errors import UsageError

UNNAMED = "ranks"
"""The one axis of devices to whose mesh the user gave no names."""
PIPELINE = "pp"
"""The axis of pipeline stages, the major one of the devices."""
SEARCHED_STAGES = f"{PIPELINE}=auto"
"""The mesh of devices without names on which plans with pipeline stages are looked for, too, as users write it."""
MICROBATCHES = "micro"
"""The axis of microbatches, the major one of a plan's mesh: each rank works through it one after the other."""


@dataclass(frozen=True)
class Link:
    """The link between the devices of an axis: ``latency_s`` seconds per message, ``bandwidth`` bytes per second."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True)
class Axis:
    """One named axis; ``link`` is None where nothing is known about it."""

    name: str
    size: int
    link: Link | None = None


@dataclass(frozen=True)
class Mesh:
    """An ordered tuple of axes.

    >>> mesh = Mesh.of(dp=2, tp=4)
    >>> mesh.size, mesh.coordinates(6)
    (8, {'dp': 1, 'tp': 2})
    >>> mesh.group(6, ["tp"])
    (4, 5, 6, 7)
    >>> print(mesh.atomic())
    dp=2 tp.0=2 tp.1=2
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise UsageError(f"the axes of a mesh need different names, got {names}")
        for axis in self.axes:
            if axis.size < 1:
                raise UsageError(f"axis {axis.name!r} has size {axis.size}; sizes are 1 or more")

    @staticmethod
    def of(**sizes: int) -> Mesh:
        """A mesh from ``name=size`` pairs, the first being the major axis."""
        return Mesh(tuple(Axis(name, size) for name, size in sizes.items()))

    @staticmethod
    def parse(text: str) -> Mesh:
        """A mesh from ``"dp=2,tp=4"``.

        Raises:
            UsageError: where the text is anything else.
        """
        axes = []
        for part in text.split(","):
            name, equals, size = part.strip().partition("=")
            if not (name.isidentifier() and equals and size.isdigit()):
                raise UsageError(f"a mesh is written as dp=2,tp=4; got {part.strip()!r} in {text!r}")
            axes.append(Axis(name, int(size)))
        return Mesh(tuple(axes))

    @property
    def is_unnamed(self) -> bool:
        """Return whether the user named none of the axes: they are all devices, or parts of these."""
        return all(name == UNNAMED or name.startswith(f"{UNNAMED}.") for name in self.names)

    @cached_property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, in mesh order."""
        return {axis.name: axis.size for axis in self.axes}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def extent(self, axes: Iterable[str]) -> int:
        """The number of parts that these axes together cut a dim into."""
        parts = 1
        for axis in axes:  # a loop, since a search asks a million times
            parts *= self.sizes[axis]
        return parts

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every axis."""
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is not on a mesh of {self.size} devices ({self})")
        found = {}
        for axis in reversed(self.axes):
            rank, found[axis.name] = divmod(rank, axis.size)
        return {axis.name: found[axis.name] for axis in self.axes}

    def rank_at(self, coordinates: dict[str, int]) -> int:
        """The rank at these coordinates; the inverse of `coordinates`."""
        rank = 0
        for axis in self.axes:
            rank = rank * axis.size + coordinates[axis.name]
        return rank

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on these axes only, itself included, in rank order."""
        along = set(axes)
        mine = self.coordinates(rank)
        return tuple(
            other
            for other in range(self.size)
            if all(at == mine[axis] for axis, at in self.coordinates(other).items() if axis not in along)
        )

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """The ranks of the mesh in groups that differ on these axes only, by the first rank of each.

        >>> Mesh.of(dp=2, tp=2).groups(["dp"])
        [(0, 2), (1, 3)]
        """
        along, found = set(axes), dict[tuple[int, ...], list[int]]()
        for rank in range(self.size):
            at = self.coordinates(rank)
            found.setdefault(tuple(at[name] for name in at if name not in along), []).append(rank)
        return [tuple(members) for members in found.values()]

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes in mesh order."""
        chosen = set(axes)
        return tuple([name for name in self.sizes if name in chosen])

    def atomic(self) -> Mesh:
        """The mesh whose axes have prime sizes; ranks keep their places. Axes of size 1 disappear."""
        axes = []
        for axis in self.axes:
            primes = prime_factors(axis.size)
            names = [axis.name] if len(primes) == 1 else [f"{axis.name}.{i}" for i in range(len(primes))]
            axes += [Axis(name, prime, axis.link) for name, prime in zip(names, primes, strict=True)]
        return Mesh(tuple(axes))

    def grouped(self, count: int) -> Mesh:
        """The atomic mesh, its atoms joined into at most ``count`` axes; axes that were given are never joined.

        >>> print(Mesh.of(d=32).grouped(2), "|", Mesh.of(dp=4, tp=4).grouped(2), "|", Mesh.of(dp=2, tp=4).grouped(3))
        d.0=4 d.1=8 | dp=4 tp=4 | dp=2 tp.0=2 tp.1=2
        """
        atoms = self.atomic()
        if len(atoms.axes) <= count:
            return atoms
        if len(self.without_ones().axes) > 1:
            return self.without_ones()
        [axis] = self.without_ones().axes
        sizes = [1] * count
        for prime in reversed(prime_factors(axis.size)):
            sizes[sizes.index(min(sizes))] *= prime
        return Mesh(tuple(Axis(f"{axis.name}.{i}", size, axis.link) for i, size in enumerate(sorted(sizes))))

    def without_ones(self) -> Mesh:
        """The mesh without its axes of size 1; ranks keep their places."""
        return Mesh(tuple(axis for axis in self.axes if axis.size > 1))

    def __str__(self) -> str:
        if len(self.axes) > 1 and self.is_unnamed:
            return f"{' x '.join(str(axis.size) for axis in self.axes)} {UNNAMED}"
        return " ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one device"


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of a plan, through which ``microbatches`` parts of a batch go.

    There are ``count`` groups of ranks with ``each`` stages; stage ``s`` is on group ``s % count``. ``of`` names the
    stage of each operator that depends on the batch and on parameters. Others, as the cast of a weight or a mask of
    positions, are computed by every stage that reads them. ``schedule`` is one of `plan.pricing.schedule`.

    ``holders`` names the group that holds each parameter alone, None for a parameter that is sharded over all groups;
    of others each group holds what the plan of one stage says.
    """

    count: int
    microbatches: int
    of: Mapping[str, int]
    schedule: str = "gpipe"
    each: int = 1
    holders: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of stages."""
        return self.count * self.each

    def group(self, stage: int) -> int:
        """Return the group of ranks of a stage: their coordinate on the axis of stages."""
        return stage % self.count

    def devices(self, mesh: Mesh) -> Mesh:
        """Return the mesh of the ranks for a plan's ``mesh``: stages first, and no axis that is laid out in time."""
        axes = tuple(axis for axis in mesh.axes if axis.name != MICROBATCHES)
        return Mesh((Axis(PIPELINE, self.count), *axes))


@dataclass(frozen=True)
class TriedStages:
    """A number of pipeline stages that was tried, 1 for none: what a step takes with it, or why there is no plan.

    Where ``is_bound`` it takes no less than that, which is no less than with another number of stages.
    """

    stages: int
    microbatches: int | None = None
    step_s: float | None = None
    why: str | None = None
    is_bound: bool = False

    def __str__(self) -> str:
        name = "without stages" if self.stages == 1 else f"{PIPELINE}={self.stages}"
        if self.step_s is None:
            return f"{name}: {self.why}"
        several = f", {self.microbatches} microbatches" if self.microbatches else ""
        return f"{name}{several}: {'at least ' if self.is_bound else ''}{in_time(self.step_s)}"


def prime_factors(n: int) -> list[int]:
    """The prime factors of ``n``, ascending.

    >>> prime_factors(12)
    [2, 2, 3]
    """
    factors = []
    p = 2
    while p * p <= n:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors + [n] * (n > 1)
