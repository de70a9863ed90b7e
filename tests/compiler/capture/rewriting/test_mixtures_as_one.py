"""Mixtures of experts are one operator where it gives the same, and stay as they are elsewhere."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rows import slow
from shardwright.compiler.capture.evaluate import evaluate
from shardwright.compiler.capture.step import captured_step

TOKENS, WIDTH, INNER, EXPERTS = 12, 6, 4, 4


def act(x):
    return F.gelu(x, approximate="tanh")


class Written(nn.Module):
    """A mixture with one thing written in another way."""

    def __init__(self, way="", choices=2):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.choices = way, choices
        self.router = nn.Linear(WIDTH, EXPERTS)
        gates = 2 if way in ("gate second", "three parts", "halves swapped") else 1
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, gates * INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER))

    def between(self, inner, experts):
        if self.way == "gate second":
            gate, factor = inner.chunk(2, -1)
            return factor * torch.relu(gate)
        if self.way == "halves swapped":
            factor, gate = inner.chunk(2, -1)
            return factor * torch.relu(gate)
        if self.way == "three parts":
            gate, factor = inner.split([INNER - 1, INNER + 1], -1)
            return F.pad(F.silu(gate), (0, 1)) * factor[:, :INNER]
        if self.way == "a bias":
            return F.silu(inner + self.bias[experts])
        return torch.tanh(inner) if self.way == "another activation" else act(inner)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.choices)
        experts, order = chosen.reshape(-1).sort(descending=self.way == "from the last")
        bins = EXPERTS + 1 if self.way == "another count" else EXPERTS
        counts = torch.histc(experts.float(), bins, min=0, max=bins - 1)
        ends = counts.cumsum(0, dtype=None if self.way == "ends cast" else torch.int32)[:EXPERTS]
        ends = ends.to(torch.int8 if self.way == "ends wrap" else ends.dtype).int()
        rows = x[order // (3 if self.way == "other rows" else self.choices)]
        out = F.grouped_mm(self.between(F.grouped_mm(rows, self.up, offs=ends), experts), self.down.mT, offs=ends)
        if self.way == "read twice":
            x = x + out.mean()
        out = (out * weights.reshape(-1)[order].unsqueeze(-1))[order.argsort(descending=self.way == "backwards")]
        out = out.view(TOKENS, self.choices, -1)
        return x + (out.amax(1) if self.way == "the largest" else out.sum(1))


def loss_fn(model, batch):
    return model(batch).square().sum()


def captured(model):
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    graph = captured_step(model.double(), loss_fn, x, {})
    values = evaluate(graph, dict(model.named_parameters()), {}, [x])
    return graph, values[graph.loss], x


@pytest.mark.parametrize(
    ("way", "choices"),
    [("", 1), ("", 2), ("gate second", 3), ("ends cast", 2), *slow(("", 3), ("gate second", 1), ("gate second", 2))],
)
def test_a_mixture_is_one_operator(way, choices):
    model = Written(way, choices)
    graph, found, x = captured(model)
    assert [node.op for node in graph.nodes if "grouped" in node.op or "experts" in node.op] == ["shardwright.experts"]
    assert not [node.op for node in graph.nodes if node.op.startswith(("aten.sort", "aten.histc", "aten.index"))]
    weights, chosen = model.router(x).softmax(-1).topk(choices)
    expected = x.clone()
    for token in range(TOKENS):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            inner = model.between(x[token] @ model.up[expert], expert)
            expected[token] += weight * (model.down[expert] @ inner)
    torch.testing.assert_close(found, expected.square().sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "way",
    [
        "halves swapped", "a bias", "another activation", "another count", "read twice", "backwards", "ends wrap",
        *slow("three parts", "from the last", "other rows", "the largest"),
    ],
)  # fmt: skip
def test_what_is_written_otherwise_stays_as_it_is(way):
    graph, _, _ = captured(Written(way))
    assert not [node for node in graph.nodes if node.op == "shardwright.experts"]
    assert len([node for node in graph.nodes if node.op.startswith("shardwright.grouped_mm")]) == 2
