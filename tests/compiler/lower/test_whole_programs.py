"""Whole programs on simulated ranks: loss, gradients, outputs and buffers of any plan are those of one device."""

import itertools
from functools import cache

import pytest
import torch

from models import NETWORKS
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from whole import plan_of, run, same

pytestmark = [pytest.mark.networks, pytest.mark.usefixtures("float64")]

MESHES = [Mesh.of(d=2), Mesh.of(d=3), Mesh.of(d=4), Mesh.of(a=2, b=3), Mesh.of(d=8)]


def network(name, rows):
    make, loss_fn, batch = NETWORKS[name]
    torch.manual_seed(0)
    return make(), loss_fn, batch(rows)


@cache
def captured(name, rows):
    """A network with its batch and graph, which all plans of it share."""
    model, loss_fn, batch = network(name, rows)
    return captured_step(model, loss_fn, batch, {}), model, batch


@cache
def on_one_device(name, rows):
    graph, model, batch = captured(name, rows)
    return run(make_plan(graph, PlanRequest(Mesh(()), "single")), model, batch, seed=5)


# Eight simulated ranks of a split network take seconds.
PLANS = [
    pytest.param(name, search, mesh, marks=pytest.mark.slow if long else (), id=f"{name}-{search}-{mesh}")
    for name, search, mesh in itertools.product(NETWORKS, ["data", "propagation", "exact"], MESHES)
    for long in [mesh.size == 8 and search != "data" and name != "perceptron"]
]


@pytest.mark.parametrize(("name", "search", "mesh"), PLANS)
def test_any_plan_gives_what_one_device_gives(name, search, mesh):
    graph, model, batch = captured(name, 24)
    options = {} if search == "data" else {"search": search}
    plan = make_plan(graph, PlanRequest(mesh, "data" if search == "data" else "auto", **options))
    assert not plan.graph.unlisted
    same(run(plan, model, batch, seed=5), on_one_device(name, 24))


@pytest.mark.parametrize("rows", [13, 5])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_a_batch_that_does_not_divide_is_exact(name, rows):
    graph, model, batch = captured(name, rows)
    plan = make_plan(graph, PlanRequest(Mesh.of(d=8), "data"))
    same(run(plan, model, batch, seed=5), on_one_device(name, rows))


@pytest.mark.parametrize("name", list(NETWORKS))
def test_one_device_without_dropout_is_plain_pytorch(name):
    model, loss_fn, batch = network(name, 6)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    ours = run(plan_of(model, loss_fn, batch, Mesh(()), "single"), model, batch)
    result = loss_fn(model, batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    expected = {"loss": loss.detach()}
    expected |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    expected |= {f"buffer {n}": b for n, b in model.named_buffers()}
    same({name: tensor for name, tensor in ours.items() if not name.startswith("aux")}, expected, 1e-12)


class Pieces(torch.nn.Module):
    """Operators that return lists, one of them a list of one."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 12)

    def forward(self, x):
        [whole] = self.layer(x).split(12, -1)
        a, b, c = whole.chunk(3, -1)
        return a * b + c


def test_lists_of_results_are_unpacked():
    torch.manual_seed(0)
    model, batch = Pieces(), (torch.randn(8, 6),)

    def loss_fn(m, b):
        return m(b[0]).square().mean()

    reference = run(plan_of(model, loss_fn, batch, Mesh(()), "single"), model, batch)
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=4), "auto", search="propagation")
    same(run(plan, model, batch), reference)


@torch.library.custom_op("shardwright_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * 2)


def test_an_operator_of_somebody_elses_runs_whole():
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(6, 12), (torch.randn(8, 6),)

    def loss_fn(m, b):
        return doubled(m(b[0])).square().mean()

    reference = run(plan_of(model, loss_fn, batch, Mesh(()), "single"), model, batch)
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=4), "auto", search="propagation")
    assert [node.op for node in plan.graph.unlisted] == ["shardwright_tests.doubled.default"]
    same(run(plan, model, batch), reference)
    loss_fn(model, batch).backward()
    torch.testing.assert_close(reference["gradient of weight"], model.weight.grad)
