"""The plans that people know by name: what they are, that they run as one device, and that none beats the search."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from decoder import Decoder, batch_of, loss_fn
from models import SmallResNet
from rows import slow
from shardwright.compiler.capture.ir import Value
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.baselines import BASELINES, fully_sharded, tensor_parallel
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.spaces import in_parts
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.compiler.report.plans.comparison import comparison, with_known_plans
from whole import plain, run, same

# Nothing is hidden of communication: then the seconds of a step are the sum that a search minimises.
H100 = replace(read_hardware("h100"), hides_gradients=0.0)
MESH = Mesh.of(dp=2, tp=2)


def perceptron():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()


def distance(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


MODELS = {
    "perceptron": (perceptron, distance, lambda: (torch.randn(8, 8).double(), torch.randn(8, 8).double())),
    "decoder": (lambda: Decoder().double(), loss_fn, lambda: batch_of(8, 8)),
    "resnet": (
        lambda: SmallResNet().double(),
        classes,
        lambda: (torch.randn(8, 3, 8, 8).double(), torch.randint(12, (8,))),
    ),
}


def graph_and_request(model, loss, batch, mesh=MESH):
    return RuledGraph.of(captured_step(model, loss, batch, {})), PlanRequest(mesh, "auto", "exact", "split", H100)


@pytest.mark.parametrize("name", ["perceptron", *slow("decoder", "resnet")])
def test_each_runs_as_one_device_and_none_beats_the_search(name):
    torch.manual_seed(0)
    make, loss, batch_maker = MODELS[name]
    model, batch = make(), batch_maker()
    expected = plain(model, loss, batch)
    graph, request = graph_and_request(model, loss, batch)
    plans = with_known_plans(make_plan(graph.capture, request), request)
    assert list(plans) == ["this plan", *BASELINES]
    seconds = {which: Prices(plan, H100).step_s for which, plan in plans.items()}
    assert plans["this plan"].bound <= min(seconds.values()) * (1 + 1e-9)
    assert seconds["this plan"] <= min(seconds.values()) * (1 + 1e-9)
    for plan in plans.values():
        found = run(plan, model, batch)
        same(found, {tensor: value for tensor, value in expected.items() if tensor in found})


@pytest.mark.parametrize(("shape", "dim"), [((8, 14336, 4096), 1), ((12, 14336), 0), ((7, 5), 0), ((5, 5), None)])
def test_parameters_are_cut_so_that_the_fullest_device_has_least(shape, dim):
    """Of 8 experts some of 6 devices would have two, a quarter of all, and others none."""
    value = Value("w", "parameter", "w", shape, torch.float32, True)
    cut = {} if dim is None else {dim: ["a", "b"]}
    assert in_parts(value, Mesh.of(a=2, b=3)) == Layout.split(len(shape), cut)


def test_tensor_parallel_is_what_megatron_does():
    """Columns, then rows, of each pair of matrices: a sum for each pair forward, and one backward."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
        batch = torch.randn(64, 512), torch.randn(64, 512)
    plan = tensor_parallel(*graph_and_request(model, distance, batch, Mesh.of(dp=2, tp=4)))
    stored = {value.label: plan.leaves[value.name] for value in plan.capture.of_kind("parameter")}
    assert stored["0.weight"] == Layout.split(2, {0: ["tp"]})
    assert stored["2.weight"] == Layout.split(2, {1: ["tp"]})
    of_values = [p for p in plan.collectives() if p.collective.axes == ("tp",) and p.cause not in stored]
    assert sum(p.bytes for p in of_values if p.cause.startswith("linear")) <= 2 * 32 * 512 * 4 * 3 / 4


def test_fully_sharded_holds_a_part_of_each_parameter():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 3))
        batch = torch.randn(64, 64), torch.randn(64, 3)
    graph, request = graph_and_request(model, distance, batch)
    plan = fully_sharded(graph, request)
    whole = sum(value.bytes for value in plan.capture.of_kind("parameter"))
    assert plan.held_bytes() == (whole - 3 * 4) / 4 + 3 * 4  # the last bias has fewer rows than there are devices
    gathered = [p for p in plan.collectives() if p.direction == "forward" and p.collective.kind == "all_gather"]
    assert [p.cause for p in gathered] == ["0.weight", "0.bias", "1.weight"]


def test_the_table_has_a_row_for_each_plan():
    with torch.device("meta"):
        model, batch = nn.Linear(64, 64), (torch.randn(64, 64), torch.randn(64, 64))
    graph, request = graph_and_request(model, distance, batch)
    found = make_plan(graph.capture, request)
    lines = comparison(with_known_plans(found, request), H100).splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["this plan", *BASELINES]
    assert "a step takes" in lines[0]
    missing = comparison({"this plan": found, "other": "no plan was found"}, H100).splitlines()
    assert missing[-1] == "other: no plan was found"
