"""Parameters that are stored split are gathered by few collectives, and their gradients scattered by as few."""

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.baselines import fully_sharded
from shardwright.compiler.plan.pricing.cost import together_bytes
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.training.network.prediction import collectives_of
from whole import communicated, plain, planned, run, same


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_neighbours_that_the_backward_gathers_again_are_in_no_more_memory_than_the_largest_collective(monkeypatch):
    torch.manual_seed(0)
    layers = (layer for _ in range(5) for layer in (nn.Linear(97, 97, bias=False), nn.GELU()))
    model = nn.Sequential(*layers, nn.Linear(97, 640, bias=False)).double()
    batch = torch.randn(6, 97).double(), torch.randint(640, (6,))
    graph = RuledGraph.of(captured_step(model, loss_fn, batch, {}))
    plan = fully_sharded(graph, PlanRequest(Mesh.of(d=3)))
    program = lower(plan, 0)
    gathers = [i for i in program.instructions if "all_gather" in i.call.source]
    # The first layer takes what has no gradient, so that its weight is needed in the forward alone.
    assert [(i.kind, len(i.outputs), i.regathers) for i in gathers] == [
        ("redistribution", 1, 0), ("joined", 2, 1), ("joined", 2, 1), ("redistribution", 1, 1),
    ]  # fmt: skip
    assert all(together_bytes(i.moves, plan.mesh) <= plan.held.communication for i in gathers if i.kind == "joined")
    same(run(plan, model, batch), plain(model, loss_fn, batch), 1e-12)
    assert communicated(plan, model, batch, monkeypatch) == planned(plan)
    ran = collectives_of(program, {"reduced": 1})
    assert [sum(n for c, n in ran.items() if c.kind == kind) for kind in ("all_gather", "reduce_scatter")] == [7, 4]
    moved = {
        kind: sum(n * c.bytes for c, n in ran.items() if c.kind == kind) for kind in ("all_gather", "reduce_scatter")
    }
    assert moved["all_gather"] == planned(plan)["all_gather", plan.mesh.names]
    assert moved["reduce_scatter"] == planned(plan)["reduce_scatter", plan.mesh.names]
