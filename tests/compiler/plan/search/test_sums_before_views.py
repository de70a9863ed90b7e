"""Gradients of casts and views of parameters are priced where plans sum them: before these, as all readers agree."""

import contextlib
import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from rows import brief
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.plan import plan_of
from shardwright.compiler.plan.pricing.cost import Bytes, PerDirection, Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import Choice
from shardwright.compiler.plan.search.exact import Table, minimise
from shardwright.compiler.plan.search.problem import CostCache, Problem
from shardwright.compiler.plan.searches import SEARCHES
from shardwright.compiler.plan.spaces import space_of
from shardwright.errors import PlanError
from whole import true_cost

HARDWARE = replace(shipped("h100"), ranks_per_host=2)
SECONDS = Seconds(HARDWARE)
EXPERTS = 8


class Mixture(nn.Module):
    """Experts that read a view of their parameter."""

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.up = nn.Parameter(torch.empty(EXPERTS, width, width))
        self.down = nn.Parameter(torch.empty(EXPERTS, width // 2, width))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        experts, order = chosen.reshape(-1).sort()
        ends = torch.histc(experts.float(), EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        gate, factor = F.grouped_mm(x[order // 2], self.up.mT, offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * factor, self.down, offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return x + out[order.argsort()].view(len(x), 2, -1).sum(1)


class Viewed(nn.Module):
    """Reads a parameter by a view of it, and has a linear layer."""

    def __init__(self, width, read):
        super().__init__()
        self.layer, self.read = nn.Linear(width, width), read
        self.of = nn.Parameter(torch.empty(width, width // 8, 8))
        self.row = nn.Parameter(torch.empty(1, width))

    def forward(self, x):
        return self.read(self, self.layer(x), self.of.reshape(len(self.of), -1))


READ = {
    "once": lambda model, x, view: (x @ view).sin(),
    "by two": lambda model, x, view: (x @ view).sin() + x.cos() @ view,
    "by three": lambda model, x, view: (x @ view).sin() @ view + x.cos() @ view,
    "twice viewed": lambda model, x, view: (x @ view.transpose(0, 1)).sin(),
    "cast": lambda model, x, view: (x.double() @ view.double()).sin(),
    "beside the parameter": lambda model, x, view: (x @ view).sin() + x @ model.layer.weight.transpose(0, 1),
    "expanded": lambda model, x, view: (x * model.row.expand(*x.shape)).sin() @ view,
}


@functools.cache
def captured(kind, width, rows, autocast):
    with torch.device("meta"):
        model = Mixture(width) if kind == "mixture" else Viewed(width, READ[kind])

        def loss(model, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return model(x).square().sum()

        return captured_step(model, loss, torch.zeros(rows, width), {})


def plans(space, draw, count):
    """Some plans that can be run, of random decisions."""
    request, found = PlanRequest(space.mesh, hardware=HARDWARE), []
    for _ in range(100 * count):
        strategies, leaves = (
            {name: draw.choice(of) for name, of in kind.items()} for kind in (space.strategies, space.leaves)
        )
        with contextlib.suppress(PlanError):  # no collectives lead from one layout to another
            plan = plan_of(space, request, Choice(strategies, leaves))
            assert plan.transfers
            if all(strategy in space.strategies[name] for name, strategy in plan.strategies.items()):
                found.append(plan)
        if len(found) == count:
            break
    return found


def least_of_tables(problem, plan):
    """The least that the tables of a problem add up to under the decisions of a plan."""
    chosen = [(v, problem.space.strategies[n].index(plan.strategies[n])) for n, v in problem.node_variables.items()]
    chosen += [(v, problem.space.leaves[n].index(plan.leaves[n])) for n, v in problem.leaf_variables.items()]
    fixed = [Table((v,), np.where(np.arange(problem.domains[v]) == at, 0.0, math.inf)) for v, at in chosen]
    return minimise(problem.domains, [*problem.tables, *fixed], math.inf)[0]


weights = st.sampled_from([0.0, 0.3, 1.0])
objectives = st.just(Bytes()) | st.just(SECONDS) | st.builds(PerDirection, weights, weights).map(SECONDS.hiding)


@pytest.mark.parametrize("examples", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["mixture", *brief(READ, "once", "by two", "twice viewed", "cast", "beside the parameter")]
)
def test_tables_are_never_above_what_a_plan_costs(kind, examples):
    """Where one operator alone reads each view, they are equal to it."""

    @settings(max_examples=examples)
    @given(
        st.sampled_from([64, 1024]),
        st.sampled_from([256, 4096]),
        st.booleans(),
        objectives,
        st.randoms(use_true_random=False),
    )
    def hold(width, rows, autocast, objective, draw):
        capture = captured(kind, width, rows, autocast)
        graph, mesh = RuledGraph.of(capture), Mesh.of(a=2, b=2)
        space = space_of(graph, mesh, PlanRequest(mesh, hardware=HARDWARE), SEARCHES["exact"])
        problem = Problem(space, CostCache(graph, objective, mesh), {node.name for node in capture.nodes})
        for plan in plans(space, draw, 2 * examples):
            cost = true_cost(plan, objective)
            assert least_of_tables(problem, plan) <= cost * (1 + 1e-9)
            if kind not in ("by two", "by three"):
                assert least_of_tables(problem, plan) == pytest.approx(cost)

    hold()
