"""Operators that torch itself computes by others, and that have no rule, are in a graph as these others."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from whole import run, same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = weight_norm(nn.Conv1d(4, 6, 3))
        self.bilinear = nn.Bilinear(3, 2, 5)

    def forward(self, x):
        return self.layer(x)


def loss_fn(model, x):
    y = model(x)
    rows = torch.vstack([y, y.flip(0)])
    grid, _ = torch.meshgrid(y[:, 0, 0], y[0, :, 0], indexing="ij")
    spread = torch.tile(y, (2, 1, 1)).diff(dim=0)
    order = y.argsort(1)
    waves = torch.fft.rfft(y).abs().square().mean() + torch.fft.ifft2(torch.fft.fft2(y)).imag.sum()
    distances = F.pairwise_distance(y[:, 0], y[:, 1]).mean() + F.triplet_margin_loss(y[:, 0], y[:, 1], y[:, 2])
    return (
        torch.multiply(rows, rows).sum()
        + grid.square().sum()
        + torch.moveaxis(spread, 0, 1).square().mean()
        + torch.take_along_dim(y, order, 1)[:, 0].sum()
        + waves
        + distances
        + torch.tensordot(y, y, dims=3)
        + model.bilinear(y[:, 0, :3], y[:, 1, :2]).square().mean()
        + F.margin_ranking_loss(y[:, 0], y[:, 1], torch.ones(len(y), 1), margin=0.5)
    )


def test_parts_have_rules_and_the_lines_of_their_operator():
    torch.manual_seed(0)
    model, batch = Net().double(), torch.randn(4, 4, 6, dtype=torch.float64)
    captured = captured_step(model, loss_fn, batch, {})
    one = make_plan(captured, PlanRequest(Mesh(()), "single"))
    wanted = run(one, model, batch)
    assert torch.allclose(wanted["loss"], loss_fn(model, batch), rtol=1e-12)
    assert {node.op for node in one.graph.unlisted} == set()
    (stacked,) = (node for node in one.capture.nodes if node.op == "aten.cat.default" and "vstack" in node.source)
    assert stacked.source.startswith("test_composites.py:")
    for mode in ("data", "auto"):
        plan = make_plan(captured, PlanRequest(Mesh.of(d=2), mode, search="propagation"))
        same(run(plan, model, batch), wanted)


def test_random_parts_are_drawn_by_position():
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 6).double(), torch.randn(4, 8, dtype=torch.float64)

    def noisy(model, x):
        return F.alpha_dropout(model(x), 0.3, training=True).square().sum()

    captured = captured_step(model, noisy, batch, {})
    wanted = run(make_plan(captured, PlanRequest(Mesh(()), "single")), model, batch)
    same(run(make_plan(captured, PlanRequest(Mesh.of(d=2), "data")), model, batch), wanted)
