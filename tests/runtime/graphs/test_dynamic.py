"""Batches whose shapes change: few captures, the numbers of plain PyTorch, and words about what the captures cost."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import UsageError
from shardwright.runtime.graphs import captures
from shardwright.runtime.graphs.captures import Captures, NewShape
from shardwright.runtime.graphs.dynamic import dynamic_problem

PLANS = {"data": {"mode": "data"}, "auto": {"mode": "auto"}, "propagation": {"mode": "auto", "search": "propagation"}}


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("positions", torch.randn(32, 8))
        self.tau = 1.0

    def forward(self, ids):
        length = ids.shape[1]
        x = self.tokens(ids) + self.positions[:length]
        scores = x @ x.transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -1e9)
        x = x + scores.softmax(-1) @ x
        if length > 12:
            x = x + x.mean(1, keepdim=True)
        return self.head(x + self.down(self.up(x).relu())) * self.tau


def reading(model, batch):
    ids, following = batch["ids"], batch["next"]
    out = model(ids)
    return F.cross_entropy(out.flatten(0, 1), following.flatten(), ignore_index=0) + out.square().mean()


def sentences(rows, length, seed=0, device=None):
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(0, 20, (2, rows, length), generator=generator)
    return {"ids": both[0].to(device), "next": both[1].to(device)}


class Counted:
    """How often a step was captured, and how often with open sizes."""

    def __init__(self, monkeypatch):
        self.captured = self.open = 0
        for name in ("captured_step", "OpenStep"):
            monkeypatch.setattr(captures, name, self.counting(getattr(captures, name), name))

    def counting(self, function, name):
        def call(*args, **kwargs):
            self.captured += name == "captured_step"
            self.open += name == "OpenStep"
            return function(*args, **kwargs)

        return call


@pytest.mark.filterwarnings("ignore:captured a batch of another shape")
def test_what_follows_is_compared_before_it_is_used(monkeypatch):
    counted = Counted(monkeypatch)

    def printed(model, batch):  # what stands beside the loss is no part of the graph, and must be the same, too
        return model(batch).mean(), {"kind": isinstance(batch.shape[1], int)}

    known = Captures(nn.Linear(4, 4), printed, {}, dynamic=True)
    for length in (4, 5, 6):
        assert known.of("training", torch.empty(2, length, 4, device="meta")).aux_spec.tree == {"kind": True}
    assert (counted.captured, counted.open) == (3, 2)


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ({"mask": 1}, "dynamic names 'mask', the batch has 'ids', 'next'"),
        ({"ids": 2}, "dynamic names dim 2 of 'ids', which has the shape [4, 8]"),
        ({"ids": "length"}, "as {'ids': 1, 'mask': (0, 1)}; got 'length' for 'ids'"),
        (1, "as {'ids': 1, 'mask': (0, 1)}; got 1"),
    ],
)
def test_dims_that_are_not_there(dynamic, said):
    assert str(dynamic_problem(dynamic, ["ids", "next"], ((4, 8), (4, 8)))).endswith(said)


def test_dims_that_are_there():
    for dynamic in (True, False, {"ids": 1, "next": (0, -1)}, {}):
        assert dynamic_problem(dynamic, ["ids", "next"], ((4, 8), (4, 8))) is None


LENGTHS = [5, 9, 7, 12, 3, 16]


def trained(ours, plan):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", NewShape)
    sw.init()
    sw.set_seed(3)
    model, parallel = Reader(), None
    if ours:
        with pytest.raises(UsageError, match="dynamic names 'mask'"):
            sw.parallelize(model, reading, sentences(6, 8), dynamic={"mask": 1})
        parallel = sw.parallelize(model, reading, sentences(6, 8), batch="global", dynamic=True, **PLANS[plan])
    optimizer = torch.optim.SGD((parallel or model).parameters(), lr=0.1)
    losses = []
    for number, length in enumerate(LENGTHS):
        batch = sentences(6 - number % 2, length, seed=number)
        optimizer.zero_grad()
        loss = parallel(batch) if parallel else reading(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def both(plan):
    return trained(True, plan), trained(False, plan)


@pytest.mark.slow
def test_training_over_lengths_equals_plain_training():
    for losses, expected in run_ranks(2, both, "auto", timeout=300):
        assert losses == pytest.approx(expected, rel=1e-10)
