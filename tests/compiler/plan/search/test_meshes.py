"""Where the mesh is not given, those that the links distinguish are searched, and the plan says which."""

import pickle
from dataclasses import replace

import pytest
import torch

from rows import slow
from shardwright.compiler.capture.ir import Capture, Node, Pin, Value
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan import hidden, mesh_search
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.pricing.links import cuts
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search import search
from shardwright.compiler.plan.search.choices import OverBudget
from shardwright.compiler.plan.search.exact import TooWide
from shardwright.compiler.rules.notation import Operand
from shardwright.errors import PlanError


def sizes(devices, per_host, most):
    return [tuple(axis.size for axis in mesh.axes) for mesh in cuts(Mesh.of(d=devices), per_host, most)]


def test_every_way_that_links_distinguish():
    assert sizes(64, None, 2) == [(8, 8), (4, 16), (2, 32)]
    assert sizes(64, 8, 2) == [(8, 8)]
    assert sizes(64, 8, 3) == [(2, 4, 8), (8, 2, 4)]
    assert sizes(1024, 8, 3) == [(8, 16, 8), (4, 32, 8), (2, 64, 8), (128, 2, 4)]
    assert sizes(16, 1, 2) == [(4, 4), (2, 8)]  # each on a host of its own
    assert sizes(6, 4, 2) == [(2, 3)]
    assert sizes(64, 8, 1) == [(64,)]  # which is inside of no host
    assert [str(mesh) for mesh in cuts(Mesh.of(dp=4, tp=16), 8, 2)] == ["dp=4 tp=16"]


def graph(pin=None, rows=48, inner=8192, columns=8192):
    """Wide layers over few rows, of which 48 do not divide by 32."""
    facts = {"x": (rows, inner), "w": (columns, inner), "y": (rows, columns), "loss": ()}
    kinds = {"x": "input", "w": "parameter"}
    values = {n: Value(n, kinds.get(n, "result"), n, s, torch.float32, n != "x") for n, s in facts.items()}
    linear = Node("linear", "aten.linear.default", (Operand(0), Operand(1)), (), ("x", "w"), ("y",), "", "a.py:1", pin)
    total = Node("sum", "aten.sum.default", (Operand(0),), (), ("y",), ("loss",), "", "a.py:2")
    return Capture(values, (linear, total), "loss", (), None, {}, {}, {}, "")


def planned(devices, capture=None, per_host=None, **options):
    hardware = replace(shipped("h100"), ranks_per_host=per_host, hides_gradients=0.0)
    return make_plan(capture or graph(), PlanRequest(Mesh.of(d=devices), hardware=hardware, **options))


def test_what_a_search_has_told_apart_by_identities_stays_in_its_process():
    plan = planned(8)
    assert plan.graph.known
    sent = pickle.loads(pickle.dumps(plan.graph))
    assert not sent.known
    assert sent == plan.graph


def test_the_cheapest_mesh_is_taken_and_all_are_told():
    plan = planned(64)
    each = {mesh: planned(64, axes=mesh) for mesh in cuts(Mesh.of(d=64), None, 2)}
    assert plan.cost == min(of.cost for of in each.values())
    assert plan.mesh == min(each, key=lambda mesh: each[mesh].cost)
    assert [line.partition(" costs")[0] for line in plan.considered[:3]] == [str(mesh) for mesh in each]
    finer = [f"{mesh} not searched: its axes have one link, and cut no more" for mesh in cuts(Mesh.of(d=64), None, 3)]
    assert [line.partition(" than")[0] for line in plan.considered[3:]] == finer
    assert f"meshes considered:\n  {plan.considered[0]}" in str(plan)
    assert Plan.from_json(plan.to_json(), plan.graph) == plan


def test_a_mesh_on_which_nothing_can_be_cheaper_is_not_searched(monkeypatch):
    monkeypatch.setattr(mesh_search, "least_cost", lambda space, objective: 1.0)
    plan = planned(64)
    told = [" not searched: nothing on it costs less than 1000 ms" in line for line in plan.considered]
    assert told == [0, 1, 1, 0, 0, 0]


def whole_factors(size, most):
    """All ways to write a size as a product of at most so many factors, in any order."""
    if most == 0 or size == 1:
        return [()] if size == 1 else []
    return [(of, *more) for of in range(2, size + 1) if size % of == 0 for more in whole_factors(size // of, most - 1)]


@pytest.mark.parametrize(("devices", "per_host"), [(12, 2), *slow((8, 4), (12, 6))])
def test_no_mesh_of_three_axes_has_a_cheaper_plan(devices, per_host):
    """By all of them, one after the other."""
    plan = planned(devices, per_host=per_host)
    meshes = [Mesh.of(**{f"a{i}": of for i, of in enumerate(sizes)}) for sizes in whole_factors(devices, 3)]
    every = [planned(devices, per_host=per_host, axes=mesh) for mesh in meshes]
    assert plan.cost == pytest.approx(min(of.cost for of in every), rel=1e-9)
    assert plan.bound == pytest.approx(plan.cost, rel=1e-9)
    again = make_plan(plan.capture, PlanRequest(plan.mesh, hardware=plan.hardware))
    assert again.cost == pytest.approx(plan.cost, rel=1e-9)


def test_a_finer_mesh_is_searched_where_it_cuts_what_coarser_ones_do_not():
    """Of 30 devices on one host all have work where 2 share the rows, 5 the common dim, and 3 the columns."""
    plan = planned(30, graph(rows=2 * 7**4, inner=5 * 7**4, columns=3 * 7**4), inputs="whole")
    assert str(plan.mesh) == "d.0=2 d.1=3 d.2=5"
    assert plan.strategies["linear"].used == {"d.0", "d.1", "d.2"}


def test_within_a_budget_finer_meshes_are_to_beat_the_plan_that_is_there():
    [two], [three] = (cuts(Mesh.of(d=8), 4, most) for most in (2, 3))
    tall = graph(rows=1 << 16, inner=4096, columns=4096)
    memory = planned(8, tall, per_host=4).held.total - 10**6
    plan, coarse = (planned(8, tall, per_host=4, memory=memory, axes=axes) for axes in (None, two))
    assert plan.held.total <= memory
    assert plan.bound <= plan.cost <= coarse.cost
    assert [line.startswith(f"{mesh} ") for line, mesh in zip(plan.considered, (two, three), strict=True)] == [True] * 2


@pytest.mark.parametrize("share", [0.5, 0.9, 3.0])
def test_a_mesh_on_which_nothing_fits_counts_with_what_its_search_has_proven(monkeypatch, share):
    """Nothing that fits on it costs less than so much of the plan on the other mesh."""
    one, searched = cuts(Mesh.of(d=64), None, 2)[1], mesh_search.search
    cost = planned(64, axes=one).cost

    def search(space, *more):
        if space.mesh != one:
            raise OverBudget("nothing fits", 5000, share * cost)
        return searched(space, *more)

    monkeypatch.setattr(mesh_search, "search", search)
    monkeypatch.setattr(mesh_search, "best_baseline", lambda *given: (_ for _ in ()).throw(given[-1]))
    plan = planned(64, memory=1 << 50)
    assert (plan.mesh, plan.cost) == (one, cost)
    assert plan.bound == pytest.approx(min(share, 1.0) * cost)
    assert plan.considered[0] == "d.0=8 d.1=8 has no plan that fits: the one that holds least holds 5.0 kB"


def test_fewer_axes_are_told(monkeypatch):
    """And a mesh that was too wide beside another that was not."""
    searched = mesh_search.search

    def search(space, *more):
        if [axis.size for axis in space.mesh.axes] != [4, 16]:
            raise TooWide("the search would need a table of 9 entries")
        return searched(space, *more)

    monkeypatch.setattr(mesh_search, "search", search)
    plan = planned(64)
    assert str(plan.mesh) == "d.0=4 d.1=16"
    assert plan.considered[0] == "d.0=8 d.1=8 has no plan: the search would need a table of 9 entries"
    with pytest.raises(PlanError, match=r"no plan was found on the mesh d.0=32: .* try fewer axes"):
        planned(32)


def test_pins_have_the_axes_that_they_need():
    """2 x 32 and 4 x 16 slices take other meshes."""
    for slices, mesh in (((2, 32), "d.0=2 d.1=32"), ((4, 16), "d.0=4 d.1=16")):
        assert str(planned(64, graph(Pin((slices, None), (None,), "a.py:1"))).mesh) == mesh


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_finer_mesh_that_promises_no_more_than_the_coarser_one_is_searched_no_further(monkeypatch, share):
    """Its bound counts: of all shares, the bound of the plan is one for what is found where every mesh is searched."""
    tall = graph(rows=1 << 16, inner=4096, columns=4096)
    hardware = replace(shipped("h100"), ranks_per_host=4)
    request = PlanRequest(Mesh.of(d=8), hardware=hardware)
    request = replace(request, memory=make_plan(tall, request).held.total - 10**6)
    every = make_plan(tall, replace(request, axes=Mesh.of(a=2, b=2, c=2)))
    monkeypatch.setattr(hidden, "PROMISE", share)
    plan = make_plan(tall, request)
    assert plan.held.total <= request.memory
    assert plan.bound <= min(plan.cost, every.cost)
    assert " not searched further: nothing on it costs less than" in plan.considered[1]


def test_where_the_budget_binds_nothing_finer_meshes_are_searched_without_a_price(monkeypatch):
    prices, found = [], search._AtPrice.found
    monkeypatch.setattr(search._AtPrice, "found", lambda self, below: prices.append(self._price) or found(self, below))
    request = PlanRequest(Mesh.of(d=8), hardware=replace(shipped("h100"), ranks_per_host=4))
    tall = graph(rows=1 << 16, inner=4096, columns=4096)
    free = make_plan(tall, request)
    within = make_plan(tall, replace(request, memory=2 * free.held.total))
    assert not prices
    assert (within.cost, within.bound) == (free.cost, free.bound)
    assert len(within.considered) == 2
