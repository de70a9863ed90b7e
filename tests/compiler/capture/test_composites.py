"""Operators that torch itself computes by others, and that have no rule, are in a graph as these others."""

import pytest
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


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.cell, self.gated = nn.LSTMCell(4, 4), nn.GRUCell(4, 4)

    def forward(self, x):
        return self.a(x), self.b(x)


# Torch decomposes each by what it is called with.
OPERATORS = {
    "tensordot": lambda m, u, v: torch.tensordot(u, v, ([1], [1])),
    "inner": lambda m, u, v: torch.inner(u, v),
    "kron": lambda m, u, v: torch.kron(u, v),
    "chain_matmul": lambda m, u, v: torch.linalg.multi_dot([u, v.T, u]),
    "vstack": lambda m, u, v: torch.vstack([u, v]) * torch.arange(8.0).unsqueeze(1),
    "dstack": lambda m, u, v: torch.dstack([u, v]).cumsum(-1),
    "meshgrid": lambda m, u, v: torch.stack(torch.meshgrid(u[:, 0], v[:, 1], indexing="ij")),
    "cartesian_prod": lambda m, u, v: torch.cartesian_prod(u[:, 0], v[:, 1]) * torch.tensor([1.0, 2.0]),
    "cdist": lambda m, u, v: torch.cdist(u, v + 1, p=1.0),
    "pairwise_distance": lambda m, u, v: nn.functional.pairwise_distance(u, v),
    "LSTMCell": lambda m, u, v: m.cell(u, (u, v))[0],
    "GRUCell": lambda m, u, v: m.gated(u, v),
    "a cell on its own state": lambda m, u, v: m.cell(v, m.cell(u))[1],
}


def of_pairs(model, x):
    u, v = model(x)
    made = {
        name: sum(operator(model, *pair).sin().sum() for pair in ((u, u), (u, v), (v, u), (v, v)))
        for name, operator in OPERATORS.items()
    }
    return sum(made.values()), made


@pytest.mark.usefixtures("float64")
def test_of_one_tensor_twice_and_then_of_two_each_computes_both():
    torch.manual_seed(0)
    model, x = Pairs(), torch.randn(4, 4)
    loss, made = of_pairs(model, x)
    loss.backward()
    captured = captured_step(model, of_pairs, x, {})
    found = run(make_plan(captured, PlanRequest(Mesh(()), "single")), model, x)
    for (name, expected), of_graph in zip(made.items(), (found[n] for n in found if n.startswith("aux")), strict=True):
        assert torch.allclose(of_graph, expected, rtol=1e-12), name
    assert torch.allclose(found["loss"], loss, rtol=1e-12)
    for label, parameter in model.named_parameters():
        gradient = found.get(f"gradient of {label}")
        assert (gradient is None) == (parameter.grad is None), label
        assert gradient is None or torch.allclose(gradient, parameter.grad, rtol=1e-12), label
