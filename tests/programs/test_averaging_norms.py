"""Batch norms whose running statistics are means over all batches (momentum=None)."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(1), batch[1])


def averaged(dtype):
    """How far losses, gradients and buffers are from plain PyTorch's, in steps between which the momentum changes."""
    torch.set_num_threads(1)
    sw.init()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Unflatten(1, (3, 2, 1)), nn.BatchNorm2d(3, momentum=None)
    ).to(dtype)
    plain = copy.deepcopy(model)
    batches = [(torch.randn(10, 4, dtype=dtype) + n, torch.randint(6, (10,))) for n in range(5)]
    parallel = sw.parallelize(model, loss_fn, batches[0], "data", batch="global")
    apart = []
    for number, batch in enumerate(batches):
        if number == 3:
            model[1].momentum = plain[1].momentum = 0.25
            model[3].reset_running_stats(), plain[3].reset_running_stats()
        found = []
        for step, each in ((parallel, model), (lambda b: loss_fn(plain, b), plain)):
            each.zero_grad()
            loss = step(batch)
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in each.parameters()), *each.buffers()])
        apart.append(
            max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in zip(*found, strict=True))
        )
    with torch.no_grad():
        model.eval(), plain.eval()
        apart.append(float((parallel(batches[0]) - loss_fn(plain, batches[0])).abs()))
    return max(apart), model[1].num_batches_tracked.item(), model[3].num_batches_tracked.item()


@pytest.mark.parametrize(
    ("ranks", "dtype"), [pytest.param(1, torch.float32, marks=pytest.mark.slow), (2, torch.float64)]
)
def test_running_statistics_are_means_over_all_batches(ranks, dtype):
    for apart, *batches in run_ranks(ranks, averaged, dtype):
        assert apart < (1e-10 if dtype == torch.float64 else 1e-4)
        assert batches == [5, 2]
