"""What a plan says that is communicated is what the local programs do communicate, kind by kind and byte by byte."""

import dataclasses
import itertools
from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
import whole
from models import NETWORKS
from rows import slow
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.check import check
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.mesh.simulate import simulate
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.errors import LoweringError
from whole import plan_of, run

pytestmark = pytest.mark.networks


class Attention(nn.Module):
    """Self-attention; fused, one product gives for every head its query, key and value."""

    def __init__(self, width, heads, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        names = ["qkv"] if fused else ["q", "k", "v"]
        self.project = nn.ModuleDict({name: nn.Linear(width, 3 * width // len(names)) for name in names})
        self.o = nn.Linear(width, width)

    def forward(self, x):
        b, s, width = x.shape
        parts = [project(x).view(b, s, self.heads, -1).transpose(1, 2) for project in self.project.values()]
        q, k, v = parts[0].view(b, self.heads, s, 3, -1).unbind(3) if self.fused else parts
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, width))


class Layer(nn.Module):
    def __init__(self, width, heads, fused, rows):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, fused)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.add = sw.shard(torch.add, ((rows, 1, 1), (rows, 1, 1)))

    def forward(self, x):
        x = self.add(x, self.attention(self.ln1(x)))
        return self.add(x, self.down(F.gelu(self.up(self.ln2(x)))))


WIDTH, HEADS, LAYERS, ROWS, SEQUENCE = 16, 8, 2, 4, 6


@cache
def megatron(mesh, fused):
    """Columns, then rows of the weights over tp; everything between is split over dp alone."""
    rows, tp = mesh.sizes.get("dp", 1), mesh.sizes["tp"]
    columns, back = ((rows, 1, 1), (tp, 1)), ((rows, 1, tp), (1, tp))
    pins = {f"*.{name}": columns for name in ("attention.project.*", "up")}
    pins |= {f"*.{name}": back for name in ("attention.o", "down")}
    pins |= {"*.ln?": ((rows, 1, 1), None, None)}
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(WIDTH, HEADS, fused, rows) for _ in range(LAYERS)))
    error = sw.shard(F.mse_loss, ((rows, 1, 1), (rows, 1, 1)))

    def loss_fn(model, batch):
        return error(model(batch[0]), batch[1])

    batch = torch.randn(ROWS, SEQUENCE, WIDTH), torch.randn(ROWS, SEQUENCE, WIDTH)
    inputs = {"0": (rows, 1, 1), "1": (rows, 1, 1)}
    return plan_of(model, loss_fn, batch, mesh, "semi-auto", pins, inputs=inputs), model, batch


def on_one_device(mesh, fused):
    """What one device gives of the network of `megatron`."""
    _, model, batch = megatron(mesh, fused)
    return run(plan_of(model, lambda m, b: F.mse_loss(m(b[0]), b[1]), batch, Mesh(()), "single"), model, batch)


@pytest.mark.parametrize(
    ("mesh", "fused"),
    [
        (Mesh.of(dp=2, tp=2), False),
        (Mesh.of(tp=4), True),
        *slow((Mesh.of(tp=4), False), (Mesh.of(dp=2, tp=2), True)),
    ],
    ids=str,
)
def test_a_tensor_parallel_layer_takes_two_all_reduces_forward_and_two_backward(mesh, fused):
    plan, model, batch = megatron(mesh, fused)
    over_tp = mesh.atomic().names[1:] if "dp" in mesh.sizes else mesh.atomic().names
    hidden_bytes = ROWS // mesh.sizes.get("dp", 1) * SEQUENCE * WIDTH * 4
    per_layer = Collective("all_reduce", over_tp, hidden_bytes)
    found = Counter((p.direction, p.collective) for p in plan.collectives() if set(p.collective.axes) & set(over_tp))
    assert found == {("forward", per_layer): 2 * LAYERS, ("backward", per_layer): 2 * LAYERS}
    program = lower(plan, 0)
    lowered = Counter((way, c) for _, way, c in program.collectives() if set(c.axes) & set(over_tp))
    assert lowered == found
    whole.same(run(plan, model, batch), on_one_device(mesh, fused), 1e-5)


def counted(plan, model, batch, monkeypatch):
    """What every simulated rank really communicated in a forward and a backward."""
    ranks = {}

    def counting(mesh, fn):
        def one(comm):
            result = fn(comm)
            ranks[comm.rank] = list(comm.collectives)
            return result

        return simulate(mesh, one)

    monkeypatch.setattr(whole, "simulate", counting)
    run(plan, model, batch)
    return [ranks[rank] for rank in range(plan.mesh.size)]


def totals(collectives):
    """Bytes by kind and axes: the gradients of replicated parameters may be reduced together."""
    found = Counter()
    for collective in collectives:
        found[collective.kind, collective.axes] += collective.bytes
    return found


@cache
def captured(name):
    """A network with its batch and graph, which all plans of it share."""
    make, loss_fn, batch_of = NETWORKS[name]
    model, batch = make(), batch_of(24)
    return captured_step(model, loss_fn, batch, {}), model, batch


# Every network, every search and every mesh, but not each with each.
QUICK = {
    ("perceptron", "data", 3), ("perceptron", "propagation", 8), ("perceptron", "exact", 4),
    ("resnet", "data", 8), ("resnet", "propagation", 4), ("transformer", "exact", 3),
}  # fmt: skip
PLANS = [
    pytest.param(
        *(name, search, mesh),
        marks=() if (name, search, mesh.size) in QUICK else pytest.mark.slow,
        id=f"{name}-{search}-{mesh}",
    )
    for name, search, mesh in itertools.product(
        NETWORKS, ["data", "propagation", "exact"], [Mesh.of(d=3), Mesh.of(a=2, b=2), Mesh.of(d=8)]
    )
]


@pytest.mark.parametrize(("name", "search", "mesh"), PLANS)
def test_ranks_communicate_what_was_planned(name, search, mesh, monkeypatch):
    graph, model, batch = captured(name)
    options = {} if search == "data" else {"search": search}
    plan = make_plan(graph, PlanRequest(mesh, "data" if search == "data" else "auto", **options))
    planned = totals(priced.collective for priced in plan.collectives())
    assert planned
    for found in counted(plan, model, batch, monkeypatch):
        assert totals(found) == planned
        assert sum(c.sent_bytes(plan.mesh) for c in found) == pytest.approx(plan.moved_bytes(), rel=1e-12)


def test_uneven_parts_are_counted_as_long_as_the_longest(monkeypatch):
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    model, batch = make(), batch_of(13)
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=8), "data")
    for found in counted(plan, model, batch, monkeypatch):
        assert totals(found) == totals(priced.collective for priced in plan.collectives())


# What a pass might do wrong: each change is one that the check must see.


@pytest.fixture(scope="module")
def planned():
    plan, _, _ = megatron(Mesh.of(dp=2, tp=2), fused=False)
    return plan


def first(program, kind):
    return next(i for i, instruction in enumerate(program.instructions) if instruction.kind == kind)


def changed(program, at, *instructions):
    now = program.instructions
    return dataclasses.replace(program, instructions=(*now[:at], *instructions, *now[at + 1 :]))


def dropped(program):
    at = first(program, "redistribution")
    old = program.instructions[at]
    return changed(program, at, dataclasses.replace(old, moves=()))


def added(program):
    at = first(program, "redistribution")
    old = program.instructions[at]
    return changed(program, at, old, dataclasses.replace(old, outputs=("once_more",)))


def resized(program):
    at = first(program, "redistribution")
    old = program.instructions[at]
    [(value, step)] = old.moves
    moves = ((dataclasses.replace(value, shape=(8, 6, 16)), step),)
    return changed(program, at, dataclasses.replace(old, moves=moves))


def over_other_axes(program):
    at = first(program, "redistribution")
    old = program.instructions[at]
    [(value, step)] = old.moves
    moves = ((value, dataclasses.replace(step, axes=("dp",))),)
    return changed(program, at, dataclasses.replace(old, moves=moves))


def forgotten_in_a_bucket(program):
    at = first(program, "bucket")
    old = program.instructions[at]
    assert len(old.moves) > 1
    return changed(program, at, dataclasses.replace(old, moves=old.moves[1:]))


@pytest.mark.parametrize("mutation", [dropped, added, resized, over_other_axes, forgotten_in_a_bucket])
def test_the_check_sees_a_collective_that_the_plan_does_not_say(planned, mutation):
    program = lower(planned, 0)
    check(program, planned)
    with pytest.raises(LoweringError, match=r"collectives differ; only planned: .*; only in the program: ") as error:
        check(mutation(program), planned)
    missing, _, extra = str(error.value).partition("; only in the program: ")
    lacks, adds = ("Collective(kind='all_reduce'" in text for text in (missing, extra))
    assert (lacks, adds) == {
        dropped: (True, False),
        added: (False, True),
        resized: (True, True),
        over_other_axes: (True, True),
        forgotten_in_a_bucket: (True, False),
    }[mutation]


def test_the_check_sees_variables_out_of_order(planned):
    program = lower(planned, 0)
    at = first(program, "operator")
    last = program.instructions[at]
    untold = changed(program, at, dataclasses.replace(last, call=last.reading(last.reads[0], "nowhere").call))
    with pytest.raises(LoweringError, match=r"nowhere is no variable that aten.* is said to read"):
        check(untold, planned)
    last = last.reading(last.reads[0], "nowhere")
    with pytest.raises(LoweringError, match="nowhere is read before it is written, in "):
        check(changed(program, at, last), planned)
    twice = program.instructions[at]
    with pytest.raises(LoweringError, match=f"{twice.outputs[0]} is written twice, the second time by "):
        check(changed(program, at, twice, twice), planned)
