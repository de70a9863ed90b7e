"""What is hidden of reducing gradients is part of what a search looks for: what is found, and the bound."""

import random
from dataclasses import replace

import pytest
import torch

from rows import slow
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.hidden import CLOSE_TO_BOUND, highest, nearest
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.cost import PerDirection
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.searches import SEARCHES
from shardwright.compiler.plan.spaces import space_of
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.errors import PlanError

# Gradients of a quarter of a bucket and more begin to be reduced when they are there.
HIDING = replace(shipped("cpu_host"), hides_gradients=0.9, backend="shm")


def captured(width=1100, rows=600):
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4)))
        return captured_step(model, lambda m, x: m(x).sum(), torch.ones(rows, width), {})


def slower(hardware, times):
    """The same with links that take so many times as long."""
    links = tuple(
        replace(link, points=(), curve=replace(link.curve, segments=tuple(
            replace(s, latency_s=s.latency_s * times, bandwidth=s.bandwidth / times) for s in link.curve.segments)))
        for link in hardware.links
    )  # fmt: skip
    return replace(hardware, links=links)


@pytest.mark.parametrize("times", [0.3, 6.0, *slow(2.0, 40.0)])
def test_no_plan_takes_less_than_the_bound_and_none_that_was_found_before_takes_less(times):
    hardware, capture = slower(HIDING, times), captured()
    request = PlanRequest(Mesh.of(d=2), "auto", hardware=hardware)
    found = make_plan(capture, request)
    assert found.bound <= found.cost == pytest.approx(Prices(found, hardware).step_s)
    plain = make_plan(capture, replace(request, hardware=replace(hardware, hides_gradients=0.0)))
    data = make_plan(capture, replace(request, mode="data"))
    others_s = min(Prices(plan, hardware).step_s for plan in (plain, data))
    assert found.cost <= max(others_s * (1 + 1e-9), found.bound * (1 + CLOSE_TO_BOUND))
    graph = RuledGraph.of(capture)
    space, drawn = space_of(graph, found.mesh, request, SEARCHES["exact"]), random.Random(0)
    for _ in range(150):
        decided = {name: drawn.choice(of) for name, of in space.strategies.items()}
        leaves = {name: drawn.choice(of) for name, of in space.leaves.items()}
        try:
            taken_s = Prices(replace(found, strategies=decided, leaves=leaves), hardware).step_s
        except PlanError:  # impossible
            continue
        assert found.bound <= taken_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_next_weights_are_where_the_planes_allow_enough(seed):
    """Against all weights of a grid: the top, and the nearest weights at the level between it and the bound."""
    draw = random.Random(seed)
    planes = [(draw.uniform(1e-4, 3e-4), draw.uniform(-1e-4, 1e-4), draw.uniform(-1e-4, 1e-4)) for _ in range(5)]
    grid = [PerDirection(i / 100, j / 100) for i in range(101) for j in range(101)]

    def least(at):
        return min(height + at.forward * forward + at.backward * backward for height, forward, backward in planes)

    top, at = highest(planes)
    assert top == pytest.approx(least(at), rel=1e-6)
    assert top >= max(map(least, grid)) - 1e-12
    level, start = 0.5 * (top + least(PerDirection(1.0, 1.0))), PerDirection(1.0, 1.0)
    near = nearest(planes, level, start)
    assert least(near) >= level - 1e-10
    distance = min(2 - of.forward - of.backward for of in grid if least(of) >= level)
    assert 2 - near.forward - near.backward <= distance + 1e-6


def test_the_search_splits_the_batch_where_the_gradients_are_hidden():
    """As if nothing were hidden, another plan seems to take less."""
    capture = captured()
    moved = {}
    for hides in (0.0, 0.9):
        request = PlanRequest(Mesh.of(d=2), "auto", hardware=replace(slower(HIDING, 6.0), hides_gradients=hides))
        plan = make_plan(capture, request)
        moved[hides] = sum(moved.in_buckets for moved in Prices(plan, request.hardware).moved)
    assert moved[0.9] > moved[0.0]
