"""Blocks whose inside the backward computes again: the same gradients to the last bit, and less that is kept."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from models import NETWORKS, Transformer, next_token
from ranks import run_ranks
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.recomputed import recomputed
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.device_memory import device_memory_of
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.memory import ADAMW
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import LoweringError, PlanError, UsageError
from whole import communicated, losses_of, measuring, plan_of, planned, run, same

BATCH = NETWORKS["transformer"][2]


def again(plan, *names):
    return replace(plan, recomputed=frozenset(names))


def check(plan, kept, model, batch, monkeypatch):
    """The numbers of the plan that keeps everything; what is held and communicated is what the plan says."""
    same(run(plan, model, batch, seed=3), run(kept, model, batch, seed=3), 0.0)
    with measuring(monkeypatch) as found:
        run(plan, model, batch, seed=3)
    for rank, measured in found.items():
        assert device_memory_of(plan, ADAMW, rank).activations == pytest.approx(measured.saved, rel=0.1)
    assert communicated(plan, model, batch, monkeypatch) == planned(plan)


def test_layers_are_computed_again_with_the_same_random_numbers(monkeypatch):
    torch.manual_seed(0)
    model, batch = Transformer(), BATCH(8)
    captured = captured_step(model, next_token, batch, {})
    kept = make_plan(captured, PlanRequest(Mesh.of(d=2), "data"))
    plan = make_plan(captured, PlanRequest(Mesh.of(d=2), "data", recompute=("layers.*",)))
    assert plan.recomputed == {"layers.0", "layers.1"}
    assert plan.held.activations < 0.2 * kept.held.activations
    check(plan, kept, model, batch, monkeypatch)
    assert "activation checkpointing, recomputed in the backward: layers.0-1" in str(plan)
    assert type(plan).from_json(plan.to_json(), plan.graph) == plan
    assert "activation checkpointing" in plan.diff(kept)


class Twice(nn.Module):
    """A layer whose weight is read outside of it, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x).float() + (x[:, :, None] * self.layer.weight[None]).sum(1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sharded_weight_that_is_read_inside_of_a_block_and_outside(ranks):
    """It is gathered before the block begins, the bias inside of it."""
    torch.manual_seed(0)
    model, batch = Twice(), torch.randn(6, 16)

    def of(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).square().mean()

    kept = plan_of(model, of, batch, Mesh.of(d=ranks), "data")
    split = {
        v.name: type(kept.leaves[v.name]).split(len(v.shape), {0: kept.mesh.names})
        for v in kept.capture.of_kind("parameter")
    }
    stored = replace(kept, leaves={**kept.leaves, **split})
    for regathered in (frozenset(), frozenset(split)):
        found = run(replace(again(stored, "layer"), again=regathered), model, batch)
        same(found, run(stored, model, batch), 0.0)


@pytest.mark.slow
@pytest.mark.networks
@pytest.mark.parametrize(
    ("search", "names"), [("exact", ("layers.0.attention", "layers.1")), ("propagation", ("layers",))], ids=str
)
def test_any_module_under_any_plan(search, names, monkeypatch):
    """Also where parameters are gathered inside, and values are moved between ranks there."""
    torch.manual_seed(0)
    model, batch = Transformer(layers=3), BATCH(12)
    kept = plan_of(model, next_token, batch, Mesh.of(a=2, b=2), "auto", search=search)
    check(again(kept, *names), kept, model, batch, monkeypatch)
    split = {v.name: type(kept.leaves[v.name]).split(2, {0: ("a", "b")})
             for v in kept.capture.of_kind("parameter") if len(v.shape) == 2}  # fmt: skip
    stored = replace(kept, leaves={**kept.leaves, **split})
    check(again(stored, *names), stored, model, batch, monkeypatch)
    gathered = replace(again(stored, *names), again=frozenset(split))
    same(run(gathered, model, batch, seed=3), run(stored, model, batch, seed=3), 0.0)
    assert communicated(gathered, model, batch, monkeypatch) == planned(gathered)


class Counting(nn.Module):
    """What it gives depends on a buffer that it changes, which has another value when the backward comes."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 6)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        return x + self.down(torch.tanh(self.norm(self.up(x)) * self.steps))


def counting():
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(8, 6)
    return nn.Sequential(Counting(), Counting()), lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]), batch


def train(recompute):
    model, loss_fn, batch = counting()
    parallel = sw.parallelize(model, loss_fn, batch, batch="global", recompute=recompute)
    losses = losses_of(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), batch)
    return losses, sorted(parallel.plan.recomputed)


def on_ranks(patterns):
    sw.init()
    return [train(pattern) for pattern in patterns]


@pytest.mark.slow
def test_buffers_that_a_block_changes_are_read_as_they_were():
    for kept, made_again in run_ranks(2, on_ranks, [(), "*"]):
        assert made_again[1] == ["0", "1"]
        assert made_again[0] == kept[0]


def test_patterns_that_match_nothing_and_plans_that_were_edited_are_refused():
    model, batch = Transformer(), BATCH(8)
    with pytest.raises(UsageError, match=r"recompute names 'blocks.\*', which no module matches that is run at once; "):
        plan_of(model, next_token, batch, Mesh.of(d=2), "data", recompute=("blocks.*",))
    plan = plan_of(model, next_token, batch, Mesh.of(d=2), "data")
    with pytest.raises(PlanError, match="computes heads again, of which nothing is kept; plan again"):
        type(plan).from_json(again(plan, "heads").to_json(), plan.graph)
    with pytest.raises(PlanError, match="modules again that lie in one another"):
        type(plan).from_json(again(plan, "layers", "layers.0").to_json(), plan.graph)


def test_a_block_that_does_not_do_the_same_twice_is_refused():
    x = torch.ones(3, requires_grad=True)
    widths = iter([2, 3])

    def block(comm, key, device, enough, x):
        (x.expand(next(widths), 3) * 2).exp()

    cpu = torch.device("cpu")
    with recomputed(block, None, None, cpu, [x]):
        y = (x.expand(next(widths), 3) * 2).exp()
    with pytest.raises(LoweringError, match="one of its operators does not do the same twice"):
        y.sum().backward()
