"""Operators beside the rest: what every layer reads, such as a mask, widens no search and costs what is said."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.graph.step import captured_step
from shardwright.mesh.mesh import Mesh
from shardwright.plan import search as searching
from shardwright.plan.hardware import read_hardware
from shardwright.plan.make import make_plan
from shardwright.plan.request import PlanRequest
from whole import plan_of, run, same


class Layer(nn.Module):
    """Attention with rotary positions and few keys, and a gated perceptron, as Llama has them."""

    def __init__(self, width, heads, keys, inner):
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, width // heads
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, keys * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x, cos, sin, mask):
        h = self.before(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(self.heads // self.keys, 1) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, layers=2, width=16, heads=4, keys=2, inner=32, words=24):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, keys, inner) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("rates", 10.0 ** -torch.linspace(0, 1, width // heads // 2))

    def forward(self, words, seen):
        at = torch.arange(words.shape[1], device=words.device)
        angle = (at[:, None] * self.rates).repeat(1, 2)
        mask = (at[:, None] >= at)[None, None] & seen[:, None, None, :].bool()
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin(), mask)
        return self.head(x)


def loss_fn(model, batch):
    words, seen, label = batch
    return F.cross_entropy(model(words, seen).flatten(0, 1), label.flatten())


def batch_of(rows, length, words=24):
    seen = torch.ones(rows, length, dtype=torch.long)
    seen[: rows // 2, length // 2 :] = 0
    return torch.randint(0, words, (rows, length)), seen, torch.randint(0, words, (rows, length))


@pytest.mark.parametrize(
    ("method", "mesh"),
    [
        ("exact", Mesh.of(dp=2, tp=2)),
        pytest.param("exact", Mesh.of(tp=3), marks=pytest.mark.slow),
        pytest.param("propagation", Mesh.of(dp=2, tp=2), marks=pytest.mark.slow),
        ("propagation", Mesh.of(tp=3)),
    ],
    ids=str,
)
def test_a_plan_with_operators_beside_the_rest_gives_what_one_device_gives(mesh, method):
    torch.manual_seed(0)
    model, batch = Decoder().double(), batch_of(6, 8)
    plan = plan_of(model, loss_fn, batch, mesh, "auto", search=method)
    beside = searching.operators_beside(
        searching.Space(plan.graph, plan.mesh, {}, {k: (v,) for k, v in plan.leaves.items()}, {})
    )
    names = {node.op.split(".")[1] for node in plan.capture.nodes if node.name in beside}
    assert names >= {"arange", "cos", "sin", "__and__"}
    assert plan.bound <= plan.cost
    assert f"(gap {(plan.cost - plan.bound) / plan.cost:.2%})" in str(plan)
    same(run(plan, model, batch), run(plan_of(model, loss_fn, batch, Mesh(()), "single"), model, batch))


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_the_gap_is_true(monkeypatch, hardware):
    """The least cost over all choices together is between the bound and the cost; on one axis it can be searched."""
    captured = captured_step(Decoder(layers=1), loss_fn, batch_of(8, 16), {})
    request = PlanRequest(Mesh.of(d=4), "auto", "exact", "split", read_hardware(hardware))
    plan = make_plan(captured, request)
    monkeypatch.setattr(searching, "operators_beside", lambda space: frozenset())
    together = make_plan(captured, request)
    assert together.bound == together.cost
    assert plan.bound <= together.cost * (1 + 1e-12)
    assert together.cost <= plan.cost * (1 + 1e-12)


def test_layers_that_share_a_mask_are_planned_on_two_axes_and_alike():
    """One more layer costs what the one before it does: the search is not tied together by what all layers read."""
    with torch.device("meta"):
        costs = []
        for layers in (2, 3, 4):
            captured = captured_step(Decoder(layers, 256, 8, 4, 512, 1024), loss_fn, batch_of(64, 128, 1024), {})
            plan = make_plan(
                captured, PlanRequest(Mesh.of(dp=8, tp=8), "auto", "exact", "split", read_hardware("h100"))
            )
            assert plan.cost - plan.bound < 0.05 * plan.cost
            costs.append(plan.bound)
    assert costs[2] - costs[1] == pytest.approx(costs[1] - costs[0], rel=1e-6)
