"""The predicted peak of a step is near what simulated ranks measure."""

import pytest
import torch

from models import NETWORKS, Transformer
from shardwright.graph.step import captured_step
from shardwright.lower.liveness import peak_of
from shardwright.lower.lower import lower
from shardwright.mesh.mesh import Mesh
from shardwright.plan.make import make_plan
from shardwright.plan.request import PlanRequest
from whole import measured_peak

pytestmark = pytest.mark.networks


CASES = [
    ("perceptron", 256, {"mode": "data"}),
    pytest.param("resnet", 32, {"mode": "data"}, marks=pytest.mark.slow),
    ("transformer", 32, {"mode": "data"}),
    pytest.param("transformer", 32, {"mode": "auto", "search": "propagation"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "rows", "how"), CASES, ids=str)
def test_the_predicted_peak_is_near_the_measured_one(name, rows, how, monkeypatch):
    torch.manual_seed(0)
    make, loss_fn, batch_of = NETWORKS[name]
    model, batch = Transformer(dropout=0.0) if name == "transformer" else make(), batch_of(rows)
    plan = make_plan(captured_step(model, loss_fn, batch, {}), PlanRequest(Mesh.of(d=2), **how))
    peak = peak_of(plan, lower(plan, 0))
    assert peak.bytes - plan.held.optimizer == pytest.approx(measured_peak(plan, model, batch, monkeypatch), rel=0.15)
    assert peak.bytes >= plan.held.total - plan.held.gradients - plan.held.communication
