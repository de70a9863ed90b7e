"""The collectives inside operators that merge what each of them has: statistics of the parts of a batch, or of classes.

Each takes the mesh, the axes over which these are split, and the local shape and element size of the first operand.
Statistics are kept in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.rules.row import Directions


def batch_statistics(mesh: Mesh, axes: tuple[str, ...], local: Sequence[int], itemsize: int) -> Directions:
    """Forward, every rank gathers the mean and the summed squared deviations; backward, two sums are reduced."""
    statistics_bytes = _of_channels(local, itemsize)
    gathered = Collective("all_gather", axes, statistics_bytes * mesh.extent(axes))
    return (gathered,), (Collective("all_reduce", axes, statistics_bytes),)


def running_statistics(mesh: Mesh, axes: tuple[str, ...], local: Sequence[int], itemsize: int) -> Directions:
    """The running mean and variance are averaged over the ranks; the normalisation itself needs no other part."""
    return (Collective("all_reduce", axes, _of_channels(local, itemsize)),), ()


def class_statistics(mesh: Mesh, axes: tuple[str, ...], local: Sequence[int], itemsize: int) -> Directions:
    """Every rank merges two statistics of a share of the samples, and gathers one of all and the sum of each share."""
    ranks, samples = mesh.extent(axes), local[0] * math.prod(local[2:])
    share = max(1, math.ceil(samples / ranks))
    exchanged = Collective("all_to_all", axes, 2 * share * max(itemsize, 4) * ranks)
    return (exchanged, Collective("all_gather", axes, (share + 1) * max(itemsize, 4) * ranks)), ()


def _of_channels(local: Sequence[int], itemsize: int) -> int:
    """The bytes of two statistics of every channel."""
    return 2 * local[1] * max(itemsize, 4)
