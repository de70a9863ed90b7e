"""The overheads of a step beside its operators and collectives, and the time of collectives between computations.

The overheads are those of optimizers, of sharded parameters, and of the call itself. Ranks that share cores come to a
collective of a program one after another.

All are measured as steps have them: by the optimizers of torch, by DTensors as models hold them, and by a model of one
small layer that `sw.parallelize` runs, while all ranks do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from shardwright.cluster.bench.device import DeviceSpeeds, slowest_s
from shardwright.cluster.bench.stopwatch import beyond_caches, cache_bytes
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import communicator_over
from shardwright.compiler.plan.pricing.hardware import Hardware, Updating
from shardwright.compiler.plan.pricing.memory import updated_times
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.distributed.world import World
from shardwright.runtime.freed_memory import keep_freed_memory
from shardwright.runtime.parallel import parallelize
from shardwright.runtime.programs.splitting import Splitting, local_part
from shardwright.runtime.updates.optimizers import note_trained

_SMALL, _LARGE = 64, 4  # parameters
_LARGE_BYTES = 4 * 2**20
_STEPS = 20
_AXIS = "ranks"
Make = Callable[[Sequence[nn.Parameter]], Optimizer]
# By the states that they keep of each entry.
_OPTIMIZERS: dict[int, Make] = {
    0: lambda parameters: SGD(parameters, 1e-3),
    1: lambda parameters: SGD(parameters, 1e-3, momentum=0.9),
    2: lambda parameters: AdamW(parameters, 1e-3),
}


@dataclass(frozen=True)
class StepOverheads:
    """The fields of `shardwright.compiler.plan.pricing.hardware.Hardware` that are about these overheads."""

    updates: tuple[Updating, ...]
    split_s: float
    around_s: float


def measure_overheads(world: World, speeds: DeviceSpeeds) -> StepOverheads:
    """Return the figures of the slowest rank; ``speeds`` are its device's. All ranks call this together."""
    if world.device.type == "cpu":
        keep_freed_memory()  # as in training
    updates = tuple(_updating(per_entry, make, world.device) for per_entry, make in _OPTIMIZERS.items())
    return StepOverheads(updates, _split_s(world), _around_s(world, speeds))


def _updating(per_entry: int, make: Make, device: torch.device) -> Updating:
    small = [nn.Parameter(torch.zeros(4, device=device)) for _ in range(_SMALL)]
    parameter_s = slowest_s(_steps(make, small), device) / _SMALL
    entries = beyond_caches(_LARGE_BYTES, cache_bytes(device)) // 4
    large = [nn.Parameter(torch.randn(entries, device=device)) for _ in range(_LARGE)]
    took_s = slowest_s(_steps(make, large), device)
    moved_bytes = sum(parameter.nbytes for parameter in large) * updated_times(per_entry)
    return Updating(per_entry, moved_bytes / max(took_s - _LARGE * parameter_s, took_s / 2), parameter_s)


def _steps(make: Make, parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Return a step of the optimizer, which then lets the gradients go."""
    note_trained(parameters)
    optimizer, gradients = make(parameters), [torch.ones_like(parameter) for parameter in parameters]

    def step() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    return step


def _split_s(world: World) -> float:
    """Return the extra seconds of a sharded parameter in a step: forward, backward and AdamW."""
    mesh, device = Mesh.of(**{_AXIS: world.size}), world.device
    splitting = Splitting({"": Layout.split(1, {0: [_AXIS]})}, mesh, device, splits=True)
    wholes = [nn.Parameter(torch.zeros(4 * world.size, device=device)) for _ in range(_SMALL)]
    parts = [splitting.part("", whole, whole) for whole in wholes]
    plain = [nn.Parameter(local_part(part).detach().clone()) for part in parts]
    parts_s, plain_s = (slowest_s(_training(parameters), device) for parameters in (parts, plain))
    return max(0.0, parts_s - plain_s) / _SMALL


def _training(parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    note_trained(parameters)
    optimizer = AdamW(parameters, 1e-3)
    gradients = [torch.ones_like(local_part(parameter)) for parameter in parameters]

    def step() -> None:
        torch.autograd.backward([local_part(parameter) for parameter in parameters], gradients)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _around_s(world: World, speeds: DeviceSpeeds) -> float:
    """Return the seconds of a forward and a backward beside operators, by those of one small layer."""
    given = torch.ones(4, 4, device=world.device)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        total: Tensor = model(batch).sum()
        return total

    with parallelize(nn.Linear(4, 4, bias=False), loss_fn, given, "single", batch="global") as parallel:

        def steps() -> None:
            for _ in range(_STEPS):
                parallel(given).backward()

        took_s = slowest_s(steps, world.device) / _STEPS
        assert parallel.plan is not None
        hardware = Hardware("", "", speeds.flops, speeds.memory_bandwidth, speeds.launch_s, (), at_once=speeds.at_once)
        return max(0.0, took_s - Prices(parallel.plan, hardware).computing_s)


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
        return ProductLoad(matrix, fitting, slowest_s(lambda: work.pieces(lambda: None), device))

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
