"""What two plans do otherwise."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.baselines import data_parallel, fully_sharded, tensor_parallel
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import PlanError


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def graph(layers):
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(layers)))
        batch = torch.randn(16, 64), torch.randn(16, 64)
        return RuledGraph.of(captured_step(model, lambda m, b: F.mse_loss(m(b[0]), b[1]), batch, {}))


def cells(text, name):
    """The cells of a row of a table beside its first."""
    rows = ([cell.strip() for cell in line.split("  ") if cell] for line in text.splitlines())
    return next(row[1:] for row in rows if row[:1] == [name])


def test_plans_differ_in_rows_that_are_folded_over_equal_layers():
    model, request = graph(3), PlanRequest(Mesh.of(tp=4), hardware=read_hardware("h100"))
    tensor, sharded, data = (make(model, request) for make in (tensor_parallel, fully_sharded, data_parallel))
    text = tensor.diff(data)
    assert text.startswith("this plan: mode auto, search none, mesh tp=4, 4 devices\nthe other: mode data, ")
    assert cells(text, "0-2.up.weight") == ["parameter", "3", "(4,1)", "(1,1)"]
    assert "0.up" not in text
    stored = sharded.diff(data)
    assert "no operators differ" in stored
    assert f"{len(model.capture.of_kind('parameter'))} of {len(sharded.leaves)} leaves differ" in stored
    assert cells(stored, "0-2.down.weight") == ["parameter", "3", "(4,1)", "(1,1)"]
    assert "no leaves differ" in data.diff(data)

    with pytest.raises(PlanError, match=r"the plan was made for \d+ values, the model has \d+"):
        data.diff(data_parallel(graph(1), request))
