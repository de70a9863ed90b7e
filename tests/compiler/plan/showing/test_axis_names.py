"""The axes of a found mesh are named by what the plan does along them; those that a user named keep their names."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.axis_names import axis_roles
from shardwright.compiler.plan.baselines import data_parallel, fully_sharded, tensor_parallel
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.report.plans.summary import plan_summary
from whole import plain, run, same

H100 = read_hardware("h100")
EIGHT = Mesh.of(ranks=8)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


def distance(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Mlp().double()


def batch_of(*rows):
    return torch.randn(*rows, 16, dtype=torch.float64), torch.randn(*rows, 16, dtype=torch.float64)


def graph_of(model, batch, pins=None):
    return RuledGraph.of(captured_step(model, distance, batch, pins or {}))


@pytest.fixture(scope="module")
def graph(model):
    """That of a batch of 8 rows, without pins."""
    return graph_of(model, batch_of(8))


@pytest.mark.parametrize(
    ("make", "name"),
    [(data_parallel, "dp"), (fully_sharded, "fsdp"), (tensor_parallel, "tp")],
    ids=["dp", "fsdp", "tp"],
)
def test_the_plans_that_are_known_by_name_have_that_axis(model, graph, make, name):
    batch = batch_of(8)
    plan = make(graph, PlanRequest(EIGHT, hardware=H100))
    assert str(plan.mesh) == f"{name}=8"
    assert str(plan).splitlines()[0].endswith(f"mesh {name}=8, 8 devices")
    assert plan_summary(plan, H100).mesh == {name: 8}
    same(run(plan, model, batch), plain(model, distance, batch))


def pinned(model, batch, pins, **options):
    """The plan of a search in which every operator with parameters is pinned."""
    graph = graph_of(model, batch, pins)
    return make_plan(graph.capture, PlanRequest(EIGHT, "semi-auto", hardware=H100, **options))


MIXED = {"up": ((2, 1), (4, 1)), "down": ((2, 4), (1, 4))}


def test_a_mixed_plan_has_an_axis_of_each_kind(model):
    batch = batch_of(8)
    plan = pinned(model, batch, MIXED)
    assert {name.split(".")[0] for name in plan.mesh.names} == {"dp", "tp"}
    assert plan.mesh.extent(name for name in plan.mesh.names if name.startswith("tp")) == 4
    assert "ranks" not in str(plan).replace("ranks of rank 0", "")
    assert "ranks." not in lower(plan, 0).source
    same(run(plan, model, batch), plain(model, distance, batch))


def test_an_axis_that_splits_the_sequence_is_context_parallel(model):
    batch = batch_of(1, 8)
    plan = pinned(model, batch, {"up": ((1, 8, 1), (1, 1)), "down": ((1, 8, 1), (1, 1))})
    assert {name.split(".")[0] for name in plan.mesh.names} == {"cp"}
    same(run(plan, model, batch), plain(model, distance, batch))


def test_axes_of_one_role_are_numbered_and_none_is_lost(model):
    plan = pinned(model, batch_of(8), MIXED)
    assert len(set(plan.mesh.names)) == len(plan.mesh.axes)
    assert plan.mesh.size == 8
    again = [name for name in plan.mesh.names if name.startswith("tp")]
    assert again == (["tp"] if len(again) == 1 else [f"tp.{i}" for i in range(len(again))])


def test_axes_that_a_user_named_keep_their_names(graph):
    for mesh in (Mesh.of(rows=2, columns=4), Mesh.of(devices=8)):
        plan = make_plan(graph.capture, PlanRequest(mesh, hardware=H100))
        assert {name.split(".")[0] for name in plan.mesh.names} <= set(mesh.names)
        assert plan_summary(plan, H100).mesh == mesh.sizes


def test_a_plan_for_other_sizes_and_one_from_a_file_keep_the_names(model, graph):
    plan = make_plan(graph.capture, PlanRequest(EIGHT, hardware=H100))
    assert Plan.from_json(plan.to_json(), graph) == plan
    assert "ranks." not in json.dumps(json.loads(plan.to_json())["strategies"])
    smaller = graph_of(model, batch_of(4))
    storage = {value.name: plan.leaves[value.name] for value in graph.capture.of_kind("parameter")}
    later = make_plan(smaller.capture, PlanRequest(EIGHT, hardware=H100, storage=storage, axes=plan.mesh))
    assert later.mesh == plan.mesh


def test_an_axis_over_which_nothing_is_split_keeps_its_name(graph):
    plan = make_plan(graph.capture, PlanRequest(EIGHT, "single", hardware=H100))
    assert axis_roles(plan) == ("ranks",)
    assert str(plan.mesh) == "ranks=8"


def test_a_plan_for_an_earlier_ones_mesh_keeps_its_names_also_where_that_one_split_nothing(graph):
    request = PlanRequest(EIGHT, "data")
    assert make_plan(graph.capture, request).mesh.names == ("dp",)
    assert make_plan(graph.capture, replace(request, axes=EIGHT)).mesh.names == ("ranks",)
