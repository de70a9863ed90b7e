"""The exact search against everything else that plans: all choices tried or integer programming, and other searches."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array
from torch import nn
from torch.nn import functional as F

from decoder import Decoder, batch_of
from decoder import loss_fn as decoder_loss
from rows import slow
from shardwright.compiler.capture.ir import Capture, Node, Value
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan import mesh_search
from shardwright.compiler.plan.baselines import BASELINES
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.mesh_search import MeshSearch, or_alternative
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.pricing.memory import ADAMW
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search import recursive as axis_by_axis
from shardwright.compiler.plan.search.branching import Branching
from shardwright.compiler.plan.search.choices import Choice, OverBudget, Space
from shardwright.compiler.plan.search.exact import Table, minimise
from shardwright.compiler.plan.search.problem import CostCache, Problem
from shardwright.compiler.plan.search.search import search
from shardwright.compiler.plan.search.weights import Weights
from shardwright.compiler.plan.searches import MINDSPORE, SEARCHES
from shardwright.compiler.plan.spaces import space_of
from shardwright.compiler.rules.notation import Operand
from shardwright.training.zoo import GPT

# Nothing is hidden of communication: then the seconds of a step are the sum that a search minimises.
HARDWARE = replace(shipped("h100"), ranks_per_host=2, hides_gradients=0.0)
OBJECTIVE = Seconds(HARDWARE)
SEEDS = [*range(4), *slow(*range(4, 30))]


def graph_of(seed):
    """Layers, sums and transitions at random, in a graph that is no tree, with a batch and a loss."""
    draw = random.Random(seed)
    values, nodes = {}, []

    def value(name, kind, *shape):
        values[name] = Value(name, kind, name, shape, torch.float32, kind in ("parameter", "result"))
        return name

    def node(op, *operands, shape, args=()):
        name = f"n{len(nodes)}"
        given = tuple(Operand(i) for i in range(len(operands)))
        made = value(name, "result", *shape)
        nodes.append(Node(name, f"aten.{op}", (*given, *args), (), operands, (made,), "", "test.py:1"))
        return made

    rows = 2 ** draw.randint(6, 14)
    alive = [value("x", "input", rows, 2 ** draw.randint(8, 12))]
    for i in range(draw.randint(3, 6)):
        source = draw.choice(alive[-2:])
        width = values[source].shape[1]
        peers = [name for name in alive if values[name].shape[1] == width and name != source]
        kind = draw.choice(["linear", "linear", "relu", "sum"])
        if kind == "sum" and peers:
            alive.append(node("add.Tensor", source, draw.choice(peers), shape=(rows, width)))
        elif kind == "relu":
            alive.append(node("relu.default", source, shape=(rows, width)))
        else:
            out = draw.choice([width, 2 ** draw.randint(8, 14)])
            weight = value(f"w{i}", "parameter", out, width)
            alive.append(node("linear.default", source, weight, shape=(rows, out)))
    loss = node("sum.default", alive[-1], shape=())
    used = {name for n in nodes for name in n.operands} | {loss}
    for name in [name for name in alive if name not in used]:
        loss = node("add.Tensor", loss, node("sum.default", name, shape=()), shape=())
    return Capture(values, tuple(nodes), loss, (), None, {}, {}, {}, "")


def planned(capture, mesh, method, mode="auto"):
    return make_plan(capture, PlanRequest(mesh, mode, method, hardware=HARDWARE, axes=mesh))


def cost(plan):
    """What a plan costs by the objective of the exact search, whoever made it."""
    strategies = {name: (strategy,) for name, strategy in plan.strategies.items()}
    leaves = {name: (layout,) for name, layout in plan.leaves.items()}
    return search(Space(plan.graph, plan.mesh, strategies, leaves, plan.outputs), OBJECTIVE).cost


@pytest.fixture
def problems(monkeypatch):
    """The problems that the exact search solves."""
    seen = []
    least = Problem.minimum

    def minimum(problem, *more, **below):
        seen.append(problem)
        return least(problem, *more, **below)

    monkeypatch.setattr(Problem, "minimum", minimum)
    return seen


def tried(domains, tables):
    """The least of all assignments, added up as one array."""
    total = np.zeros(domains)
    for table in tables:
        order = np.argsort(table.scope)
        shape = [n if v in table.scope else 1 for v, n in enumerate(domains)]
        total = total + table.costs.transpose(order).reshape(shape)
    return total.min()


def programmed(domains, tables, held=None, limit=None):
    """The same minimum by HiGHS: a binary per value of a variable and per entry of a table, marginals tied together.

    Of the entries of each table, those of `held` together are no more than the limit.
    """
    first = np.cumsum([0, *domains])
    costs = [np.zeros(first[-1])]
    rows, columns, signs, bounds, at = [], [], [], [], int(first[-1])
    upper = [np.ones(first[-1])]
    weights = [np.zeros(first[-1])]

    def tie(row, entries, sign):
        rows.extend([row] * len(entries))
        columns.extend(entries)
        signs.extend([sign] * len(entries))

    for v, n in enumerate(domains):
        tie(len(bounds), range(first[v], first[v] + n), 1)
        bounds.append(1)
    for table in tables:
        ids = at + np.arange(table.costs.size).reshape(table.costs.shape)
        at += table.costs.size
        finite = np.isfinite(table.costs).ravel()
        costs.append(np.where(finite, table.costs.ravel(), 0))
        upper.append(finite.astype(float))
        sizes = held.get(id(table)) if held else None
        weights.append(np.zeros(table.costs.size) if sizes is None else sizes.ravel() / limit)
        for axis, v in enumerate(table.scope):
            for i in range(domains[v]):
                tie(len(bounds), ids.take(i, axis).ravel().tolist(), 1)
                tie(len(bounds), [first[v] + i], -1)
                bounds.append(0)
    matrix = coo_array((signs, (rows, columns)), (len(bounds), at)).tocsr()
    limits = [LinearConstraint(matrix, bounds, bounds)]
    if held:
        limits.append(LinearConstraint(np.concatenate(weights)[None], -np.inf, 1))
    scale = 1e3  # milliseconds, which HiGHS's tolerances fit
    found = milp(
        np.concatenate(costs) * scale, integrality=np.ones(at), bounds=(0, np.concatenate(upper)),
        constraints=limits, options={"mip_rel_gap": 0},
    )  # fmt: skip
    return found.fun / scale


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_is_the_least_of_all_assignments(seed, problems):
    plan = planned(graph_of(seed), Mesh.of(d=2), "exact")
    [problem] = problems
    if np.prod([float(n) for n in problem.domains]) < 1e6:
        best = tried(problem.domains, problem.tables)
    else:
        best = programmed(problem.domains, problem.tables)
    assert plan.cost == pytest.approx(best, rel=1e-9)
    assert plan.cost == plan.bound == pytest.approx(cost(plan), rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_is_never_worse_than_others(seed):
    capture, mesh = graph_of(100 + seed), Mesh.of(a=2, b=4)
    exact = planned(capture, mesh, "exact")
    others = [planned(capture, mesh, "recursive"), planned(capture, mesh, "propagation")]
    others.append(planned(capture, mesh, None, "data"))
    assert all(exact.cost <= cost(other) * (1 + 1e-12) for other in others)
    assert others[0].cost == pytest.approx(cost(others[0]), rel=1e-12)


def perceptron():
    batch = torch.randn(64, 256), torch.randint(0, 8, (64,))
    return nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 8)), batch


def transformer():
    return GPT(64, width=64, heads=4, layers=2, sequence_length=32, dropout=0.1), (torch.randint(0, 64, (16, 32)),) * 2


def classes(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


MODELS = [(*perceptron(), classes), (*transformer(), classes)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "batch", "loss"), MODELS, ids=["perceptron", "transformer"])
def test_models(model, batch, loss, problems):
    """On two devices against integer programming, on four against the other searches."""
    captured = captured_step(model, loss, batch, {})
    planned(captured, Mesh.of(d=2), "exact")
    rest = problems[0].domains, problems[0].tables  # without what stands beside it
    assert minimise(*rest)[0] == pytest.approx(programmed(*rest), rel=1e-9)
    for mesh in (Mesh.of(d=2), Mesh.of(a=2, b=2)):
        exact = planned(captured, mesh, "exact")
        for method in ("recursive", "propagation"):
            assert exact.cost <= cost(planned(captured, mesh, method)) * (1 + 1e-12)


@pytest.mark.slow
def test_what_stands_beside_is_decided_with_the_rest_where_that_is_cheaper():
    """The mask of a decoder, from a batch that is split: followed by it alone, the whole costs more."""
    capture = captured_step(Decoder(), decoder_loss, batch_of(8, 16), {})
    exact = planned(capture, Mesh.of(d=2), "exact")
    assert exact.cost == exact.bound
    for method in ("recursive", "propagation"):
        assert exact.cost <= cost(planned(capture, Mesh.of(d=2), method)) * (1 + 1e-12)


def within(capture, mesh, method, memory):
    request = PlanRequest(mesh, "auto", method, hardware=HARDWARE, axes=mesh, memory=memory)
    try:
        return make_plan(capture, request)
    except OverBudget:
        return None


@pytest.mark.parametrize("seed", [2, 5, *slow(*range(30, 42))])
def test_with_a_budget_the_gap_is_true_by_integer_programming(seed, problems):
    """Whether an operand is kept or gathered again is a variable of its own there."""
    capture, mesh = graph_of(seed), Mesh.of(d=2)
    free = planned(capture, mesh, "exact")
    problems.clear()
    limit = int(free.held.total * 0.75)
    plan = within(capture, mesh, "exact", limit)
    if plan is None:
        return
    domains, tables, held = list(problems[0].domains), list(problems[0].tables), {}
    weights = Weights(problems[0], ADAMW)
    for table in weights.tables:
        tables.append(Table(table.scope, np.zeros(table.costs.shape)))
        held[id(tables[-1])] = table.costs
    for table, again in ((of.kept, of.again) for of in weights.gathered):  # no block of these is computed again
        tables.append(Table((*table.scope, len(domains)), np.stack([np.zeros(table.costs.shape), again.costs], -1)))
        held[id(tables[-1])] = np.stack([table.costs, again.bytes], -1)
        domains.append(2)
    best = programmed(domains, tables, held, limit - weights.fixed_bytes)
    assert plan.held.total <= limit
    assert plan.bound <= best * (1 + 1e-6)
    assert best <= plan.cost * (1 + 1e-6)


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 20))])
def test_within_a_budget_exact_is_never_worse_than_others(seed):
    capture, mesh = graph_of(200 + seed), Mesh.of(a=2, b=2)
    memory = int(planned(capture, mesh, "exact").held.total * 0.7)
    exact, recursive = (within(capture, mesh, method, memory) for method in ("exact", "recursive"))
    if recursive is not None:
        assert recursive.held.total <= memory
        assert recursive.bound is None
        assert exact.cost <= recursive.cost * (1 + 1e-9)


def test_where_a_gap_is_left_the_best_of_what_is_known_is_taken():
    """A choice that splits nothing, with a bound that says nothing: each of the others is looked at."""
    capture, mesh = graph_of(3), Mesh.of(a=2, b=4)
    request = PlanRequest(mesh, "auto", "exact", hardware=HARDWARE, axes=mesh)
    row, graph = SEARCHES["exact"], RuledGraph.of(capture)
    space = space_of(graph, mesh, request, row)
    whole = {node.name: graph.rules[node.name].replicated() for node in capture.nodes}
    poor = Choice(whole, {name: of[0] for name, of in space.leaves.items()}, 1e9, 0.0)
    weighing = MeshSearch(mesh, request, space, OBJECTIVE)
    found = or_alternative(poor, row, weighing)
    assert found.bound == 0.0
    others = [planned(capture, mesh, "recursive"), planned(capture, mesh, "propagation")]
    others += [planned(capture, mesh, None, "data"), *(make(graph, request) for make in BASELINES.values())]
    assert all(found.cost <= cost(other) * (1 + 1e-12) for other in others)
    exact = planned(capture, mesh, "exact")
    assert or_alternative(replace(poor, cost=1.0, bound=1.0), row, weighing).strategies == whole
    assert exact.cost <= found.cost


def test_however_small_the_gap_is_the_others_are_looked_at():
    """On three axes, too: a choice that costs a little more than what the recursive search finds."""
    capture, mesh = graph_of(3), Mesh.of(a=2, b=2, c=2)
    request = PlanRequest(mesh, "auto", "exact", hardware=HARDWARE, axes=mesh)
    row, graph = SEARCHES["exact"], RuledGraph.of(capture)
    space = space_of(graph, mesh, request, row)
    other = planned(capture, mesh, "recursive")
    near = Choice(other.strategies, other.leaves, other.cost * (1 + 1e-6), other.cost * (1 - 1e-6))
    assert or_alternative(near, row, MeshSearch(mesh, request, space, OBJECTIVE)).cost <= other.cost * (1 + 1e-12)


def test_the_others_are_looked_at_once_and_before_choices_are_divided(monkeypatch):
    """So that what they find is to be beaten there: here nothing can be, and no division is made."""
    capture, mesh = graph_of(200), Mesh.of(a=2, b=2)
    memory, asked = int(planned(capture, mesh, "exact").held.total * 0.7), []
    without = within(capture, mesh, "exact", memory)

    def known(choice, row, weighing):
        asked.append(choice)
        return replace(choice, cost=choice.bound)

    monkeypatch.setattr(mesh_search, "or_alternative", known)
    monkeypatch.setattr(Branching, "halves", None)
    found = within(capture, mesh, "exact", memory)
    assert len(asked) == 1
    assert found.cost == found.bound <= without.cost


@pytest.mark.parametrize("seed", [200, *slow(201, 206, 213, 215)])
def test_the_last_axis_is_searched_in_what_all_choices_have_built(seed):
    """Within a budget, at a price of a byte: what is found costs what it costs without."""
    capture, mesh = graph_of(seed), Mesh.of(a=2, b=2)
    request = PlanRequest(mesh, "auto", "exact", hardware=HARDWARE, axes=mesh)
    free = make_plan(capture, request)
    price = free.cost / free.held.total
    weighing = MeshSearch(mesh, replace(request, memory=int(free.held.total * 0.8)), space(capture, request), OBJECTIVE)
    budget = replace(weighing.budget(), price=price)
    found = [
        axis_by_axis.recursive(weighing.space, OBJECTIVE, budget, known=weighing.known, built=built)
        for built in (weighing.built, None)
    ]
    assert found[0].cost == pytest.approx(found[1].cost, rel=1e-9)
    assert weighing.plan(found[0]).held.total <= weighing.request.memory


def space(capture, request):
    return space_of(RuledGraph.of(capture), request.axes, request, SEARCHES["exact"])


def test_some_values_of_a_problem_cost_as_much_as_a_problem_of_these_alone():
    """Those that consumers may share, too, of which fewer are left where fewer are demanded."""
    capture, mesh = graph_of(202), Mesh.of(a=2, b=2)
    request = PlanRequest(mesh, "auto", "exact", hardware=HARDWARE, axes=mesh)
    whole, names = space(capture, request), {node.name for node in capture.nodes}
    problem, draw = Problem(whole, CostCache(whole.graph, OBJECTIVE, mesh), names), np.random.default_rng(0)
    assert problem.shared_by_two
    for _ in range(6):
        left = {n: np.flatnonzero(draw.random(len(of)) < 0.6) for n, of in whole.strategies.items()}
        left = {n: of if len(of) else np.array([0]) for n, of in left.items()}
        fewer = {n: tuple(whole.strategies[n][i] for i in of) for n, of in left.items()}
        alone = Problem(replace(whole, strategies=fewer), CostCache(whole.graph, OBJECTIVE, mesh), names)
        found = problem.among(left).minimum()
        assert found.cost == pytest.approx(alone.minimum().cost, rel=1e-12)
        assert found.cost == pytest.approx(problem.cost_of(found.picked), rel=1e-12)
        assert all(problem.space.strategies[n][found.picked[v]] in fewer[n] for n, v in problem.node_variables.items())


def test_searches_share_what_they_work_out(monkeypatch):
    """Of one plan: no operator is priced twice under a strategy, and what is found is what each finds by itself."""
    capture, mesh = graph_of(201), Mesh.of(a=2, b=2)
    memory, priced = int(planned(capture, mesh, "exact").held.total * 0.7), []
    operator = Seconds.operator

    def counted(self, graph, node, strategy, on):
        priced.append((graph.alike[node.name], strategy, on))
        return operator(self, graph, node, strategy, on)

    monkeypatch.setattr(Seconds, "operator", counted)
    shared = within(capture, mesh, "exact", memory)
    assert shared.gap > 0  # so that the others were asked
    assert len(priced) == len(set(priced))
    count = len(priced)
    nothing_known = property(lambda of: CostCache(of.space.graph, OBJECTIVE, of.mesh), lambda of, known: None)
    monkeypatch.setattr(MeshSearch, "known", nothing_known, raising=False)
    alone = within(capture, mesh, "exact", memory)
    assert (alone.strategies, alone.leaves, alone.again) == (shared.strategies, shared.leaves, shared.again)
    assert (alone.cost, alone.bound) == (shared.cost, shared.bound)
    assert len(priced) > 2 * count


def test_recursive_decides_axis_by_axis(monkeypatch):
    """Each search is over one axis more, and what was decided stays."""
    seen = []
    monkeypatch.setattr(axis_by_axis, "search", lambda space, *by: seen.append(space) or search(space, *by))
    plan = planned(graph_of(0), Mesh.of(a=2, b=2, c=2), "recursive")
    assert plan.search == "recursive"
    assert plan.bound is None
    used = [{axis for of in space.strategies.values() for s in of for axis in s.used} for space in seen]
    assert used == [{"a"}, {"a", "b"}, {"a", "b", "c"}]
    for space in seen:
        assert max(map(len, space.strategies.values())) <= 5
    assert all(plan.strategies[name] in of for name, of in seen[-1].strategies.items())


def test_the_names_of_mindspore_are_ours():
    capture = graph_of(1)
    for theirs, ours in MINDSPORE.items():
        plan = planned(capture, Mesh.of(d=2), theirs)
        assert (plan.search, plan.cost) == (ours, planned(capture, Mesh.of(d=2), ours).cost)
