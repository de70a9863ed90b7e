"""What random programs have found, each as a program of a few lines that gives what plain PyTorch gives."""

import pytest
import torch
from torch import nn

from shardwright.graph.step import captured_step
from shardwright.mesh.mesh import Mesh
from shardwright.plan.make import make_plan
from shardwright.plan.request import PlanRequest
from whole import plain, run, same, splitting_hardware

pytestmark = pytest.mark.usefixtures("float64")
REQUESTS = {
    "single": PlanRequest(Mesh(()), "single"),
    "data": PlanRequest(Mesh.of(d=3), "data"),
    "split": PlanRequest(Mesh.of(d=2), "auto", hardware=splitting_hardware()),
}


class Net(nn.Module):
    """Some parameters, and a ``forward`` that a test writes down."""

    def __init__(self, step):
        super().__init__()
        self.w, self.e = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3, 4))
        self.cell, self.step = nn.RNNCell(4, 4), step

    def forward(self, x):
        return self.step(self, x)


def like_plain(step, rows=5):
    model, batch = Net(step), torch.randn(rows, 4)
    expected = plain(model, Net.__call__, batch)
    captured = captured_step(model, Net.__call__, batch, {})
    for request in REQUESTS.values():
        same(run(make_plan(captured, request), model, batch), expected)
    return captured


def test_a_result_that_nobody_reads_in_front_of_a_region_without_gradients():
    def step(self, x):
        h = x @ self.w
        torch.cdist(self.e, h)
        with torch.no_grad():
            goal = self.cell(h, h)
        return (h - goal).square().mean()

    assert "aten.cdist.default" not in [node.op for node in like_plain(step).nodes]
