"""Plans within a budget of bytes: what is found fits, and no plan that fits costs less than the bound."""

import contextlib
import itertools
import math
import random
import re
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models import NETWORKS
from rows import slow
from shardwright.common.words import in_bytes
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.liveness import peak_of
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan import make, mesh_search
from shardwright.compiler.plan.baselines import BASELINES
from shardwright.compiler.plan.device_memory import DeviceMemory
from shardwright.compiler.plan.mesh_search import _first_within
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.pricing.memory import ADAMW, OptimizerStates
from shardwright.compiler.plan.request import PlanRequest, read_memory
from shardwright.compiler.plan.search import search
from shardwright.compiler.plan.search.bounds import WarmStart
from shardwright.compiler.plan.search.branching import Branch, BranchAndBound, Branching
from shardwright.compiler.plan.search.budget import Budget, PricedChoice, fitting, next_price
from shardwright.compiler.plan.search.buffers import JoinedBuffers, buffers_of
from shardwright.compiler.plan.search.choices import Choice, OverBudget
from shardwright.compiler.plan.search.exact import Table, cost_at, minimise
from shardwright.compiler.plan.search.narrow import NothingBelow, least, plus
from shardwright.compiler.plan.search.weights import Weights
from shardwright.errors import PlanError
from whole import communicated, plan_of, planned, run, same


@pytest.mark.parametrize("seed", [*range(10), *slow(*range(10, 40))])
def test_the_gap_is_true_on_random_graphs(seed):
    """Against every assignment: the bound is at most the optimum, and the optimum at most what is found.

    Each search learns of those before it, is told what it is to beat, and may build small tables alone.
    """
    random = np.random.default_rng(seed)
    domains = random.integers(2, 5, 5).tolist()
    learned = WarmStart.nothing(domains)
    scopes = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (1,), (4,)]
    costs, sizes = ([Table(s, random.random([domains[v] for v in s])) for s in scopes] for _ in range(2))
    every = list(itertools.product(*map(range, domains)))
    held = {x: math.ceil(1000 * cost_at(sizes, x)) for x in every}
    limit = int(np.quantile(list(held.values()), random.choice([0.001, 0.05, 0.3])))
    optimum = min(cost_at(costs, x) for x in every if held[x] <= limit)

    def solve(price, below, *, alone=False, forbidding=()):
        tables = [*costs, *(Table(t.scope, 1000 * price * t.costs) for t in sizes), *forbidding]
        of_all = learned.copied() if forbidding else learned
        with plus(-price * limit):
            found = least(domains, tables, 2, below=below + price * limit, learned=of_all)
        return [choice(found.picked)], found.bound - price * limit, 1000 * cost_at(sizes, found.picked) - limit

    def choice(picked):
        return Choice({"x": tuple(picked)}, {}, cost_at(costs, picked), None)

    free = minimise(domains, costs)
    budget = Budget(limit, ADAMW, lambda choice: held[choice.strategies["x"]], refused)
    free = replace(choice(free[1]), bound=free[0])
    found = fitting(lambda: free, solve, budget)
    assert held[found.strategies["x"]] <= limit
    assert found.bound - 1e-9 <= optimum <= found.cost + 1e-9

    def closer(best, points, price):
        """The choices divided until no gap is left."""
        weights = SimpleNamespace(tables=[], of_each=lambda v, x: np.array([size(x, v, i) for i in range(domains[v])]))
        problem = SimpleNamespace(tables=costs, picked=lambda strategies, *_: strategies["x"])
        parts = BranchAndBound(best, solve, budget, Branching(problem, weights), math.inf)
        return parts.divided(Branch((), list(points), best.bound, price))

    def size(x, v, i):
        return cost_at(sizes, [*x[:v], i, *x[v + 1 :]])

    learned = WarmStart.nothing(domains)
    found = fitting(lambda: free, solve, budget, closer=closer)
    assert held[found.strategies["x"]] <= limit
    assert 0.985 * optimum <= found.bound <= optimum + 1e-9
    assert optimum - 1e-9 <= found.cost <= 1.015 * optimum
    for below in (0.95 * optimum, 1.05 * optimum):
        learned = WarmStart.nothing(domains)
        assert bound_of(lambda below=below: fitting(lambda: free, solve, budget, below), below) - 1e-9 <= optimum
    learned, limit = WarmStart.nothing(domains), 1
    with pytest.raises(OverBudget, match="nothing fits") as over:
        fitting(lambda: free, solve, replace(budget, limit_bytes=limit))
    assert over.value.bound > optimum


def bound_of(search, below):
    try:
        return search().bound
    except NothingBelow as nothing:
        return min(nothing.bound, below)


def refused(choice, bound):
    return OverBudget("nothing fits", 0, bound)


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


@pytest.fixture(scope="module")
def widened():
    """`wide`, the graph of its step, and what one device gives."""
    model, loss_fn, batch = wide()
    captured = captured_step(model, loss_fn, batch, {})
    return captured, model, batch, run(make.make_plan(captured, PlanRequest(Mesh(()), "single")), model, batch)


def test_a_budget_that_data_parallelism_exceeds_is_kept_and_exact(widened):
    captured, model, batch, expected = widened
    data = make.make_plan(captured, PlanRequest(Mesh.of(d=4), "data"))
    half = data.held.total // 2
    plan = make.make_plan(captured, PlanRequest(Mesh.of(d=4), "auto", memory=half))
    assert plan.held.total <= half
    assert plan.bound <= plan.cost
    assert f"of {half / 1000:.1f} kB that it may hold" in str(plan)
    same(run(plan, model, batch), expected, 1e-5)
    plenty = make.make_plan(captured, PlanRequest(Mesh.of(d=4), "auto", memory=read_memory("1GiB")))
    assert plenty.strategies == make.make_plan(captured, PlanRequest(Mesh.of(d=4), "auto")).strategies


@pytest.mark.parametrize("search", ["exact", pytest.param("recursive", marks=pytest.mark.slow)])
def test_no_more_is_alive_at_once_than_a_budget_whatever_passes_in_the_backward(search):
    """Of many classes: where their gradients are made, more is alive than all that is held for the backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 512))
    batch = torch.randn(128, 8), torch.randint(0, 512, (128,))
    captured = captured_step(model, lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]), batch, {})
    request = PlanRequest(Mesh.of(d=4), "auto", search, hardware=shipped("h100"))
    free, least = make.make_plan(captured, request), 0
    assert free.held.transient > 0.1 * free.held.total
    for share in (0.95, 0.8):
        memory = int(share * free.held.total)
        try:
            plan = make.make_plan(captured, replace(request, memory=memory))
        except OverBudget:
            continue
        least = memory
        for overlap in (False, True):
            assert peak_of(plan, lower(plan, 0, overlap=overlap)).bytes <= plan.held.total <= memory
    assert 0 < least < free.held.total


class WithNone(torch.nn.Module):
    """A matrix, to which another without entries adds nothing."""

    def __init__(self):
        super().__init__()
        self.some, self.none = (torch.nn.Parameter(torch.ones(rows, 128)) for rows in (256, 0))

    def forward(self, x):
        return x @ torch.cat([self.some, self.none]).T


def test_a_parameter_without_entries_has_no_part_in_a_budget():
    batch = torch.randn(8, 128), torch.randn(8, 256)
    captured = captured_step(WithNone(), mse, batch, {})
    memory = make.make_plan(captured, PlanRequest(Mesh.of(d=2), "data")).held.total * 7 // 10
    assert make.make_plan(captured, PlanRequest(Mesh.of(d=2), "auto", memory=memory)).held.total <= memory


@pytest.mark.slow
@pytest.mark.networks
@pytest.mark.timeout(900)
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
    captured = captured_step(model, mse, batch, {})
    plan = make.make_plan(captured, PlanRequest(Mesh.of(d=6), "auto", memory=memory))
    assert plan.held.total <= memory
    matrices = [value for value in plan.capture.of_kind("parameter") if len(value.shape) > 1]
    assert any(plan.bytes_of(value) <= value.bytes / 5 for value in matrices)
    assert plan.bound <= plan.cost
    alone = make.make_plan(captured, PlanRequest(Mesh(()), "single"))
    same(run(plan, model, batch), run(alone, model, batch), 1e-5)
    assert communicated(plan, model, batch, monkeypatch) == planned(plan)


def test_before_a_refusal_a_price_is_tried_at_which_more_counts_and_less_is_held():
    """At the highest price nothing is found that holds less than 185 kB, where small gathers count that go together."""
    model = torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.GELU(), torch.nn.Linear(96, 48))
    batch = torch.randn(96, 48), torch.randn(96, 48)
    captured = captured_step(model, mse, batch, {})
    request = PlanRequest(Mesh.of(d=2), "auto", memory=180_000, hardware=shipped("h100"))
    plan = make.make_plan(captured, request)
    assert plan.held.total <= plan.memory
    with pytest.raises(OverBudget, match="no plan was found") as over:
        make.make_plan(captured, replace(request, memory=150_000))
    assert 150_000 < over.value.least_bytes <= 180_000


def test_an_optimizer_that_keeps_less_leaves_room(widened):
    request = PlanRequest(Mesh.of(d=2), "data")
    free = make.make_plan(widened[0], replace(request, optimizer=OptimizerStates("sgd", 0, 0)))
    assert make.make_plan(widened[0], replace(request, memory=free.held.total, optimizer=free.optimizer))
    with pytest.raises(PlanError, match=r"holds [\d.]+ kB of parameters, .* of states of adamw, .*mode='auto'"):
        make.make_plan(widened[0], replace(request, memory=free.held.total))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param(Mesh.of(d=2), {}, marks=pytest.mark.slow),
        (Mesh.of(d=6), {}),  # some parameters have even parts on one of its meshes alone
        (Mesh.of(d=4), {"mode": "data"}),
        pytest.param(Mesh.of(d=8), {}, marks=pytest.mark.slow),  # of two axes, and then of three
        pytest.param(Mesh.of(a=2, b=2), {"search": "recursive"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_budget_that_nothing_keeps_says_what_the_floor_is(mesh, options, widened):
    """By kind; and what to type, which is enough. None of the plans that are known by name holds less."""
    captured = widened[0]
    floor_of_parameters = 16 * 12_876 // mesh.size
    request = PlanRequest(mesh, **{"mode": "auto", **options}, memory=floor_of_parameters + 100)
    with pytest.raises(OverBudget) as raised:
        make.make_plan(captured, request)
    text, least = str(raised.value), raised.value.least_bytes
    said = rf"^no plan was found under which a device holds {in_bytes(request.memory)} or less: on the mesh .*, mode "
    kinds = r"[\d.]+ kB of parameters, [\d.]+ kB of gradients, [\d.]+ kB of states of adamw, [\d.]+ kB of activations"
    assert re.match(said + ".* the one that holds least holds " + kinds, text)
    assert least > request.memory
    assert f"{in_bytes(least)} in all, {in_bytes(least - request.memory)} too much: " in text
    assert "; type memory='" in text
    if not options:
        assert least <= min(make(RuledGraph.of(captured), request).held.total for make in BASELINES.values())
    enough = read_memory(re.search(r"memory='(.*?)' \(--memory", text)[1])
    assert least <= enough < 1.01 * least
    assert make.make_plan(captured, replace(request, memory=enough)).held.total <= enough


def holding(**kinds):
    """What a device holds, of which all but these kinds are empty."""
    return DeviceMemory(**{field.name: kinds.get(field.name, 0) for field in fields(DeviceMemory)})


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (holding(parameters=50, gradients=40, optimizer=20, activations=1),
         "parameters, gradients, optimizer states, buffers and inputs alone are 110 B"),
        (holding(parameters=50, inputs=20, activations=40, communication=9),
         "what the backward needs is 40 B, and parameters, gradients, optimizer states, buffers and inputs leave 30 B"),
        (holding(parameters=50, activations=10, recomputed=10, communication=40),
         "buffers of collectives are 40 B, and all else leaves 30 B for them"),
        (holding(parameters=50, activations=20, communication=10, transient=40),
         "gradients of activations and other transient tensors take 40 B, and all else leaves 20 B for them"),
    ],
)  # fmt: skip
def test_a_refusal_says_which_part_does_not_fit(held, said):
    assert said in mesh_search._part_too_large(held, 100)


@pytest.mark.parametrize("mode", ["auto", "data"])
def test_a_refusal_names_more_than_the_limit_whatever_the_limit_is(mode, widened):
    """At limits from what parameters alone take on."""
    captured = widened[0]
    request = PlanRequest(Mesh.of(d=2), mode)
    most, refused = make.make_plan(captured, request).held.total, {}
    for limit in (most // 4, most // 2, most * 3 // 4):
        try:
            assert make.make_plan(captured, replace(request, memory=limit)).held.total <= limit
        except OverBudget as over:
            refused[limit] = over
    assert refused
    for limit, over in refused.items():
        assert over.least_bytes > limit or "and there is none: however they are split" in str(over)
        assert " in all, of " not in str(over)


class _Added(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = torch.nn.LayerNorm(64), torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        y = self.norm(x)
        for inner in self.inner:
            y = torch.nn.functional.gelu(inner(y))
        return x + y


def test_a_refusal_counts_what_modules_take_whose_recomputing_is_demanded():
    """A plan that keeps their activations would fit, but is not what was asked for."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(_Added(), _Added(), torch.nn.Linear(64, 3)).double()
    batch = torch.randn(12, 64, dtype=torch.float64)
    captured = captured_step(model, lambda model, x: model(x).square().mean(), batch, {})
    request = PlanRequest(Mesh.of(d=3), "auto", hardware=shipped("h100"), memory=740_000)
    assert make.make_plan(captured, request).held.total <= request.memory
    with pytest.raises(OverBudget) as over:
        make.make_plan(captured, replace(request, recompute=("[01]",)))
    assert over.value.least_bytes > request.memory


def test_what_no_plan_can_hold_is_refused_before_a_search(monkeypatch, widened):
    """By parameters, gradients and states alone: 12,876 parameters of sixteen bytes."""
    monkeypatch.setattr(mesh_search, "search", None)
    match = (
        r"^no plan was found under which a device holds 20.0 kB or less, and there is none: however they are split, .* "
        r"\(12.9 kB\), their gradients \(12.9 kB\) and the states of adamw \(25.8 kB\) take 51.5 kB on each of "
        r"4 devices, .*; type a larger memory= \(--memory\), at least 11 devices, "
    )
    with pytest.raises(PlanError, match=match):
        make.make_plan(widened[0], PlanRequest(Mesh.of(d=4), "auto", memory=20_000))


@pytest.mark.networks
@pytest.mark.parametrize("name", ["perceptron", *slow(*list(NETWORKS)[1:])])
def test_the_bytes_of_the_search_are_never_above_those_held(name, monkeypatch):
    """So that a bound by these bytes is one for what is held; and near them, so that it is a good one."""
    build, loss_fn, batch_of = NETWORKS[name]
    spaces = []
    monkeypatch.setattr(mesh_search, "search", lambda space, *args: spaces.append(space) or search.search(space, *args))
    plan = plan_of(build(), loss_fn, batch_of(24), Mesh.of(a=2, b=3), "auto")
    both = search._TwoStages(spaces[0], Seconds(shipped("cpu_host")))
    weights, buffers, joined = Weights(both.main, ADAMW), buffers_of(both.main), JoinedBuffers(both.main)
    random = np.random.default_rng(0)
    for price in (0.0, 1e-12, 1e-9, 1e-6):
        noise = [Table((v,), random.random(size) * 1e-5) for v, size in enumerate(both.main.domains)]
        picked = both.main.minimum([*weights.at(price), *noise]).picked
        strategies, leaves = both.main.decided(picked)
        plus = both._following(strategies, leaves)[1:] if both.side else ({}, {})
        held = replace(plan, strategies=strategies | plus[0], leaves=leaves | plus[1]).held
        held = replace(held, transient=0)  # which no search counts
        assert 0.85 * (held.total - held.communication) <= weights.of(picked) <= held.total - held.communication
        largest = max(buffers.of(picked), joined.largest(picked)[1])
        assert 0.9 * held.communication <= largest <= held.communication


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
    monkeypatch.setattr(mesh_search, "search", lambda space, *args: spaces.append(space) or search.search(space, *args))
    plan = plan_of(Fused(), lambda m, b: m(b).square().sum(), batch, Mesh.of(a=2, b=2), "auto")
    both = search._TwoStages(spaces[0], Seconds(shipped("cpu_host")))
    weights, random = Weights(both.main, ADAMW), np.random.default_rng(0)
    for _ in range(4):
        noise = [Table((v,), random.random(size) * 1e-3) for v, size in enumerate(both.main.domains)]
        picked = both.main.minimum(noise).picked
        strategies, leaves = both.main.decided(picked)
        held = replace(replace(plan, strategies=strategies, leaves=leaves).held, transient=0)  # no search counts that
        assert 0.9 * (held.total - held.communication) <= weights.of(picked) <= held.total - held.communication


def test_the_next_price_is_where_the_best_on_both_sides_of_the_budget_cost_the_same():
    """Not of the last two that were found: the hull of all passes the limit between the second and the third."""
    points = [(0.85, 5), (0.58, 11), (0.54, 20), (0.57, 19), (9.0, 30)]
    found = [PricedChoice(Choice({}, {}), cost, 0.0, size) for cost, size in points]
    assert next_price(found, 16) == pytest.approx((0.58 - 0.54) / 9)


def test_what_fits_with_a_block_computed_again_says_the_first_price_and_is_to_be_beaten():
    """Four more for ten bytes less: where that is the least, one search says so."""
    asked, free = [], Choice({}, {}, 10.0, 10.0)

    def solve(price, below, *, alone=False, forbidding=()):
        asked.append((price, below))
        return [replace(free)], 10.0 + price * 10, 10

    budget = Budget(
        10,
        ADAMW,
        lambda choice: 10 if choice.recomputed else 20,
        refused,
        fewest=lambda choice, limit: replace(choice, recomputed=frozenset({"block"}), cost=14.0),
    )
    found = fitting(lambda: free, solve, budget)
    assert asked == [(pytest.approx(0.4), 14.0)]
    assert (found.cost, found.bound, found.recomputed) == (14.0, pytest.approx(14.0), {"block"})


@pytest.mark.parametrize(("bound", "asks"), [(13.9, False), (13.0, True)])
def test_what_is_free_is_looked_for_where_a_known_price_leaves_a_gap(bound, asks):
    asked = []

    def free():
        asked.append("free")
        return Choice({}, {}, 10.0, 10.0)

    def solve(price, below, *, alone=False, forbidding=()):
        return [Choice({}, {}, 14.0)], bound, -1

    held = {10.0: 20, 14.0: 8}
    budget = Budget(10, ADAMW, lambda choice: held[choice.cost], refused, price=0.4, close=1e-2)
    found = fitting(free, solve, budget)
    assert (found.cost, found.bound, bool(asked)) == (14.0, bound, asks)


@pytest.mark.parametrize("seed", range(20))
def test_as_few_blocks_are_computed_again_as_fit_however_far_their_sizes_lead_astray(seed):
    draw, asked = random.Random(seed), []
    true = [draw.randint(1, 9) for _ in range(draw.randint(0, 40))]
    said = [max(1, round(of * draw.choice([0.2, 1, 1, 5]))) for of in true]
    limit = draw.randint(0, sum(true))

    def held(count):
        asked.append(count)
        return sum(true[count:])

    least = min(count for count in range(len(true) + 1) if sum(true[count:]) <= limit)
    assert _first_within(limit, held, said) == least
    asked.clear()
    assert _first_within(limit, held, true) == least
    assert len(asked) <= 3


@pytest.mark.parametrize(("middle", "asked"), [(12.5, [3.0, 1 / 3, 1.0]), (11.33, [3.0, 1 / 3, 1.0, 0.995])])
def test_a_price_near_another_is_tried_where_the_bound_may_be_larger_at_it(middle, asked):
    """What fits is a little cheaper at the third price, which makes the fourth differ from it by half a percent."""
    held, tried = {10.0: 20, 14.0: 8, 11.0: 11, 13.985: 8}, []
    found = {3.0: (14.0, 8.0, -2), 1 / 3: (11.0, middle, 1), 1.0: (13.985, 11.98, -2), 0.995: (13.985, 11.98, -2)}

    def solve(price, below, *, alone=False, forbidding=()):
        tried.append(price)
        cost, total, above = found[min(found, key=lambda of: abs(of - price))]
        return [Choice({}, {}, cost, cost)], total, above

    best = fitting(
        lambda: Choice({}, {}, 10.0, 10.0), solve, Budget(10, ADAMW, lambda choice: held[choice.cost], refused)
    )
    assert tried == pytest.approx(asked)
    assert (best.cost, best.bound) == (13.985, max(middle, 11.98))


@pytest.mark.parametrize(("bound", "asked"), [(10.0, [0.4]), (13.95, [])])
def test_choices_are_divided_where_a_gap_is_left_and_from_the_price_between_the_two_that_are_known(bound, asked):
    """No price has been tried, so that no line says where the bound may be the largest."""
    over, fit, tried = Choice({}, {}, 10.0, 10.0), Choice({}, {}, 14.0, bound, price=0.3), []

    def solve(price, below, *, alone=False, forbidding=()):
        tried.append(price)
        raise NothingBelow(13.95)

    budget = Budget(10, ADAMW, lambda choice: 10 if choice is fit else 20, refused)
    parts = BranchAndBound(fit, solve, budget, SimpleNamespace(most_searches=4), math.inf)
    found = parts.divided(Branch((), [PricedChoice.of(of, 10.0, budget) for of in (over, fit)], bound, 0.3))
    assert tried == pytest.approx(asked)
    assert (found.cost, found.bound, found.price) == (14.0, 13.95, 0.3)


@pytest.mark.parametrize("search", ["recursive", "propagation"])
def test_other_searches_keep_a_budget_and_are_exact(search, widened):
    captured, model, batch, expected = widened
    half = make.make_plan(captured, PlanRequest(Mesh.of(d=4), "data")).held.total // 2
    request = PlanRequest(Mesh.of(a=2, b=2), "auto", search, memory=half)
    plan = make.make_plan(captured, request)
    assert plan.search == search
    assert plan.held.total <= half
    same(run(plan, model, batch), expected, 1e-5)
    with pytest.raises(PlanError, match="no plan was found under which a device holds 1 B or less"):
        make.make_plan(captured, replace(request, memory=1))
