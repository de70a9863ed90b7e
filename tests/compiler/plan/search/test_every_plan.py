"""What users get against every plan there is: over all meshes, with pins, parts of parameters, and work done again."""

import contextlib
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan import make, meshes
from shardwright.compiler.plan.pricing.cost import PerDirection, Seconds
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.pricing.links import Curve, Segment
from shardwright.compiler.plan.pricing.memory import repeatable
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.search.choices import OverBudget
from shardwright.compiler.plan.searches import SEARCHES
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.errors import PlanError
from whole import true_cost

# Nothing is hidden of communication: then the seconds of a step are the sum that a search minimises.
HARDWARE = replace(shipped("h100"), ranks_per_host=2, hides_gradients=0.0)
OBJECTIVE = Seconds(HARDWARE)


class Block(nn.Module):
    """Keeps twice what it is given."""

    def __init__(self, width):
        super().__init__()
        self.product = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.product(torch.tanh(x).sin())


def captured(draw, pins):
    rows, width = (2 ** draw.randint(4, 12) for _ in range(2))
    with torch.device("meta"):
        model = nn.Sequential(Block(width), Block(width))
        return captured_step(model, lambda m, x: m(x).sum(), torch.zeros(rows, width), pins)


def some(of, most, draw):
    """Two of the most choices that anything has, the first of them among these, and one of fewer."""
    return (of[0], draw.choice(of[1:])) if len(of) == most > 1 else (draw.choice(of),)


@pytest.fixture
def spaces(monkeypatch):
    """What is searched, by mesh: of all strategies and layouts two."""
    found, space_of = {}, meshes.space_of

    def narrowed(graph, mesh, request, row):
        space, alike = space_of(graph, mesh, request, row), {}
        for kind in (space.strategies, space.leaves):
            for of in kind.values():
                alike.setdefault(id(of), some(of, max(map(len, kind.values())), random.Random(f"{mesh} {len(of)}")))
        strategies = {name: alike[id(of)] for name, of in space.strategies.items()}
        space = replace(space, strategies=strategies, leaves={n: alike[id(of)] for n, of in space.leaves.items()})
        if row.keeps is SEARCHES["exact"].keeps and not row.by_axes:
            found[mesh] = space
        return space

    monkeypatch.setattr(meshes, "space_of", narrowed)
    return found


def every_plan(space, plan):
    """All plans on a mesh that can be run: with each set of values gathered again, and of blocks computed again."""
    for picked in itertools.product(*space.strategies.values(), *space.leaves.values()):
        strategies, leaves = (
            dict(zip(names, of, strict=True))
            for names, of in (
                (space.strategies, picked[: len(space.strategies)]),
                (space.leaves, picked[len(space.strategies) :]),
            )
        )
        one = replace(plan, mesh=space.mesh, strategies=strategies, leaves=leaves, outputs=space.outputs)
        with contextlib.suppress(PlanError):  # no collectives lead from one layout to another
            values = (t.value for t in one.transfers if repeatable(plan.capture.values[t.value], t.steps))
            for again, recomputed in itertools.product(*map(sets, (values, (block.name for block in space.blocks)))):
                yield replace(one, again=again).computing_again(recomputed)


def sets(names):
    each = list(dict.fromkeys(names))
    return [frozenset(of) for count in range(len(each) + 1) for of in itertools.combinations(each, count)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_no_plan_costs_less_than_what_is_found_or_than_its_bound(seed, spaces):
    """Every second one with a pin. With a budget the best plan is between the bound and what is found."""
    draw = random.Random(seed)
    capture = captured(draw, {"1.product": ((2, 1), (1, 1))} if seed % 2 else {})
    request = PlanRequest(Mesh.of(d=4 if seed < 12 else 6), hardware=HARDWARE)
    free = make.make_plan(capture, request)
    every = [plan for space in spaces.values() for plan in every_plan(space, free)]
    least = min(true_cost(plan, OBJECTIVE) for plan in every)
    assert free.cost == pytest.approx(least, rel=1e-9)
    assert free.bound == pytest.approx(least, rel=1e-9)
    make.make_plan(capture, replace(request, memory=1 << 50))  # with blocks in the spaces
    every = [(of.held.total, true_cost(of, OBJECTIVE)) for space in spaces.values() for of in every_plan(space, free)]
    held = sorted(size for size, _ in every)
    for share in (0.001, 0.02, 0.2):
        memory = held[int(share * len(held))]
        optimum = min((cost for size, cost in every if size <= memory), default=math.inf)
        try:
            plan = make.make_plan(capture, replace(request, memory=memory))
        except OverBudget:
            continue
        assert plan.held.total <= memory
        assert plan.cost == pytest.approx(true_cost(plan, OBJECTIVE), rel=1e-9)
        assert plan.bound <= optimum * (1 + 1e-9)
        assert plan.bound <= plan.cost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "times", "hides"), [(1, 0.03, 1.0), (0, 1.0, 0.5), *((seed, 0.1, 0.9) for seed in range(2, 8))]
)
def test_no_plan_takes_less_than_the_bound_where_communication_is_hidden(seed, times, hides, spaces):
    """With links that take so many times as long: the sums of a search are below what a step takes, of every plan."""
    capture = captured(random.Random(seed), {})
    links = tuple(
        replace(link, curve=Curve(tuple(Segment(s.from_bytes, s.latency_s * times, s.bandwidth / times)
                                        for s in link.curve.segments)))
        for link in HARDWARE.links
    )  # fmt: skip
    hardware = replace(HARDWARE, hides_gradients=hides, links=links, launch_s=HARDWARE.launch_s * times)
    seconds = Seconds(hardware)
    found = make.make_plan(capture, PlanRequest(Mesh.of(d=4), hardware=hardware))
    make.make_plan(capture, PlanRequest(Mesh.of(d=4), hardware=hardware, memory=1 << 50))  # with blocks in the spaces
    least = math.inf
    for plan in (plan for space in spaces.values() for plan in every_plan(space, found)):
        prices = Prices(plan, hardware)
        least = min(least, prices.step_s)
        for weights in itertools.starmap(PerDirection, ((0.0, 0.0), (0.4, 1.0), (1.0, 0.4), (1.0, 1.0))):
            counted = true_cost(plan, seconds.hiding(weights)) - hides * seconds.before_first(plan.graph)
            assert counted <= prices.step_s * (1 + 1e-9)
            all_s, sums = prices.step_s + prices.hidden_s, zip(prices.overlapping_s, prices.beside_s, strict=True)
            hidden = sum(hides * (w * p + (1 - w) * c) for w, (p, c) in zip(weights, sums, strict=True))
            summed_s = true_cost(plan, seconds.hiding(weights))
            assert summed_s <= (all_s - hidden) * (1 + 1e-9)
            # What is repeated may count as beside the forward, too.
            if weights.forward == weights.backward or not (plan.recomputed or plan.again):
                assert summed_s == pytest.approx(all_s - hidden)
    assert found.bound <= least * (1 + 1e-9)
    assert least <= found.cost * (1 + 1e-9)
    assert found.cost == pytest.approx(Prices(found, hardware).step_s)
