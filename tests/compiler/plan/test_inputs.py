"""How batches come: each rank its rows, everything everywhere, or slices per dim by name of the input."""

import pytest
import torch

from models import NETWORKS
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import UsageError
from whole import run, same


@pytest.fixture(scope="module")
def network():
    """A model and its batch, the graph of their step, and what one device gives."""
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    torch.manual_seed(0)
    model, batch = make(), batch_of(24)
    captured = captured_step(model, loss_fn, batch, {})
    return model, batch, captured, run(make_plan(captured, PlanRequest(Mesh(()), "single")), model, batch)


@pytest.mark.parametrize(
    ("inputs", "slices"),
    [
        ("split", {"0": (4, 1, 1), "1": (4,)}),
        ("whole", {"0": (1, 1, 1), "1": (1,)}),
        ({"0": (2, 1, 2)}, {"0": (2, 1, 2), "1": (1,)}),
        ({"0": (1, 2, 1), "1": (4,)}, {"0": (1, 2, 1), "1": (4,)}),
    ],
)
@pytest.mark.parametrize("mode", [pytest.param("data", marks=pytest.mark.slow), "auto"])
def test_inputs_come_as_the_user_says(mode, inputs, slices, network):
    model, batch, captured, expected = network
    plan = make_plan(captured, PlanRequest(Mesh.of(d=4), mode, inputs=inputs))
    given = {value.label: plan.leaves[value.name].slices(plan.mesh) for value in plan.capture.of_kind("input")}
    assert given == slices
    same(run(plan, model, batch), expected, 1e-5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"image": (2,)}, r"inputs names \['image'\], the batch has \['0', '1'\]"),
        ({"1": (2, 2)}, r"inputs\['1'\] = \(2, 2\) needs one number per dim of \(24,\)"),
        ({"1": (3,)}, r"inputs\['1'\] = \(3,\) does not fit the mesh d.0=2 d.1=2"),
        ("rows", "inputs is 'split', 'whole' or a mapping"),
    ],
)
def test_inputs_that_cannot_be_are_refused(inputs, message, network):
    with pytest.raises(UsageError, match=message):
        make_plan(network[2], PlanRequest(Mesh.of(d=4), "auto", inputs=inputs))
