"""What a plan says about a module, an operator or a parameter, and that the alternatives are priced truly."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from decoder import Decoder, batch_of, loss_fn
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.explain import Explainer
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.errors import PlanError, UsageError

# Nothing is hidden of communication: then the seconds of a step are the sum that a search minimises.
H100 = replace(read_hardware("h100"), hides_gradients=0.0)
MESH = Mesh.of(dp=2, tp=4)


def distance(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def planned(model, loss, batch, mesh=MESH, mode="auto"):
    with torch.device("meta"):
        captured = captured_step(model(), loss, batch(), {})
    return make_plan(captured, PlanRequest(mesh, mode, None, "split", H100))


@pytest.fixture(scope="module")
def small():
    return planned(
        lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 30)),
        distance,
        lambda: (torch.randn(64, 64), torch.randn(64, 30)),
    )


@pytest.fixture(scope="module")
def deep():
    return planned(lambda: Decoder(2, 64, 8, 4, 128, 256), loss_fn, lambda: batch_of(16, 32, 256))


def test_an_operator_is_told_in_words_slices_and_alternatives(small):
    text = small.explain("linear_1", H100)
    assert text.startswith("linear_1: the operator aten.linear.default in 2, ")
    node = next(node for node in small.capture.nodes if node.name == "linear_1")
    slices = " ".join(str(s).replace(" ", "") for s in small.in_strategy(node))
    assert f"strategy, in slices of operands -> results: {slices} -> " in text
    assert "\nOver " in text
    assert f"shared by {MESH.extent(small.strategies['linear_1'].used)} of 8 devices" in text
    assert "The next best strategy, " in text


def test_the_price_of_an_alternative_is_that_of_the_plan_with_it(small):
    """All other operators of a small net follow, so that what is added is what the best plan with it takes more."""
    why = Explainer(small, H100)
    for node in small.capture.nodes:
        best = why.next_strategy(node)
        if best is None:
            continue
        assert best.more_s > -1e-12, node.name
        free = why._around(node)
        choices = {name: why._choices(why.nodes[name]) for name in free} | {node.name: (best.strategy,)}
        _, strategies, leaves = why._problem(free, choices, None).solved()
        other = replace(small, strategies=small.strategies | strategies, leaves=small.leaves | leaves)
        more_s = Prices(other, H100).step_s - Prices(small, H100).step_s
        assert more_s == pytest.approx(best.more_s, rel=1e-6, abs=1e-12), node.name


@pytest.mark.slow
def test_a_module_has_its_operators_parameters_and_collectives(deep):
    text = deep.explain("layers.1", H100)
    inside = [node for node in deep.capture.nodes if (node.scope + ".").startswith("layers.1.")]
    assert text.startswith(f"layers.1: a module with {len(inside)} operators. It computes ")
    assert all(re.search(rf"^{node.name} ", text, re.MULTILINE) for node in inside)
    assert "layers.1.gate.weight" in text
    assert "layers.0." not in text
    assert text.count("The next best strategy") + text.count("There is no other strategy") == 6
    folded = deep.explain("layers", H100)
    assert re.search(r"^linear in layers\.0-1\.q +2 ", folded, re.MULTILINE)
    assert len(folded.splitlines()) < 2 * len(text.splitlines())


def test_a_module_of_one_operator_has_its_parameters_and_says_why(small):
    text = small.explain("0", H100)
    assert text.startswith("0: a module with 1 operator. It computes ")
    assert "\n0.bias " in text
    assert "\nlinear: " in text


def test_a_parameter_has_its_layout_and_the_next_best_one(small):
    text = small.explain("0.weight", H100)
    assert text.startswith("0.weight: a parameter of shape [256, 64], stored ")
    assert "linear in 0 needs it as [" in text
    assert "why: the next best layout, " in text


def test_what_binds_is_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(8, 6))
            self.matmul = sw.shard(torch.matmul, ((2, 1), (1, 1)))

        def forward(self, x):
            return torch.linalg.det(self.matmul(x, self.w)[:6]).softmax(-1) if x.ndim > 2 else self.matmul(x, self.w)

    plan = planned(Net, lambda m, b: m(b[0]).softmax(-1).square().sum(), lambda: (torch.randn(6, 8),), MESH)
    pinned = plan.explain("matmul", H100)
    assert "why: It is pinned at test_explain.py:" in pinned
    assert "Without the pin the best other strategy, " in pinned
    assert "Over tp all devices do the same work." in pinned
    assert "Dim 1 of w, of 6, does not divide into 4." in pinned
    softmax = (
        plan.explain("softmax", H100) if "softmax" in Explainer(plan, H100).nodes else plan.explain("_softmax", H100)
    )
    assert "Its rule forbids to split dim 1 of" in softmax
    batch = (torch.zeros(8, 4, 4),)
    whole = planned(lambda: nn.Linear(4, 4), lambda m, b: torch.linalg.det(m(b[0])).sum(), lambda: batch, MESH, "data")
    name = next(node.name for node in whole.capture.nodes if node.op == "aten._linalg_det.default")
    assert "It has no rule, so that every device runs it whole" in whole.explain(name, H100)


def test_an_unknown_name_is_refused_with_those_near_it(small):
    with pytest.raises(UsageError, match=r"no module, operator or parameter '0.wight'; near it: 0.weight"):
        small.explain("0.wight", H100)


def test_a_plan_knows_what_it_was_priced_with(small, tmp_path):
    """Without hardware it answers as with that, also when it was read from a file."""
    assert small.explain("0") == small.explain("0", H100) != small.explain("0", "cpu")
    small.save(tmp_path / "plan.json")
    assert type(small).load(tmp_path / "plan.json", small.graph).hardware == H100
    text = (
        (tmp_path / "plan.json").read_text().replace('"memory_bandwidth": ', '"memory_bandwidth": "much", "at_once": ')
    )
    with pytest.raises(PlanError, match="the hardware of the plan: memory_bandwidth is 'much'"):
        type(small).from_json(text, small.graph)
