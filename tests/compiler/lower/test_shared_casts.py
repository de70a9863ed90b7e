"""Equal casts of a value are made once, and gradients are summed as plain PyTorch sums those of each cast."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.baselines import fully_sharded
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.report.ir import execute_text
from shardwright.compiler.rules.table import row_of
from shardwright.runtime.compiled.compiler import Compiler
from whole import plain, run

ONE = PlanRequest(Mesh(()), "single")


class Gated(nn.Module):
    """A layer whose input is cast for three matrices, and a memory that all layers read."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.of_memory = (nn.Linear(width, width) for _ in range(3))
        self.down = nn.Linear(width, width)

    def forward(self, x, memory):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y) + self.of_memory(memory) * self.gate(memory))


class Layered(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(layers))
        self.first = nn.Linear(16, 16)

    def forward(self, x):
        memory = self.first(x).float().tanh()
        for layer in self.layers:
            x = layer(x, memory)
        return x


def in_half(of):
    def within(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return of(model, batch)

    return within


def squared(model, batch):
    return model(batch).float().square().mean()


def layered():
    torch.manual_seed(0)
    return Layered(), torch.randn(32, 16)


@pytest.fixture(scope="module")
def captured():
    """A model, its batch, and the graph of a step in half precision."""
    model, batch = layered()
    return model, batch, captured_step(model, in_half(squared), batch, {})


def casts_of(capture):
    """How often each value is cast to each dtype, by the layer in which that is."""
    casts = [node for node in capture.nodes if row_of(node.op).casts]
    return Counter((node.call, node.operands, node.scope[:8]) for node in casts)


def test_each_value_is_cast_once(captured):
    _, _, capture = captured
    assert set(casts_of(capture).values()) == {1}
    [memory] = {name for node in capture.nodes if "tanh" in node.op for name in node.results}
    assert len([node for node in capture.nodes if row_of(node.op).casts and memory in node.operands]) == 2  # by layer


def test_gradients_are_summed_as_plain_pytorch_sums_them(captured):
    """To the last bit. Summed in bf16 most of them differ."""
    model, batch, capture = captured
    expected = plain(model, in_half(squared), batch)
    plan = make_plan(capture, ONE)
    assert sum(one.kind == "shared" for one in lower(plan, 0).instructions) == 4
    found = run(plan, model, batch)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_casts_by_hand_and_those_of_other_kinds():
    weights = nn.ParameterList(torch.randn(16, 16) for _ in range(3))
    batch = torch.randn(8, 16)

    def by_hand(weights, x):
        x = x * weights[0].sum()
        y = x.bfloat16() @ weights[1].bfloat16() + x.bfloat16() @ weights[2].bfloat16()
        return (y.float() + x.double().float() + x.half().float() + x.bfloat16().float()).sum() + x.double().sum()

    capture = captured_step(weights, by_hand, batch, {})
    assert set(casts_of(capture).values()) == {1}
    expected, found = plain(weights, by_hand, batch), run(make_plan(capture, ONE), weights, batch)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_what_is_returned_shares_its_memory_with_nothing():
    model, batch = nn.Linear(4, 4), torch.randn(3, 4)

    def returning(model, x):
        y = model(x)
        return y.sum(), (y.bfloat16(), y.bfloat16())

    capture = captured_step(model, returning, batch, {})
    assert len(set(capture.aux)) == 2


@pytest.mark.parametrize("mode", [pytest.param("data", marks=pytest.mark.slow), "auto"])
def test_shared_casts_under_plans_with_recomputation(mode, captured):
    model, batch, capture = captured
    expected = plain(model, in_half(squared), batch)
    for recompute in ((), ("layers.*",), ("layers.*.up",)):
        search = {} if mode == "data" else {"search": "propagation"}
        plan = make_plan(capture, PlanRequest(Mesh.of(d=2), mode, recompute=recompute, **search))
        once = run(plan, model, batch)
        for name in expected:
            torch.testing.assert_close(once[name], expected[name], rtol=0.05, atol=2e-3)


def test_shared_casts_are_compiled(captured):
    model, batch, capture = captured
    plan = make_plan(capture, ONE)
    once = run(plan, model, batch)
    compiled = run(plan, model, batch, compiler=Compiler(says=False, backend="aot_eager"))
    for name in once:
        torch.testing.assert_close(compiled[name], once[name], rtol=1e-5, atol=1e-6)


def test_what_is_moved_is_moved_once(captured):
    _, _, capture = captured
    plan = make_plan(capture, PlanRequest(Mesh.of(d=2), "auto", search="propagation"))
    moved = Counter((p.cause, p.direction, p.collective.kind) for p in plan.collectives())
    shared = [name for name, value in capture.values.items() if value.shared]
    assert all(count == 1 for (cause, _, _), count in moved.items() if cause in shared)


def test_dumps_show_shared_and_sharded_casts():
    model, batch = nn.ModuleList([Gated(192)]), torch.randn(8, 192)
    capture = captured_step(model, in_half(lambda m, x: m[0](x, x).float().sum()), batch, {})
    plan = fully_sharded(RuledGraph.of(capture), PlanRequest(Mesh.of(d=2)))
    program = lower(plan, 0)
    text = execute_text(plan, program)
    gathered = [one for one in program.instructions if "source" in one.call.source]
    assert len(gathered) == 4
    for one in gathered:
        assert f"%{one.outputs[0]}: bfloat16[192, 192] = all_gather(%{one.reads[0]})" in text
    assert "  # one for each reader, whose gradient is cast back on its own" in text
