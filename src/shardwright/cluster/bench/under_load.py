"""The time of collectives in a program: amid computing, where ranks that share cores come to them one after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.cluster.bench.device import slowest_s
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import communicator_over
from shardwright.distributed.world import World

_PIECE_S = 2e-3  # what is computed between two collectives
_PIECES = 10
_BUCKET_BYTES, _LONGEST_S = 8 * 2**20, 0.25  # over slow links as many bytes as take so long


@dataclass(frozen=True)
class ProductLoad:
    """Products one after the other, as many as take about `_PIECE_S` on the slowest rank."""

    matrix: Tensor
    products: int
    pieces_s: float  # what `_PIECES` pieces take with nothing between them

    @staticmethod
    def of(device: torch.device) -> ProductLoad:
        """Measure how long products take. All ranks call this together, and get the same."""
        matrix = torch.randn(256, 256, device=device)
        once = ProductLoad(matrix, 10, 0.0)
        fitting = max(1, round(_PIECE_S / (slowest_s(once.piece, device) / once.products)))
        work = ProductLoad(matrix, fitting, 0.0)
        return ProductLoad(matrix, fitting, slowest_s(lambda: work.pieces(_nothing), device))

    def piece(self) -> None:
        """Compute for a while."""
        for _ in range(self.products):
            torch.mm(self.matrix, self.matrix)

    def pieces(self, run: Callable[[], object]) -> None:
        """Compute `_PIECES` pieces, each followed by ``run()``."""
        for _ in range(_PIECES):
            self.piece()
            run()

    def seconds_between(self, run: Callable[[], object]) -> float:
        """Return the seconds that ``run()`` adds to each piece."""
        return (slowest_s(lambda: self.pieces(run), self.matrix.device) - self.pieces_s) / _PIECES


def gradients_hidden(world: World) -> float:
    """Return the share of the shorter that is hidden where gradients are reduced while all ranks compute."""
    mesh, device = Mesh.of(ranks=world.size), world.device
    if world.size == 1:
        return 0.0
    comm = communicator_over(mesh)
    comm.prepare([mesh.names])
    bucket = torch.zeros(_BUCKET_BYTES // 4, device=device)
    eighth = bucket[: len(bucket) // 8]
    eighth_s = slowest_s(lambda: comm.start_all_reduce(eighth, mesh.names)(), device, calls=1)
    bucket = bucket[: math.ceil(len(bucket) * min(1.0, _LONGEST_S / (8 * eighth_s)))]
    work = ProductLoad.of(device)
    reduced_s = slowest_s(lambda: comm.start_all_reduce(bucket, mesh.names)(), device)
    pieces = max(1, round(reduced_s / (work.pieces_s / _PIECES)))
    computed_s = pieces * work.pieces_s / _PIECES

    def both() -> None:
        wait = comm.start_all_reduce(bucket, mesh.names)
        for _ in range(pieces):
            work.piece()
        wait()

    hidden_s = reduced_s + computed_s - slowest_s(both, device)
    comm.close()
    return min(1.0, max(0.0, hidden_s / min(reduced_s, computed_s)))


def _nothing() -> None:
    """Do nothing between two pieces."""
