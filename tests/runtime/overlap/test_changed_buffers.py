"""What a step reads of buffers that it changes is what they were before."""

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks


class Changing(nn.Module):
    copies = False  # plain PyTorch refuses to change what a backward needs

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("before", torch.ones(8))
        for name in ("current", "previous", "variance", "latest", "last"):
            self.register_buffer(name, torch.ones(8))

    def forward(self, x):
        y = self.norm(self.linear(x)) * (self.scale.clone() if self.copies else self.scale)
        self.scale.mul_(1.5)
        before = self.before.clone()
        self.before.add_(1)
        # A copy may be the source itself; a compiler may keep a buffer for the backward, and compute on from it there.
        self.previous.copy_(self.current)
        y = y * self.previous.clone() / (self.variance + 1e-5).sqrt()
        self.previous.add_(1)
        self.current.mul_(1.5)
        self.variance.mul_(1.5)
        self.last.copy_(self.latest.type_as(x))
        self.latest.copy_(y.detach().mean(0))
        return y, before


def loss_fn(model, x):
    y, before = model(x)
    return y.square().mean(), before


def trained(compiled=False):
    """How far three steps are from plain PyTorch's."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(1)
    model, x = Changing(), torch.randn(10, 6)
    plain = copy.deepcopy(model)
    plain.copies = True
    parallel, apart = sw.parallelize(model, loss_fn, x, "data", batch="global", compile=compiled), 0.0
    for _ in range(3):
        pairs = []
        for step, each in ((parallel, model), (lambda x: loss_fn(plain, x), plain)):
            each.zero_grad()
            loss, before = step(x)
            loss.backward()
            pairs.append([loss, before, *(p.grad for p in each.parameters()), *each.buffers()])
        apart = max(apart, *(float((a - b).detach().abs().max()) for a, b in zip(*pairs, strict=True)))
    return apart


@pytest.mark.parametrize(("ranks", "compiled"), [(2, False), pytest.param(1, True, marks=pytest.mark.slow)])
def test_what_buffers_were_is_read_later(ranks, compiled):
    for apart in run_ranks(ranks, trained, compiled):
        assert apart < 1e-12
