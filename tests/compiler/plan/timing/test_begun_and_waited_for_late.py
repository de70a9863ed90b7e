"""What programs begin beside computing, and wait for late: prices, programs and bounds say the same of it."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.compiler.capture.ir import Value
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.cost import PerDirection, Seconds
from shardwright.compiler.plan.pricing.graph import Target
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.pricing.joined import EnteringParameter, in_buckets
from shardwright.compiler.plan.pricing.pairs import Pairs, Ways
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.errors import PlanError

H100 = shipped("h100")
MIB = 2**20


def sizes(entering, limit_bytes, first_bytes):
    """The bytes of each bucket, in the order in which they begin."""
    groups = in_buckets(entering, limit_bytes, first_bytes)
    assert sorted(number for members in groups for number in members) == [*range(len(entering))]
    return [sum(entering[number].bytes for number in members) for members in groups]


def test_the_last_buckets_are_ever_smaller():
    """The backward ends with them: nothing is left to compute beside the very last."""
    entering = [EnteringParameter(f"p{i}", MIB, "alike") for i in range(100)]
    assert sizes(entering, 32 * MIB, MIB) == [of * MIB for of in (1, 32, 32, 17, 9, 4, 2, 1, 1, 1)]
    assert sizes(entering, 32 * MIB, 32 * MIB) == [of * MIB for of in (32, 32, 32, 4)]  # a backend that wants few
    assert sizes(entering[:2], 32 * MIB, MIB) == [MIB, MIB]
    large = [replace(one, bytes=16 * MIB) if i % 2 else one for i, one in enumerate(entering)]  # reduced alone
    assert max(of for of in sizes(large, 32 * MIB, MIB) if of != 16 * MIB) == 24 * MIB


def captured(count=8, width=1024, rows=1 << 18):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).bfloat16()
        return captured_step(model, lambda m, x: m(x).sum(), torch.ones(rows, width, dtype=torch.bfloat16), {})


def stored(layout, mesh, count=8):
    """The prices of a plan whose parameters are stored in a layout, and gathered for operators that split the rows."""
    plan = make_plan(captured(count), PlanRequest(mesh, "data", hardware=H100, axes=mesh))
    return Prices(replace(plan, leaves={**plan.leaves, **dict.fromkeys(parameters(plan), layout)}), H100)


def parameters(plan):
    return {value.name for value in plan.capture.of_kind("parameter")}


@pytest.mark.parametrize(
    "cut", [{0: ("a",)}, {0: ("a", "b")}, {0: ("a",), 1: ("b",)}], ids=["and replicated", "fully", "in both dims"]
)
def test_what_a_program_begins_early_is_what_the_time_line_hides(cut):
    """Of each parameter the first all-gather, also where its gradient is summed over replicas behind that."""
    mesh = Mesh.of(a=2, b=4)
    prices = stored(Layout.split(2, cut), mesh)
    moved = [moved for moved in prices.transfers if moved.value in parameters(prices.plan)]
    assert all(0 < of.early_forward_s <= of.forward_s and 0 < of.early_gradient_s <= of.gradient_s for of in moved)
    assert all((of.early_forward_s < of.forward_s) == (len(cut) == 2) for of in moved)
    kinds = [instruction.kind for instruction in lower(prices.plan, 0, overlap=True).instructions]
    assert kinds.count("begin") == len(moved) - 1  # nothing is computed before the first
    early_s = [of.early_forward_s + of.early_gradient_s for of in moved]
    exposed_s = sum(of.seconds for of in moved) - sum(early_s)
    assert prices.communicating_s - prices.time_line.together_s >= exposed_s
    # All but the first gather and the last gradients, beside which nothing is computed.
    assert prices.time_line.together_s == pytest.approx(sum(early_s[1:]), rel=0.02)
    assert sum(prices.overlapping_s) == pytest.approx(sum(early_s[1:]))  # the first is read first


@pytest.mark.parametrize("seed", range(3))
def test_tables_price_what_overlaps_as_single_transfers_do(seed):
    """For layouts and targets that take one step or several, some of which overlap."""
    draw, mesh = random.Random(seed), Mesh.of(a=2, b=4, c=8)
    objective = Seconds(replace(H100, ranks_per_host=8)).hiding(PerDirection(draw.random(), draw.random()))
    value = Value("w", "parameter", "w", (512, 1024), torch.bfloat16, needs_gradient=True)

    def layout():
        cut: dict[int, tuple[str, ...]] = {}
        for axis in mesh.names:
            if (dim := draw.choice([None, 0, 1])) is not None:
                cut[dim] = (*cut.get(dim, ()), axis)
        return Layout.split(2, cut)

    layouts, targets = [layout() for _ in range(12)], []
    while len(targets) < 12:
        to = layout()
        free = [axis for axis in mesh.names if axis not in to.split_axes]
        targets.append(Target(to, tuple(axis for axis in free if draw.random() < 0.5)))
    ways = Ways(mesh)
    costs = Pairs(objective, ways).costs(value, layouts, targets)
    several = 0
    for i, source in enumerate(layouts):
        for j, target in enumerate(targets):
            try:
                steps = ways.steps(value.shape, source, target)
            except PlanError:
                continue
            several += len(steps) > 1
            assert costs[i, j] == pytest.approx(objective.transfer(value, steps, mesh), rel=1e-12)
    assert several > 20
