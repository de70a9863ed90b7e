"""Plans within a budget of bytes: what is found fits, and no plan that fits costs less than the bound."""

import contextlib
import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from shardwright.errors import PlanError
from shardwright.graph.step import captured_step
from shardwright.mesh.mesh import Mesh
from shardwright.plan import make
from shardwright.plan.pricing.cost import Seconds
from shardwright.plan.pricing.hardware import shipped
from shardwright.plan.pricing.optimizers import ADAMW, OptimizerStates
from shardwright.plan.request import PlanRequest, read_memory
from shardwright.plan.searching import search
from shardwright.plan.searching.budget import Budget, OverBudget, Priced, _next_price, fitting
from shardwright.plan.searching.buffers import buffers_of
from shardwright.plan.searching.exact import Table, minimise
from shardwright.plan.searching.space import Choice
from shardwright.plan.searching.tables import cost_at
from shardwright.plan.searching.weights import Weights
from shardwright.world.gradients import BUCKET_BYTES
from whole import communicated, losses_of, plan_of, planned, run, same


@pytest.mark.parametrize("seed", range(40))
def test_the_gap_is_true_on_random_graphs(seed):
    """Against every assignment: the bound is at most the optimum, and the optimum at most what is found."""
    random = np.random.default_rng(seed)
    domains = random.integers(2, 5, 5).tolist()
    scopes = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (1,), (4,)]
    costs, sizes = ([Table(s, random.random([domains[v] for v in s])) for s in scopes] for _ in range(2))
    every = list(itertools.product(*map(range, domains)))
    held = {x: int(1000 * cost_at(sizes, x)) for x in every}
    limit = int(np.quantile(list(held.values()), random.choice([0.001, 0.05, 0.3])))
    optimum = min(cost_at(costs, x) for x in every if held[x] <= limit)

    def solve(price, below, *, alone=False):
        priced = [Table(t.scope, 1000 * price * t.costs) for t in sizes]
        found, x = minimise(domains, [*costs, *priced])
        return [Choice({"x": tuple(x)}, {}, cost_at(costs, x), None)], found - price * limit

    free = minimise(domains, costs)
    budget = Budget(limit, ADAMW, lambda choice: held[choice.strategies["x"]], lambda choice: "nothing fits")
    found = fitting(Choice({"x": tuple(free[1])}, {}, free[0], free[0]), solve, budget)
    assert held[found.strategies["x"]] <= limit
    assert found.bound - 1e-9 <= optimum <= found.cost + 1e-9
    with pytest.raises(OverBudget, match="nothing fits"):
        fitting(
            Choice({"x": tuple(free[1])}, {}, free[0], free[0]), solve, Budget(1, ADAMW, budget.weigh, budget.refuse)
        )


def mse(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def wide(rows=16):
    """Parameters that weigh more than what is computed with them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 96), torch.nn.ReLU(), torch.nn.Linear(96, 96), torch.nn.Linear(96, 12)
    )
    return (
        model,
        mse,
        (torch.randn(rows, 24), torch.randn(rows, 12)),
    )


def test_a_budget_that_data_parallelism_exceeds_is_kept_and_exact():
    model, loss_fn, batch = wide()
    data = plan_of(model, loss_fn, batch, Mesh.of(d=4), "data")
    half = data.held.total // 2
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=4), "auto", memory=half)
    assert plan.held.total <= half
    assert plan.bound <= plan.cost
    assert f"of {half / 1000:.1f} kB that it may hold" in str(plan)
    same(run(plan, model, batch), run(plan_of(model, loss_fn, batch, Mesh(()), "single"), model, batch), 1e-5)
    plenty = plan_of(model, loss_fn, batch, Mesh.of(d=4), "auto", memory=read_memory("1GiB"))
    assert plenty.strategies == plan_of(model, loss_fn, batch, Mesh.of(d=4), "auto").strategies


@pytest.mark.slow
@pytest.mark.networks
@pytest.mark.parametrize("mesh", [Mesh.of(d=4), Mesh.of(a=2, b=3)], ids=str)
@pytest.mark.parametrize("name", list(NETWORKS))
def test_tight_plans_of_whole_networks_are_exact(name, mesh, monkeypatch):
    """The least budgets of a series that some plan keeps: parameters are split, gathered, and gathered again."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        build, loss_fn, batch_of = NETWORKS[name]
        model, batch = build(), batch_of(12)
        batch = tuple(t.double() if t.is_floating_point() else t for t in batch)
        captured = captured_step(model, loss_fn, batch, {})
        data_bytes = make.make_plan(captured, PlanRequest(mesh, "data")).held.total
        plans = []
        for part in (0.8, 0.65, 0.5, 0.4):
            with contextlib.suppress(OverBudget):
                plans.append(make.make_plan(captured, PlanRequest(mesh, "auto", memory=int(part * data_bytes))))
        assert plans
        reference = run(make.make_plan(captured, PlanRequest(Mesh(()), "single")), model, batch, seed=3)
        for plan in plans:
            assert plan.held.total <= plan.memory
            same(run(plan, model, batch, seed=3), reference)
            assert communicated(plan, model, batch, monkeypatch) == planned(plan)
    finally:
        torch.set_default_dtype(torch.float32)


def test_parameters_are_stored_in_uneven_parts_where_nothing_else_fits(monkeypatch):
    """Of dims of 32 and 64 no search cuts more than a half for 6 devices: a third of them is not even."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    batch = torch.randn(12, 32), torch.randn(12, 32)
    memory = sum(parameter.nbytes for parameter in model.parameters()) * 4 // 2  # in halves, with gradients and states
    plan = plan_of(model, mse, batch, Mesh.of(d=6), "auto", memory=memory)
    assert plan.held.total <= memory
    matrices = [value for value in plan.capture.of_kind("parameter") if len(value.shape) > 1]
    assert all(plan.bytes_of(value) <= value.bytes / 5 for value in matrices)
    assert plan.bound <= plan.cost
    same(run(plan, model, batch), run(plan_of(model, mse, batch, Mesh(()), "single"), model, batch), 1e-5)
    assert communicated(plan, model, batch, monkeypatch) == planned(plan)
    with pytest.raises(OverBudget, match="no plan was found"):
        plan_of(model, mse, batch, Mesh.of(d=6), "auto", memory=memory // 2)


def test_an_optimizer_that_keeps_less_leaves_room():
    model, loss_fn, batch = wide()
    free = plan_of(model, loss_fn, batch, Mesh.of(d=2), "data", optimizer=OptimizerStates("sgd", 0, 0))
    assert plan_of(model, loss_fn, batch, Mesh.of(d=2), "data", memory=free.held.total, optimizer=free.optimizer)
    with pytest.raises(PlanError, match=r"holds [\d.]+ kB of parameters, .* of states of adamw, .*mode='auto'"):
        plan_of(model, loss_fn, batch, Mesh.of(d=2), "data", memory=free.held.total)


def test_a_budget_that_nothing_keeps_says_what_the_floor_is():
    model, loss_fn, batch = wide()
    with pytest.raises(PlanError) as raised:
        plan_of(model, loss_fn, batch, Mesh.of(d=2), "auto", memory=104_000)
    assert str(raised.value).startswith("no plan was found under which a device holds 104.0 kB or less: on the mesh ")
    assert "kB of parameters" in str(raised.value)
    assert "kB in all, of 104.0 kB that it may hold" in str(raised.value)


def test_what_no_plan_can_hold_is_refused_before_a_search(monkeypatch):
    """By parameters, gradients and states alone: 12,876 parameters of sixteen bytes."""
    monkeypatch.setattr(make, "search", None)
    match = (
        r"^no plan was found under which a device holds 20.0 kB or less, and there is none: however they are split, .* "
        r"the states of adamw take 51.5 kB on each of 4 devices; type a larger memory=, at least 11 devices, "
    )
    with pytest.raises(PlanError, match=match):
        plan_of(*wide(), Mesh.of(d=4), "auto", memory=20_000)


@pytest.mark.networks
@pytest.mark.parametrize("name", ["perceptron", *(pytest.param(n, marks=pytest.mark.slow) for n in list(NETWORKS)[1:])])
def test_the_bytes_of_the_search_are_never_above_those_held(name, monkeypatch):
    """So that a bound by these bytes is one for what is held; and near them, so that it is a good one."""
    build, loss_fn, batch_of = NETWORKS[name]
    spaces = []
    monkeypatch.setattr(make, "search", lambda space, *args: spaces.append(space) or search.search(space, *args))
    plan = plan_of(build(), loss_fn, batch_of(24), Mesh.of(a=2, b=3), "auto")
    both = search._Both(spaces[0], Seconds(shipped("cpu")))
    weights, buffers = Weights(both.main, ADAMW), buffers_of(both.main)
    random = np.random.default_rng(0)
    for price in (0.0, 1e-12, 1e-9, 1e-6):
        noise = [Table((v,), random.random(size) * 1e-5) for v, size in enumerate(both.main.domains)]
        picked = both.main.minimum([*weights.at(price), *noise]).picked
        strategies, leaves = both.main.decided(picked)
        beside = both._following(strategies, leaves)[1:] if both.beside else ({}, {})
        held = replace(plan, strategies=strategies | beside[0], leaves=leaves | beside[1]).held
        assert 0.85 * (held.total - held.communication) <= weights.of(picked) <= held.total - held.communication
        assert buffers.of(picked) <= held.communication <= buffers.of(picked) + BUCKET_BYTES


class Fused(torch.nn.Module):
    """Queries, keys and values of one product, which is cut into views; and weights that are read by views of them."""

    def __init__(self):
        super().__init__()
        self.cut = torch.nn.Linear(16, 48)
        self.weight = torch.nn.Parameter(torch.randn(64, 16) / 4)
        self.three = torch.nn.Parameter(torch.randn(48, 64) / 4)

    def forward(self, x):
        q, k, v = self.cut(x).split(16, dim=1)
        found = torch.nn.functional.silu(q * k * v) @ self.weight.transpose(0, 1)
        return sum(found @ part.transpose(0, 1) for part in self.three.chunk(3))


def test_parts_of_one_memory_and_views_of_gathered_weights_are_counted(monkeypatch):
    spaces, batch = [], torch.randn(480, 16)
    monkeypatch.setattr(make, "search", lambda space, *args: spaces.append(space) or search.search(space, *args))
    plan = plan_of(Fused(), lambda m, b: m(b).square().sum(), batch, Mesh.of(a=2, b=2), "auto")
    both = search._Both(spaces[0], Seconds(shipped("cpu")))
    weights, random = Weights(both.main, ADAMW), np.random.default_rng(0)
    for _ in range(12):
        noise = [Table((v,), random.random(size) * 1e-3) for v, size in enumerate(both.main.domains)]
        picked = both.main.minimum(noise).picked
        strategies, leaves = both.main.decided(picked)
        held = replace(plan, strategies=strategies, leaves=leaves).held
        assert 0.9 * (held.total - held.communication) <= weights.of(picked) <= held.total - held.communication


def test_the_next_price_is_where_the_best_on_both_sides_of_the_budget_cost_the_same():
    """Not of the last two that were found: the hull of all passes the limit between the second and the third."""
    points = [(0.85, 5), (0.58, 11), (0.54, 20), (0.57, 19), (9.0, 30)]
    found = [Priced(Choice({}, {}), cost, 0.0, size) for cost, size in points]
    assert _next_price(found, 16) == pytest.approx((0.58 - 0.54) / 9)


@pytest.mark.parametrize("search", ["recursive", "propagation"])
def test_other_searches_keep_a_budget_and_are_exact(search):
    model, loss_fn, batch = wide()
    half = plan_of(model, loss_fn, batch, Mesh.of(d=4), "data").held.total // 2
    plan = plan_of(model, loss_fn, batch, Mesh.of(a=2, b=2), "auto", search=search, memory=half)
    assert plan.search == search
    assert plan.held.total <= half
    same(run(plan, model, batch), run(plan_of(model, loss_fn, batch, Mesh(()), "single"), model, batch), 1e-5)
    with pytest.raises(PlanError, match="no plan was found under which a device holds 1 B or less"):
        plan_of(model, loss_fn, batch, Mesh.of(a=2, b=2), "auto", search=search, memory=1)


def trained_in_parts():
    """The losses of three steps of training on ranks that hold little, and those of plain PyTorch."""
    sw.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(31, 33), torch.nn.ReLU(), torch.nn.Linear(33, 31)).double()
    plain = copy.deepcopy(model)
    batch = torch.randn(12, 31, dtype=torch.float64), torch.randn(12, 31, dtype=torch.float64)
    memory = sum(parameter.nbytes for parameter in model.parameters()) * 4 // 2
    parallel = sw.parallelize(model, mse, batch, batch="global", memory=memory, optimizer="adamw")
    found = losses_of(parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2), batch)
    expected = losses_of(lambda b: mse(plain, b), torch.optim.AdamW(plain.parameters(), lr=1e-2), batch)
    matrices = [value for value in parallel.plan.capture.of_kind("parameter") if len(value.shape) > 1]
    return found, expected, [parallel.plan.bytes_of(value) / value.bytes for value in matrices]


@pytest.mark.slow
def test_ranks_train_with_uneven_parts_as_one_device_does():
    for found, expected, parts in run_ranks(4, trained_in_parts):
        assert found == pytest.approx(expected, rel=1e-10)
        assert max(parts) < 0.3
