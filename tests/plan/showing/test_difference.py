"""What two plans do otherwise."""

import pytest
import torch

from decoder import Decoder, batch_of, loss_fn
from shardwright.errors import PlanError
from shardwright.graph.step import captured_step
from shardwright.mesh.mesh import Mesh
from shardwright.plan.known_plans import data_parallel, fully_sharded, tensor_parallel
from shardwright.plan.pricing.hardware import read_hardware
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.plan.request import PlanRequest


def graph(layers):
    with torch.device("meta"):
        return RuledGraph.of(captured_step(Decoder(layers, 64, 8, 4, 128, 256), loss_fn, batch_of(16, 32, 256), {}))


def test_plans_differ_in_rows_that_are_folded_over_equal_layers():
    model, request = graph(2), PlanRequest(Mesh.of(tp=4), hardware=read_hardware("h100"))
    tensor, sharded, data = (make(model, request) for make in (tensor_parallel, fully_sharded, data_parallel))
    text = tensor.diff(data)
    assert text.startswith("this plan: mode auto, search none, mesh tp=4, 4 devices\nthe other: mode data, ")
    rows = {row[0]: row[1:] for row in ([c for c in line.split("  ") if c] for line in text.splitlines() if line)}
    assert [cell.strip() for cell in rows["layers.0-1.gate.weight"]] == ["parameter", "2", "(4,1)", "(1,1)"]
    assert "layers.0.gate" not in text
    stored = sharded.diff(data)
    assert "no operators differ" in stored
    assert f"{len(model.capture.of_kind('parameter'))} of {len(sharded.leaves)} leaves differ" in stored
    assert "[ranks, -]" in stored
    assert "no leaves differ" in data.diff(data)

    with pytest.raises(PlanError, match=r"the plan was made for \d+ values, the model has \d+"):
        data.diff(data_parallel(graph(1), request))
