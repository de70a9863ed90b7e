"""Fewer rows than ranks: a rank whose part is empty makes the same calls as the others, and all numbers are right."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from models import Straight
from ranks import run_ranks
from rows import brief
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.baselines import fully_sharded
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from whole import plain, run, same, splitting_hardware

RANKS = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Layered(nn.Module):
    """What stands between two layers and a head."""

    def __init__(self, between=None):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.between = nn.Linear(8, 8) if between is None else nn.Sequential(between, nn.Tanh())
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layers[1](self.between(self.layers[0](x))))


class Detaching(nn.Module):
    """Goes back to some of what it is made from, but not to all."""

    def __init__(self):
        super().__init__()
        self.gate, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            key = self.key(x)
        return x * torch.sigmoid(self.gate(x)).detach() + key + torch.zeros_like(self.gate(x)) + torch.ones_like(x)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x):
        h, c = torch.tanh(x), x
        for _ in range(2):
            h, c = self.cell(x, (h, c.detach()))
        return h


class Together(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        [one] = torch.split(x[:, :5], 5, dim=1)
        return torch.cat([self.layer(x), F.pad(one, (0, -1)), one[:, :1]], 1)


class Attending(nn.Module):
    """Every row looks at all others."""

    def __init__(self):
        super().__init__()
        self.q, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.norm(x)
        return torch.softmax(self.q(x) @ x.T, 1) @ x


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1.0, 2.0, 8))

    def forward(self, x):
        return Straight.apply(x, self.scale)


def classified(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def contrasted(model, batch):
    z = F.normalize(model(torch.cat([batch[0], batch[0].tanh()])), dim=1)
    rows = len(batch[0])
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(2 * rows, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.cat([torch.arange(rows, 2 * rows), torch.arange(rows)]))


def shifted(model, batch):
    """A loss over fewer rows than the batch has, of which other ranks' parts are empty."""
    y = model(batch[0])
    return F.pad(y, (0, 0, 0, -1)).square().sum() + F.pad(y.sum(1), (0, -1)).exp().sum() + F.cross_entropy(y, batch[1])


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "layers": (Layered, classified),
    "detached": (lambda: Layered(Detaching()), classified),
    "cell": (lambda: Layered(Cell()), classified),
    "cat": (lambda: Layered(Together()), classified),
    "attention": (lambda: Layered(Attending()), classified),
    "function": (lambda: Layered(Scaled()), classified),
    "contrastive": (Layered, contrasted),
    "shifted": (Layered, shifted),
}


def with_parts_gathered_again(graph, request):
    plan = fully_sharded(graph, request)
    return replace(plan, again=frozenset(value.name for value in plan.capture.of_kind("parameter")))


def planned(captured, kind):
    line, square = Mesh.of(d=RANKS), Mesh.of(a=2, b=2)
    made = {
        "data": lambda: make_plan(captured, PlanRequest(line, "data")),
        "auto": lambda: make_plan(captured, PlanRequest(line, "auto")),
        "split": lambda: make_plan(captured, PlanRequest(square, "auto", hardware=splitting_hardware())),
        "recomputed": lambda: make_plan(captured, PlanRequest(line, "data", recompute=("layers.*", "between*"))),
        "gathered": lambda: with_parts_gathered_again(RuledGraph.of(captured), PlanRequest(line)),
    }
    if kind != "both":
        return made[kind]()
    again, blocks = made["gathered"](), made["recomputed"]().recomputed
    return replace(again, recomputed=blocks)


def batch_of(rows):
    g = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=g, dtype=torch.float64), torch.randint(0, 5, (rows,), generator=g)


@cache
def captured(name):
    """A model, its batch, its graph, which all plans of it share, and what plain PyTorch gives."""
    torch.manual_seed(0)
    make, loss_fn = PROGRAMS[name]
    model, batch = make().double(), batch_of(6)
    return model, batch, captured_step(model, loss_fn, batch, {}), plain(model, loss_fn, batch)


# Every program, and every kind of plan of which another is no part.
QUICK = {
    ("layers", "both"), ("detached", "split"), ("cell", "data"), ("cat", "both"), ("attention", "split"),
    ("function", "both"), ("contrastive", "split"), ("contrastive", "data"), ("shifted", "data"),
}  # fmt: skip
KINDS = ("data", "split", "both", "auto", "recomputed", "gathered")


@pytest.mark.parametrize(("name", "kind"), brief(itertools.product(PROGRAMS, KINDS), *QUICK))
def test_all_ranks_make_the_same_calls_and_the_numbers_are_those_of_one_device(name, kind):
    model, batch, graph, expected = captured(name)
    plan = planned(graph, kind)
    for bucket_bytes in (1, None):
        found = run(plan, model, batch, bucket_bytes=bucket_bytes)
        same(found, {name: x for name, x in expected.items() if name in found or name.startswith("gradient")})


def train(kinds):
    sw.init()
    torch.manual_seed(0)
    deviations = []
    for name, options in kinds:
        make, loss_fn = PROGRAMS[name]
        model = make().double()
        expected = {rows: plain(model, loss_fn, batch_of(rows)) for rows in (8, 6, 2, 1)}
        parallel = sw.parallelize(model, loss_fn, batch_of(8), batch="global", **options)
        for rows, of_plain in expected.items():
            parallel.zero_grad()
            parallel(batch_of(rows)).backward()
            for label, parameter in parallel.named_parameters():
                gradient = of_plain.get(f"gradient of {label}")
                assert (parameter.grad is None) == (gradient is None), (name, rows, label)
                if gradient is not None:
                    own = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
                    deviations.append(float((own - gradient).abs().max()))
    return max(deviations)


@pytest.mark.slow
def test_real_ranks_train_on_fewer_rows_than_there_are():
    kinds = [("layers", {"recompute": "layers.*", "mode": "data"}), ("detached", {"mode": "data"})]
    assert max(run_ranks(RANKS, train, kinds)) < 1e-10
