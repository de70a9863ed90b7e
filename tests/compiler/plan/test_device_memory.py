"""The bytes that a plan says each device holds are those that simulated ranks do hold."""

import pytest
import torch

import whole
from models import NETWORKS, Transformer, next_token
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.device_memory import device_memory_of
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.memory import ADAMW, states_of
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import UsageError
from whole import measuring, plan_of


def states_bytes(parameters, make):
    """What an optimizer keeps after a step."""
    optimizer = make(parameters)
    optimizer.step()
    return sum(t.nbytes for kept in optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor))


CASES = [
    pytest.param("perceptron", 64, "data", Mesh.of(d=1), marks=pytest.mark.slow),
    pytest.param("perceptron", 61, "data", Mesh.of(d=2), marks=pytest.mark.slow),
    ("perceptron", 64, "exact", Mesh.of(d=5)),
    pytest.param("resnet", 32, "data", Mesh.of(d=1), marks=pytest.mark.slow),
    pytest.param("resnet", 32, "propagation", Mesh.of(d=3), marks=pytest.mark.slow),
    pytest.param("transformer", 16, "data", Mesh.of(d=2), marks=pytest.mark.slow),
    ("transformer", 16, "propagation", Mesh.of(d=3)),
    pytest.param("transformer", 16, "propagation", Mesh.of(a=2, b=3), marks=pytest.mark.slow),
]


@pytest.mark.networks
@pytest.mark.parametrize(("name", "rows", "search", "mesh"), CASES, ids=str)
def test_what_ranks_hold_is_what_the_plan_says(name, rows, search, mesh, monkeypatch):
    make, loss_fn, batch_of = NETWORKS[name]
    model, batch = make(), batch_of(rows)
    how = {"mode": "data"} if search == "data" else {"mode": "auto", "search": search}
    plan = make_plan(captured_step(model, loss_fn, batch, {}), PlanRequest(mesh, **how))
    with measuring(monkeypatch) as found:
        whole.run(plan, model, batch)
    for rank, measured in found.items():
        said = device_memory_of(plan, ADAMW, rank)
        assert said.parameters == measured.parameter_bytes
        assert said.gradients == sum(p.grad.nbytes for p in measured.parameters)
        assert said.optimizer == states_bytes(measured.parameters, torch.optim.AdamW)
        assert said.activations == pytest.approx(measured.saved, rel=0.1)
    assert plan.held.total == max(device_memory_of(plan, ADAMW, rank).total for rank in found)


def test_frozen_parameters_have_neither_gradients_nor_states_nor_inputs_kept_for_them(monkeypatch):
    model = Transformer(dropout=0.0)
    for layer in model.layers:
        layer.requires_grad_(False)
    batch = NETWORKS["transformer"][2](16)
    plan = plan_of(model, next_token, batch, Mesh.of(d=2), "data")
    with measuring(monkeypatch) as found:
        whole.run(plan, model, batch)
    assert plan.held.activations == pytest.approx(found[0].saved, rel=0.1)
    assert plan.held.gradients == sum(p.grad.nbytes for p in found[0].parameters) < plan.held.parameters / 2


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "centred": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "asgd": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_optimizers_keep_is_counted_exactly(name):
    parameters = [torch.nn.Parameter(torch.ones(n, 3)) for n in (1, 5, 8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    states = states_of(OPTIMIZERS[name](parameters))
    assert sum(states.bytes_for(p.nbytes) for p in parameters) == states_bytes(parameters, OPTIMIZERS[name])
    assert states_of("AdamW") == states_of(torch.optim.AdamW) == ADAMW


def test_an_optimizer_that_cannot_be_counted_is_refused_by_name():
    with pytest.raises(UsageError, match=r"no optimizer 'adamww' in torch.optim; the names are adadelta, .*, sgd"):
        states_of("adamww")
    for name in ("Muon", "LBFGS", "Adafactor"):
        with pytest.raises(UsageError, match=rf"what {name} keeps for its parameters cannot be counted: "):
            states_of(name)
    with pytest.raises(UsageError, match="optimizer is 3; expected a name as 'adamw'"):
        states_of(3)
