"""Batch norm over all ranks, in float32 with a mean that is large beside the deviation."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.compiler.lower.operators import batch_norm, kernels
from shardwright.compiler.mesh.collectives import Communicator
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import simulate

ROWS = {"even": (8, 8, 8), "uneven": (11, 11, 2), "empty": (12, 12, 0)}


def data(mean: float) -> torch.Tensor:
    return (torch.randn(24, 3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + mean).float()


def on_ranks(x: torch.Tensor, parts: tuple[int, ...], upstream: torch.Tensor) -> list[torch.Tensor]:
    """The result, the new statistics, and the gradients of x, weight and bias."""
    counts = [rows * x.shape[2] for rows in parts]
    starts = [sum(parts[:rank]) for rank in range(len(parts))]

    def run(comm: Communicator) -> list[torch.Tensor]:
        place = slice(starts[comm.rank], starts[comm.rank] + parts[comm.rank])
        local = x[place].clone().requires_grad_()
        weight, bias = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        old = torch.zeros(3), torch.ones(3)
        y, _, _, *new = kernels.batch_norm_running(local, weight, bias, *old, 0.1, 1e-5, comm, ("dp",), counts)
        gradients = torch.autograd.grad(y, [local, weight, bias], upstream[place])
        return [y.detach(), *new, *gradients]

    ranks = simulate(Mesh.of(dp=len(parts)), run)
    for rank in ranks[1:]:
        assert torch.equal(rank[1], ranks[0][1])
        assert torch.equal(rank[2], ranks[0][2])
    joined = [torch.cat([rank[i] for rank in ranks]) for i in (0, 3)]
    summed = [torch.stack([rank[i] for rank in ranks]).sum(0) for i in (4, 5)]
    return [joined[0], *ranks[0][1:3], joined[1], *summed]


def on_one(x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """The same by torch, in float64."""
    x = x.double().requires_grad_()
    weight, bias = torch.ones(3, requires_grad=True).double(), torch.zeros(3, requires_grad=True).double()
    running = torch.zeros(3).double(), torch.ones(3).double()
    y = functional.batch_norm(x, *running, weight, bias, training=True, momentum=0.1, eps=1e-5)
    gradients = torch.autograd.grad(y, [x, weight, bias], upstream.double())
    return [y.detach(), *running, *gradients]


@pytest.mark.parametrize("parts", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("mean", "tolerance"), [(0.0, 2e-6), (100.0, 2e-5), (1000.0, 2e-4)])
def test_merged_statistics_are_exact(parts, mean, tolerance):
    x = data(mean)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    for found, wanted in zip(on_ranks(x, parts, upstream), on_one(x, upstream), strict=True):
        assert (found - wanted).abs().max() <= tolerance * max(1, wanted.abs().max().item())


def test_sums_of_gradients_are_made_with_a_weight():
    """Torch's kernel for GPUs makes them like the weight, which it takes to be there."""
    noted = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            noted.extend([args[2]] if function is torch.ops.aten.native_batch_norm_backward.default else [])
            return function(*args, **(kwargs or {}))

    with Noted():
        batch_norm._gradient_sums(data(0.0), data(1.0), torch.zeros(3), torch.ones(3))
    assert [weight.shape for weight in noted] == [(3,)]
