"""Plans between two others: some layers are as in the one, the rest as in the other."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan import hidden
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.timing.prices import Prices

H100 = replace(shipped("h100"), ranks_per_host=8)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def captured(layers=12, width=1024, rows=5 << 16):
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(width) for _ in range(layers))).bfloat16()
        return captured_step(model, lambda m, x: m(x).square().sum(), torch.ones(rows, width).bfloat16(), {})


def planned(capture, monkeypatch=None, **options):
    if monkeypatch is not None:
        monkeypatch.setattr(hidden, "cheapest_between", lambda *given: None)
    mesh = Mesh.of(a=8, b=8)
    return make_plan(capture, PlanRequest(mesh, hardware=H100, axes=mesh, **options))


def stored_by_layers(plan):
    return [plan.leaves[value.name] for value in plan.capture.of_kind("parameter") if value.label.endswith("up.weight")]


def test_as_many_layers_are_sharded_as_computing_hides(monkeypatch):
    """All of them communicate for longer than they compute; none of them leave the links idle."""
    capture = captured()
    plan = planned(capture)
    assert len(set(stored_by_layers(plan))) == 2
    assert plan.cost == pytest.approx(Prices(plan, H100).step_s - H100.around_s)
    alike = planned(capture, monkeypatch)
    assert len(set(stored_by_layers(alike))) == 1
    assert plan.bound <= plan.cost < 0.99 * alike.cost
    assert plan.bound == pytest.approx(alike.bound)


@pytest.mark.slow
def test_what_lies_between_fits_the_budget():
    capture = captured()
    free = planned(capture)
    plan = planned(capture, memory=free.held.total - 1)
    assert plan.held.total < free.held.total
    assert free.cost <= plan.cost
