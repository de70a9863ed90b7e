"""Pins: the strategies that fulfil them, what is said where none does, and what they leave to the search."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from rows import slow
from shardwright.compiler.capture.ir import Node, Pin
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import Seconds
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.spaces import pinned_strategies
from shardwright.compiler.rules.notation import parse
from shardwright.errors import PlanError, StrategyError
from whole import true_cost

EIGHT = Mesh.of(d=8).atomic()
RULE = parse("m k+, k+ n -> m n").bind([(16, 32), (32, 16)], [(16, 16)])


def matmul(operands, results=(None,)):
    pin = Pin(operands, results, "model.py:7")
    return Node("matmul", "aten.matmul.default", (), (), ("x", "w"), ("y",), "layers.0", "model.py:9 in forward", pin)


def test_factors_take_the_leading_axes():
    [strategy] = pinned_strategies(matmul(((2, 4), (4, 1))), RULE, EIGHT)
    assert strategy.axes == (("d.0",), ("d.1", "d.2"), ())
    [strategy] = pinned_strategies(matmul(((4, 2), (2, 1))), RULE, EIGHT)
    assert strategy.axes == (("d.0", "d.1"), ("d.2",), ())


def test_devices_may_stay_idle():
    [strategy] = pinned_strategies(matmul(((2, 1), (1, 1))), RULE, EIGHT)
    assert strategy.used == {"d.0"}


def test_axes_of_other_sizes_are_found():
    six = Mesh.of(a=2, b=3)
    [strategy] = pinned_strategies(matmul(((1, 2), (2, 1))), RULE, six)
    assert strategy.axes == ((), ("a",), ())
    rule = parse("m k+, k+ n -> m n").bind([(6, 6), (6, 6)], [(6, 6)])
    [strategy] = pinned_strategies(matmul(((3, 2), (2, 1))), rule, six)
    assert strategy.axes == (("b",), ("a",), ())


class Attending(nn.Module):
    def __init__(self, pins):
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.attend = sw.shard(functools.partial(F.scaled_dot_product_attention, is_causal=True), pins)

    def forward(self, x):
        heads = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.attend(*heads.unbind(0)).square().sum()


def attention_plan(*slices):
    model = Attending(tuple(slices))
    captured = captured_step(model, lambda m, b: m(b), torch.randn(1, 8, 8), {})
    plan = make_plan(captured, PlanRequest(Mesh.of(a=2, b=2), "semi-auto"))
    [node] = [node for node in captured.nodes if "scaled_dot_product" in node.op]
    factors = zip(plan.graph.rules[node.name].factors, plan.strategies[node.name].axes, strict=True)
    return plan, node, {factor.name: axes for factor, axes in factors if axes}


@pytest.mark.parametrize(
    ("keys", "axes"),
    [(2, {"l": ("a", "b"), "s": ("a",)}), *slow((4, {"l": ("a", "b"), "s": ("a", "b")}), (1, {"l": ("a", "b")}))],
)
def test_keys_take_the_axes_of_the_queries(keys, axes):
    assert attention_plan((1, 1, 4, 1), *[(1, 1, keys, 1)] * 2)[2] == axes


def test_keys_are_not_split_without_the_queries():
    with pytest.raises(StrategyError, match=r"4 slices cannot be made of the axes .* that may be used for them \(2\)"):
        attention_plan((1, 1, 2, 1), (1, 1, 4, 1), (1, 1, 4, 1))
    plan, node, _ = attention_plan(*[(1, 1, 4, 1)] * 3)
    strategy = plan.graph.rules[node.name].strategy({"s": ["a", "b"]})
    at = [factor.name for factor in plan.graph.rules[node.name].factors].index("l")
    edited = replace(strategy, axes=tuple(("b",) if i == at else axes for i, axes in enumerate(strategy.axes)))
    with pytest.raises(PlanError, match=r"splits s of .* over a, b, and l, which it is split along with, over b;"):
        Plan.from_json(replace(plan, strategies={**plan.strategies, node.name: edited}).to_json(), plan.graph)


def test_an_open_operand_leaves_a_choice():
    found = pinned_strategies(matmul(((2, 1), None)), RULE, EIGHT)
    assert len(found) > 1
    assert {s.axes[:2] for s in found} == {(("d.0",), ())}


def test_a_result_can_be_pinned():
    found = pinned_strategies(matmul((None, None), ((8, 1),)), RULE, EIGHT)
    assert [s.axes for s in found] == [(("d.0", "d.1", "d.2"), (), ())]


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (((2, 4), (2, 1)), "factor k is cut into 4 in one tensor and 2 in another"),
        (((4, 4), (4, 1)), "needs 4 x 4 x 1 = 16 devices, there are 8"),
        (((3, 1), (1, 1)), "16 rows does not divide into 3 slices"),
        (((2, 4, 1), (4, 1)), r"\(2, 4, 1\) has 3 numbers for a tensor of 2 dims"),
    ],
)
def test_what_cannot_be_is_refused_with_operator_line_and_choices(operands, message):
    with pytest.raises(StrategyError, match=message) as error:
        pinned_strategies(matmul(operands), RULE, EIGHT)
    for part in (
        "aten.matmul.default",
        "layers.0",
        "model.py:9",
        "pinned at model.py:7",
        "valid on 8 devices: ((1, 1), (1, 8))",
    ):
        assert part in str(error.value)


def test_a_frozen_dim_is_refused():
    rule = parse("* d^ -> * d^").bind([(8, 8)], [(8, 8)])
    pin = Pin(((1, 8),), (None,), "model.py:7")
    node = Node("softmax", "aten.softmax.int", (), (), ("x",), ("y",), "", "model.py:9", pin)
    with pytest.raises(StrategyError, match=r"dim 1 of \(1, 8\) may not be split \(factor d\)"):
        pinned_strategies(node, rule, EIGHT)


def stored_over(names):
    """Every layout of a matrix over some of these axes."""
    for count in range(len(names) + 1):
        for axes in itertools.permutations(names, count):
            for dims in itertools.product((0, 1), repeat=count):
                by_dim = {dim: tuple(a for a, d in zip(axes, dims, strict=True) if d == dim) for dim in dims}
                yield Layout.split(2, by_dim)


@pytest.mark.parametrize("pin", [((2, 1), (2, 1)), ((2, 2), (1, 2)), ((1, 2), (1, 2))], ids=str)
@pytest.mark.parametrize("width", [pytest.param(256, marks=pytest.mark.slow), 4096])
def test_a_pin_leaves_free_how_a_parameter_is_stored(width, pin):
    """Wherever it is stored nothing is below the bound: a large one in parts that the pinned operator does not take."""
    mesh, hardware = Mesh.of(a=2, b=2), replace(shipped("h100"), hides_gradients=0.0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width, bias=False))
        captured = captured_step(model, lambda m, x: m(x).square().sum(), torch.zeros(16, width), {"0": pin})
    plan = make_plan(captured, PlanRequest(mesh, hardware=hardware, axes=mesh))
    [weight] = captured.of_kind("parameter")
    others = [replace(plan, leaves={**plan.leaves, weight.name: layout}) for layout in stored_over(mesh.names)]
    assert plan.bound == pytest.approx(min(true_cost(other, Seconds(hardware)) for other in others), rel=1e-9)
    assert plan.cost == pytest.approx(plan.bound, rel=1e-9)
