"""The predicted peak of a step is near what simulated ranks measure."""

import pytest
import torch

from models import NETWORKS, Transformer
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.liveness import peak_of
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.baselines import fully_sharded
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
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
    peak = peak_of(plan, lower(plan, 0, overlap=True))
    assert peak.bytes - plan.held.optimizer == pytest.approx(measured_peak(plan, model, batch, monkeypatch), rel=0.15)
    assert peak.bytes >= plan.held.total - plan.held.gradients - plan.held.communication


def test_small_parameters_that_are_gathered_together_are_there_with_their_gradients_and_buffers(monkeypatch):
    """All from the first use on, and the gradients of all until the last of them has come."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    batch = torch.randn(4, 64), torch.randn(4, 64)
    captured = captured_step(model, lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1]), batch, {})
    plan = fully_sharded(RuledGraph.of(captured), PlanRequest(Mesh.of(d=2)))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    measured = measured_peak(plan, model, batch, monkeypatch) + plan.held.optimizer
    # What all have sent for the part of one, and the sum of that, lie elsewhere where ranks are simulated.
    assert measured <= peak_of(plan, lower(plan, 0, overlap=True)).bytes <= measured + 1.5 * whole
    assert plan.held.communication == 3 * whole
    assert measured <= plan.held.total
