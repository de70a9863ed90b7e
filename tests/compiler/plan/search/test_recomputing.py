"""Which blocks are computed again is decided with the strategies: against every plan, and by what is really held."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from models import NETWORKS, Transformer
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan import make, mesh_search, meshes
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.pricing.memory import ADAMW
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search import search
from shardwright.compiler.plan.search.choices import OverBudget
from shardwright.compiler.plan.search.exact import Table, cost_at
from shardwright.compiler.plan.search.weights import Weights
from shardwright.compiler.plan.timing.prices import repeated_costs
from shardwright.errors import PlanError
from whole import true_cost

# Nothing is hidden of communication: then the seconds of a step are the sum that a search minimises.
HARDWARE = replace(shipped("h100"), hides_gradients=0.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)).sin())


def chain():
    model = nn.Sequential(Block(), Block())
    return captured_step(model, lambda m, b: m(b).square().sum(), torch.randn(64, 8), {})


@pytest.mark.slow
def test_against_every_plan_of_a_small_graph_the_gap_is_true(monkeypatch):
    """Two blocks, two strategies for each operator: with every budget the best plan is between the bound and ours."""
    spaces, captured = [], chain()

    def few(*args):
        space = space_of(*args)
        by_list = {id(s): s[:2] for s in space.strategies.values()}
        strategies = {name: by_list[id(s)] for name, s in space.strategies.items()}
        spaces.append(replace(space, strategies=strategies, leaves={n: of[:1] for n, of in space.leaves.items()}))
        return spaces[-1]

    space_of = meshes.space_of
    monkeypatch.setattr(meshes, "space_of", few)
    request = PlanRequest(Mesh.of(d=2), "auto", hardware=HARDWARE, memory=1 << 40)
    free = make.make_plan(captured, request)
    [space], objective = spaces, Seconds(HARDWARE)
    assert [block.name for block in space.blocks] == ["0", "1"]
    every = []
    for picked in itertools.product(*space.strategies.values()):
        strategies = dict(zip(space.strategies, picked, strict=True))
        for recomputed in ((), ("0",), ("1",), ("0", "1")):
            plan = replace(free, strategies=strategies, recomputed=frozenset(recomputed))
            try:
                every.append((plan.held.total, true_cost(plan, objective)))
            except PlanError:
                break
    found = set()
    for limit in sorted({held for held, _ in every}):
        optimum = min(cost for held, cost in every if held <= limit)
        try:
            plan = make.make_plan(captured, replace(request, memory=limit))
        except OverBudget:
            continue
        found.add(plan.recomputed)
        assert plan.held.total <= limit
        assert true_cost(plan, objective) == pytest.approx(plan.cost, rel=1e-9)
        assert plan.bound * (1 - 1e-9) <= optimum <= plan.cost * (1 + 1e-9)
    assert frozenset({"0", "1"}) in found
    assert frozenset() in found


def test_on_one_device_what_is_computed_again_is_the_best_of_all_sets_of_layers():
    """Nothing can be split there, so that a budget leaves no other choice."""
    layers = nn.Sequential(*(Block() for _ in range(3)))
    captured = captured_step(layers, lambda m, b: m(b).square().sum(), torch.randn(64, 8), {})
    request, objective = PlanRequest(Mesh.of(d=1), "auto", hardware=HARDWARE), Seconds(HARDWARE)
    free = make.make_plan(captured, request)
    sets = [set(of) for count in range(4) for of in itertools.combinations("012", count)]
    every = [(of.held.total, true_cost(of, objective)) for of in map(free.computing_again, sets)]
    limits = sorted({held for held, _ in every if held < free.held.total})
    assert limits
    for limit in limits:
        plan = make.make_plan(captured, replace(request, memory=limit))
        optimum = min(cost for held, cost in every if held <= limit)
        assert plan.recomputed
        assert plan.held.total <= limit
        assert plan.cost == pytest.approx(optimum, rel=1e-9)
        assert plan.cost == pytest.approx(true_cost(plan, objective), rel=1e-9)
        assert plan.bound <= optimum * (1 + 1e-9)


@pytest.mark.networks
@pytest.mark.slow
def test_the_bytes_of_the_search_are_never_above_those_held(monkeypatch):
    """Nor is what it counts for computing again above what that costs."""
    spaces = []
    monkeypatch.setattr(mesh_search, "search", lambda space, *args: spaces.append(space) or search.search(space, *args))
    captured = captured_step(Transformer(layers=3), *NETWORKS["transformer"][1:2], NETWORKS["transformer"][2](24), {})
    request = PlanRequest(Mesh.of(a=2, b=3), "auto", hardware=HARDWARE, memory=1 << 40)
    plan = make.make_plan(captured, request)
    objective = Seconds(HARDWARE)
    both = search._TwoStages(spaces[0], objective)
    weights = Weights(both.main, ADAMW)
    assert len(both.main.block_variables) == 3
    random = np.random.default_rng(0)
    for price in (0.0, 1e-12, 1e-9):
        noise = [Table((v,), random.random(size) * 1e-4) for v, size in enumerate(both.main.domains)]
        picked = both.main.minimum([*weights.at(price), *noise]).picked
        again = weights.recomputing.chosen(picked)
        strategies, leaves = both.main.decided(picked)
        beside = both._following(strategies, leaves)[1:] if both.side else ({}, {})
        mixed = replace(plan, strategies=strategies | beside[0], leaves=leaves | beside[1], recomputed=again)
        held = mixed.held.total - mixed.held.communication
        assert 0.6 * held <= weights.of(picked) <= held
        counted = cost_at(weights.recomputing.tables, picked)
        truth = sum(repeated_costs(mixed, objective).values())
        assert 0.5 * truth <= counted <= truth * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["data", "auto"])
def test_few_of_many_equal_layers_are_computed_again_where_few_serve(mode):
    layers, batch = nn.Sequential(*(Block() for _ in range(6))), torch.randn(512, 8)
    captured = captured_step(layers, lambda m, b: m(b).square().sum(), batch, {})
    free = make.make_plan(captured, PlanRequest(Mesh.of(d=2), "data"))
    counts = []
    for part in (1.0, 0.75, 0.5):
        memory = int(part * free.held.total)
        plan = make.make_plan(captured, PlanRequest(Mesh.of(d=2), mode, memory=memory))
        counts.append(len(plan.recomputed))
        assert plan.held.total <= memory
        if counts[-1]:
            fewer = replace(plan, recomputed=frozenset(sorted(plan.recomputed)[1:]))
            assert fewer.held.total > memory
            again = plan.computing_again(fewer.recomputed)
            assert (again, again.held, again.transfers) == (fewer, fewer.held, fewer.transfers)
            assert again.transfers is plan.transfers
    assert counts[0] == 0 < counts[1] < counts[2] < 6
    assert mode == "data" or plan.bound <= plan.cost
