"""What a rank tells of its collectives: the operator that each is for, and how far in the step it is."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.common.pulse import PULSE_VARIABLE, PulseFile
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.simulate import SimulatedCommunicator
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from whole import run, same


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16, bias=False), nn.Linear(16, 8)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        rows = sw.shard(nn.functional.linear, ((2, 1), (1, 1)))(x, self.layers[0].weight).relu()
        columns = sw.shard(nn.functional.linear, ((1, 2), (1, 2)))(rows, self.layers[1].weight)
        return self.norm(columns + self.layers[1].bias)


def loss_fn(model, batch):
    return model(batch[0]).square().mean()


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model, batch = Net().double(), (torch.randn(8, 8, dtype=torch.float64),)
    plan = make_plan(captured_step(model, loss_fn, batch, {}), PlanRequest(Mesh.of(a=2, b=2), "semi-auto"))
    return plan, model, batch


@pytest.fixture
def seen(monkeypatch):
    """What rank 0's pulse says at each of its collectives."""
    file, found = PulseFile(), []
    monkeypatch.setenv(PULSE_VARIABLE, file.path)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        real = getattr(SimulatedCommunicator, name)

        def told(self, tensors, axes, real=real, name=name):
            if self.rank == 0 and self.mesh.extent(axes) > 1:
                reading = file.read()
                found.append((name, reading.site, reading.position))
            return real(self, tensors, axes)

        monkeypatch.setattr(SimulatedCommunicator, name, told)
    return found


def test_every_collective_names_its_operator_in_both_directions(case, seen, monkeypatch):
    plan, model, batch = case
    watched = run(plan, model, batch)
    collectives = lower(plan, 0).collectives()
    positions = [position for _, _, position in seen]
    assert positions == sorted(positions), "they grow in the course of the step"
    assert all(site for _, site, _ in seen)
    forward = [site for _, site, position in seen if position <= len(lower(plan, 0).instructions)]
    backward = [site for _, site, position in seen if position > len(lower(plan, 0).instructions)]
    assert len(forward) >= len([1 for _, direction, _ in collectives if direction == "forward"])
    assert {"linear of the loss function", "the buffer norm_running_mean"} <= set(forward)
    assert not [site for site in forward if "backward" in site or "gradient" in site]
    assert all("backward" in site or "gradient" in site for site in backward)
    assert any(site.startswith("the gradients of ") and "layers.0.weight" in site for site in backward)
    monkeypatch.delenv(PULSE_VARIABLE)
    same(run(plan, model, batch), watched, tolerance=0)
