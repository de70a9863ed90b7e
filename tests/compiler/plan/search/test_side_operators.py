"""Operators beside the rest: what every layer reads, such as a mask, widens no search and costs what is said."""

from dataclasses import replace

import pytest
import torch

from decoder import Decoder, batch_of, loss_fn
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search import search as searching
from whole import like_plain, run, same


@pytest.mark.parametrize(
    ("method", "mesh"),
    [
        ("exact", Mesh.of(dp=2, tp=2)),
        pytest.param("exact", Mesh.of(tp=3), marks=pytest.mark.slow),
        pytest.param("propagation", Mesh.of(dp=2, tp=2), marks=pytest.mark.slow),
        pytest.param("propagation", Mesh.of(tp=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_plan_with_side_operators_the_rest_gives_what_one_device_gives(mesh, method):
    torch.manual_seed(0)
    model, batch = Decoder().double(), batch_of(6, 8)
    captured = captured_step(model, loss_fn, batch, {})
    plan = make_plan(captured, PlanRequest(mesh, "auto", method))
    beside = searching.side_operators(
        searching.Space(plan.graph, plan.mesh, {}, {k: (v,) for k, v in plan.leaves.items()}, {})
    )
    names = {node.op.split(".")[1] for node in plan.capture.nodes if node.name in beside}
    assert names >= {"arange", "cos", "sin", "__and__"}
    assert plan.bound <= plan.cost
    assert f"(gap {(plan.cost - plan.bound) / plan.cost:.2%})" in str(plan)
    same(run(plan, model, batch), run(make_plan(captured, PlanRequest(Mesh(()), "single")), model, batch))


@pytest.mark.parametrize("hardware", ["cpu", pytest.param("h100", marks=pytest.mark.slow)])
def test_the_gap_is_true(monkeypatch, hardware):
    """The least cost over all choices together is between the bound and the cost; on one axis it can be searched."""
    captured = captured_step(Decoder(layers=1), loss_fn, batch_of(8, 16), {})
    nothing_hidden = replace(read_hardware(hardware), hides_gradients=0.0)
    request = PlanRequest(Mesh.of(d=2), "auto", "exact", "split", nothing_hidden)
    plan = make_plan(captured, request)
    monkeypatch.setattr(searching, "side_operators", lambda space: frozenset())
    together = make_plan(captured, request)
    assert together.bound == together.cost
    assert plan.bound <= together.cost * (1 + 1e-12)
    assert together.cost <= plan.cost * (1 + 1e-12)


@pytest.mark.slow
def test_layers_that_share_a_mask_are_planned_on_two_axes_and_alike():
    """One more layer costs what the one before it does: the search is not tied together by what all layers read."""
    with torch.device("meta"):
        costs = []
        for layers in (2, 3, 4):
            captured = captured_step(Decoder(layers, 256, 8, 4, 512, 1024), loss_fn, batch_of(64, 128, 1024), {})
            hardware = replace(read_hardware("h100"), hides_gradients=0.0)
            plan = make_plan(captured, PlanRequest(Mesh.of(dp=8, tp=8), "auto", "exact", "split", hardware))
            assert plan.cost - plan.bound < 0.05 * plan.cost
            costs.append(plan.bound)
    assert costs[2] - costs[1] == pytest.approx(costs[1] - costs[0], rel=1e-6)


class Averaging(torch.nn.Module):
    """Keeps a running mean of what it computes: a buffer that stands beside the rest joins a sum over the batch."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))


def averaged_loss(model, batch):
    x = model.linear(batch)
    model.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return (x - model.mean).square().mean()


def test_what_stands_beside_the_rest_is_asked_for_no_partial_sums():
    torch.manual_seed(0)
    for plan in like_plain(Averaging().double(), averaged_loss, torch.randn(8, 6).double()):
        assert plan.cost is None or plan.bound <= plan.cost
