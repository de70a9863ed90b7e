"""The models of the zoo: their size and shape, and that any plan of them gives what one device gives."""

import functools
import importlib

import pytest
import torch
from torch.nn import functional as F

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.training.zoo import GPT, Perceptron, TwoMatmuls, resnet18, resnet50
from whole import run, same


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("make", "count"), [(resnet18, 11_689_512), (resnet50, 25_557_032)])
def test_resnets_have_the_published_number_of_parameters(make, count):
    with torch.device("meta"):
        model = make(1000, stem="imagenet")
        assert parameters(model) == count
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize(("make", "count", "channels"), [(resnet18, 11_173_962, 512), (resnet50, 23_520_842, 2048)])
def test_the_cifar_stem_keeps_small_images_whole(make, count, channels):
    with torch.device("meta"):
        model = make(10)
        assert parameters(model) == count
        images = torch.empty(2, 3, 32, 32)
        assert model.stem(images).shape == (2, 64, 32, 32)
        assert model.stages(model.stem(images)).shape == (2, channels, 4, 4)
        assert model(images).shape == (2, 10)


@pytest.mark.parametrize("zero_init", [True, False])
@pytest.mark.parametrize("make", [resnet18, resnet50])
@torch.no_grad()
def test_with_zeros_every_block_begins_as_its_shortcut(make, zero_init):
    model = make(width=4, zero_init=zero_init).eval()
    x = model.stem(torch.rand(1, 3, 8, 8))
    for stage in model.stages:
        for block in stage:
            y = block(x)
            assert torch.equal(y, block.shortcut(x).relu()) == zero_init
            x = y


def test_gpt_counts():
    d, v, s = 64, 50, 32
    layer = 4 * (d * d + d) + 8 * d * d + 5 * d + 4 * d
    assert parameters(GPT(v, d, 4, 3, s)) == v * d + s * d + 3 * layer + 2 * d
    assert parameters(GPT(v, d, 4, 3, s, tied=False, positions="rotary")) == 2 * v * d + 3 * layer + 2 * d
    assert GPT(v, d, 4, 3, s)(torch.zeros(2, 20, dtype=torch.int64)).shape == (2, 20, v)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_gpt_sees_the_past_and_its_order_alone(positions):
    torch.manual_seed(0)
    model = GPT(11, 16, 2, 2, 8, positions=positions).eval()
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    before = model(ids)
    later, swapped = ids.clone(), ids[:, [1, 0, 2, 3, 4, 5]]
    later[0, 4:] = 0
    assert torch.equal(model(later)[:, :4], before[:, :4])
    assert not torch.allclose(model(later)[:, 4:], before[:, 4:])
    assert not torch.allclose(model(swapped)[:, 2:], before[:, 2:])


def test_rotary_attention_depends_on_distances_alone():
    module = importlib.import_module("shardwright.training.zoo.models.gpt")
    torch.manual_seed(0)
    turns = [table.double() for table in module.rotary_turns(20, 8)]
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def at(x, position):
        return module.rotate(x, *(table[position : position + 1] for table in turns))

    def product(i, j):
        return (at(q, i) * at(k, j)).sum()

    torch.testing.assert_close(product(3, 1), product(17, 15), rtol=1e-5, atol=1e-5)
    assert abs(product(3, 1) - product(3, 2)) > 1e-3
    torch.testing.assert_close(at(q, 7).norm(), q.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 10, "heads": 4}, "a multiple of the heads, got width=10, heads=4"),
        ({"width": 12, "heads": 4, "positions": "rotary"}, "expected an even width per head, got 12 / 4"),
        ({"positions": "sinus"}, "expected positions among learned, rotary, got 'sinus'"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        GPT(5, **arguments)


def test_other_misfits():
    with pytest.raises(ValueError, match="expected a stem among cifar, imagenet, got 'mnist'"):
        resnet18(stem="mnist")
    with pytest.raises(ValueError, match=r"expected at most 4 tokens \(sequence_length\), got 5"):
        GPT(5, sequence_length=4)(torch.zeros(1, 5, dtype=torch.int64))


def classify(model, batch):
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits, y), logits


def next_token(model, batch):
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def square(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def images(side):
    return lambda rows: (torch.rand(rows, 3, side, side), torch.arange(rows) % 6)


def tokens(rows):
    ids = torch.randint(0, 24, (rows, 9))
    return ids[:, :-1], ids[:, 1:]


def gpt(**options):
    return lambda: GPT(24, 24, 6, 2, 12, dropout=0.2, **options)


# name -> (model, loss function, batch of so many rows)
ZOO = {
    "perceptron": (lambda: Perceptron(12, (24, 12), 6), classify, lambda n: (torch.rand(n, 3, 4), torch.arange(n) % 6)),
    "two matmuls": (lambda: TwoMatmuls(24, 12), square, lambda n: (torch.randn(n, 24), torch.randn(n, 12))),
    "resnet18": (lambda: resnet18(6, width=4), classify, images(8)),
    "resnet18 imagenet": (lambda: resnet18(6, "imagenet", width=4, zero_init=True), classify, images(32)),
    "resnet50": (lambda: resnet50(6, width=2), classify, images(8)),
    "gpt learned tied": (gpt(positions="learned", tied=True), next_token, tokens),
    "gpt rotary untied": (gpt(positions="rotary", tied=False), next_token, tokens),
}


@functools.cache
def prepared(name):
    """Graph, model, batch and what one device gives, in float64 and in training."""
    make, loss_fn, batch_of = ZOO[name]
    torch.manual_seed(0)
    model, batch = make().train(), batch_of(12)
    graph = captured_step(model, loss_fn, batch, {})
    return graph, model, batch, run(make_plan(graph, PlanRequest(Mesh(()), "single")), model, batch, seed=5)


# Every search, and every number of ranks; all combinations take minutes.
BRIEF = {("data", 3), ("propagation", 4), ("exact", 2)}
PLANS = [
    pytest.param(search, ranks, marks=[] if (search, ranks) in BRIEF else pytest.mark.slow)
    for search in ("data", "propagation", "exact")
    for ranks in (2, 3, 4)
]


@pytest.mark.networks
@pytest.mark.parametrize(("search", "ranks"), PLANS)
# The small stem is in the deeper network, and the blocks of two convolutions under the large stem.
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "resnet18" else ()) for n in ZOO])
@pytest.mark.usefixtures("float64")
def test_any_plan_gives_what_one_device_gives(name, search, ranks):
    graph, model, batch, reference = prepared(name)
    mode, options = ("data", {}) if search == "data" else ("auto", {"search": search})
    plan = make_plan(graph, PlanRequest(Mesh.of(d=ranks), mode, **options))
    assert plan.graph.unlisted == ()
    same(run(plan, model, batch, seed=5), reference)
