"""The parameters that a step reads before all others: which they are, and that they count as exposed in a bound."""

import contextlib
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import plan_of
from shardwright.compiler.plan.pricing.cost import PerDirection, Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import Choice
from shardwright.compiler.plan.search.problem import CostCache, Problem
from shardwright.compiler.plan.searches import SEARCHES
from shardwright.compiler.plan.spaces import space_of
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.errors import PlanError
from whole import true_cost

WORDS, WIDTH = 65536, 512


class Language(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.table, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.layer(self.table(ids)))


def captured(model, batch, forward=lambda m, x: m(x).square().sum()):
    return captured_step(model, forward, batch, {})


def first(capture):
    return [value.label for value in capture.values.values() if value.read_first]


def test_what_is_read_first_and_by_none_else():
    with torch.device("meta"):
        ids = torch.zeros(8, 16, dtype=torch.long)
        assert first(captured(Language(), ids)) == ["table.weight"]
        assert first(captured(Language(tied=True), ids)) == ["table.weight"]  # for the embedding, which is the first
        rows = torch.ones(8, 4)
        linear = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        assert first(captured(linear, rows)) == ["0.weight", "0.bias"]
        assert first(captured(linear, rows, lambda m, x: m[0].weight.sum() + m(x).sum())) == ["0.weight"]
        half = captured(linear, rows, lambda m, x: torch.autocast("cpu", torch.bfloat16)(m)(x).sum())
    found = [value for value in half.values.values() if value.read_first]
    assert [value.label for value in found if value.kind == "parameter"] == ["0.weight", "0.bias"]
    assert {value.dtype for value in found if value.kind == "result"} == {torch.bfloat16}


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_that_is_read_first_counts_whole_in_the_bound(tied):
    """To gather it has nothing to hide behind: a bound that hid it would let it look cheap."""
    with torch.device("meta"):
        capture = captured(Language(tied), torch.zeros(64, 512, dtype=torch.long))
    hardware = replace(shipped("h100"), ranks_per_host=8)
    plan = make_plan(capture, PlanRequest(Mesh.of(d=16), hardware=hardware))
    assert plan.bound <= plan.cost == pytest.approx(Prices(plan, hardware).step_s)
    sums = Seconds(hardware).hiding(PerDirection(1.0, 1.0))
    table = next(value for value in capture.of_kind("parameter") if value.label == "table.weight")
    whole = Prices(make_plan(capture, PlanRequest(Mesh.of(d=16), "data", hardware=hardware)), hardware)
    moved = next(moved for moved in whole.moved if moved.cause == "table.weight" and moved.early_gradient_s)
    assert not moved.overlaps  # both read the whole table: what gathers it for the embedding is for the head, too
    assert sums.before_first(RuledGraph.of(capture)) < 1e-3
    assert table.read_first


def of_both(model, x):
    return model(x).square().sum() + model.head(model.table(x) * 2).sum()


@pytest.mark.parametrize("forward", [lambda model, x: model(x).square().sum(), of_both])  # two readers, and four
def test_a_tied_table_is_gathered_for_the_head_beside_computing(forward):
    """A search counts the way to the embedding whole, and that to the head as one that may go on beside computing."""
    with torch.device("meta"):
        capture = captured(Language(tied=True), torch.zeros(64, 512, dtype=torch.long), forward)
    hardware = replace(shipped("h100"), ranks_per_host=8)
    objective, mesh = Seconds(hardware).hiding(PerDirection(1.0, 1.0)), Mesh.of(d=16)
    graph = RuledGraph.of(capture)
    space = space_of(graph, mesh, PlanRequest(mesh, hardware=hardware), SEARCHES["exact"])
    problem, draw = Problem(space, CostCache(graph, objective, mesh), {n.name for n in capture.nodes}), random.Random(0)
    apart = 0
    for _ in range(200):
        picked = [draw.randrange(size) for size in problem.domains]
        cost, plan = problem.cost_of(picked), None
        for variable, _ in problem.hubs.values():
            each = [[*picked[:variable], value, *picked[variable + 1 :]] for value in range(problem.domains[variable])]
            picked = min(each, key=problem.cost_of)
            cost = problem.cost_of(picked)
        with contextlib.suppress(PlanError):
            made = plan_of(space, PlanRequest(mesh, hardware=hardware), Choice(*problem.decided(picked)))
            plan = made if made.transfers else None
        if plan is None:
            assert cost == math.inf
            continue
        # Of several targets that are shared one is paid for once.
        shared = [len(transfer.consumers) > 1 for transfer in plan.transfers if transfer.value == "table_weight"]
        assert cost >= true_cost(plan, objective) * (1 - 1e-9)
        assert sum(shared) > 1 or cost == pytest.approx(true_cost(plan, objective))
        of_table = [
            plan.brought(transfer).read_first for transfer in plan.transfers if transfer.value == "table_weight"
        ]
        apart += sorted(of_table) == [False, True]
    assert apart  # there are plans which gather it twice
