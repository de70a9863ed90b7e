"""The collectives inside operators that merge statistics over the parts of a batch.

Each takes the mesh, the axes over which the batch is split, and the bytes of two statistics of every channel that a
rank has.
"""

from __future__ import annotations

from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import Collective
from shardwright.rules.row import Directions


def batch_statistics(mesh: Mesh, axes: tuple[str, ...], statistics_bytes: int) -> Directions:
    """Forward, every rank gathers the mean and the summed squared deviations; backward, two sums are reduced."""
    gathered = Collective("all_gather", axes, statistics_bytes * mesh.extent(axes))
    return (gathered,), (Collective("all_reduce", axes, statistics_bytes),)


def running_statistics(mesh: Mesh, axes: tuple[str, ...], statistics_bytes: int) -> Directions:
    """The running mean and variance are averaged over the ranks; the normalisation itself needs no other part."""
    return (Collective("all_reduce", axes, statistics_bytes),), ()
