"""Gradients that accumulate() keeps are no part of what optimizers and hooks are shown: they say so, or drop them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from models import Branching
from ranks import run_ranks
from shardwright.errors import UsageError


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def kept(captured):
    """What is said to an optimizer and to a hook, and the loss after a micro-batch was dropped."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(3)
    model = nn.Linear(24, 12) if captured else Branching()
    batches = [(torch.randn(6, 24), torch.randn(6, 12)) for _ in range(2)]
    parallel = sw.parallelize(model, loss_fn, batches[0], "data", batch="global")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    found = []

    def said(do):
        try:
            do()
        except UsageError as error:
            return str(error)
        return ""

    with parallel.accumulate():
        parallel(batches[0]).backward()
    found.append(said(optimizer.step))
    optimizer.zero_grad()
    parallel(batches[1]).backward()
    found.append(said(optimizer.step))
    loss = parallel(batches[1]).item()
    optimizer.zero_grad()
    handle = next(parallel.parameters()).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    with parallel.accumulate():
        found.append(said(lambda: parallel(batches[0]).backward()))
    handle.remove()
    return found, loss


def alone():
    torch.set_default_dtype(torch.float64)
    sw.set_seed(3)
    model = nn.Linear(24, 12)
    batches = [(torch.randn(6, 24), torch.randn(6, 12)) for _ in range(2)]
    loss_fn(model, batches[1]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss_fn(model, batches[1]).item()


@pytest.mark.parametrize("captured", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::shardwright.runtime.parallel.EagerFallback")
def test_what_is_kept_is_refused_to_optimizers_and_hooks_and_can_be_dropped(captured):
    [expected] = run_ranks(1, alone)
    for (early, late, hook), loss in run_ranks(2, kept, captured):
        assert "this SGD makes a step while accumulate() keeps gradients of " in early
        assert late == ""
        assert "weight has a hook on its gradient, which " in hook
        assert loss == pytest.approx(expected, rel=1e-12)
