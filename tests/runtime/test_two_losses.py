"""Two losses over the same parameters: the plan of the second takes the parameters as the first stores them."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.mesh.dtensor import gathered
from shardwright.errors import UsageError

SPLIT = {"mode": "auto", "search": "propagation"}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def first_loss(model, x):
    return model(x).square().mean()


def second_loss(model, x):
    return (model(x) - 1).abs().mean() + model.a.weight.square().sum()


def of_part(model, x):
    return model(x).square().mean()


def trained(first, second):
    """The parameters after alternating steps of both losses, whole, and which of them are split."""
    sw.set_seed(0)
    model, x = Pair(), torch.randn(12, 8)
    if first is None:
        steps = [lambda: first_loss(model, x), lambda: second_loss(model, x)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    else:
        losses = [(first_loss, first), (second_loss, second)]
        parallels = [sw.parallelize(model, loss, x, batch="global", **options) for loss, options in losses]
        steps = [lambda p=p: p(x) for p in parallels]
        optimizer = torch.optim.AdamW(parallels[0].parameters(), lr=0.1)
    for _ in range(2):
        for step in steps:
            step().backward()
            optimizer.step()
            optimizer.zero_grad()
    split = any(isinstance(p, DTensor) for p in model.parameters())
    return [gathered(p).clone() for p in model.parameters()], split


def pairs():
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    expected, _ = trained(None, None)
    found = {}
    for name, options in {
        "the first splits": (SPLIT, {"mode": "data"}),
        "the second would split": ({"mode": "data"}, SPLIT),
    }.items():
        got, split = trained(*options)
        found[name] = max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)), split
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_losses_train_one_model_as_on_one_device(ranks):
    for found in run_ranks(ranks, pairs):
        assert all(deviation < 1e-12 for deviation, _ in found.values()), found
        assert {name: split for name, (_, split) in found.items()} == {
            "the first splits": True,
            "the second would split": False,
        }


def in_odd_orders():
    sw.init()
    x = torch.randn(12, 8)
    model = Pair()
    pinned = {"mode": "semi-auto", "mesh": "tp=2", "pins": {"0": ((1, 1), (2, 1), None)}}
    part = sw.parallelize(nn.Sequential(model.b), of_part, torch.randn(12, 16), batch="global", **pinned)
    whole = sw.parallelize(model, first_loss, x, batch="global", **SPLIT)
    alike = all(isinstance(p, DTensor) for p in model.parameters())
    told = []
    other = Pair()
    plain = sw.parallelize(other, first_loss, x, batch="global", mode="data")
    with pytest.raises(UsageError) as error:
        sw.parallelize(other, first_loss, x, batch="global", plan=whole.plan)
    told.append(str(error.value))
    mixed = nn.ModuleDict({"a": model.a, "b": other.b})
    with pytest.raises(UsageError) as error:
        sw.parallelize(mixed, lambda m, x: m["b"](m["a"](x).tanh()).mean(), x, batch="global", **SPLIT)
    told.append(str(error.value))
    plain.close()
    del plain, error
    again = sw.parallelize(other, first_loss, x, batch="global", **SPLIT)  # nobody holds them whole any more
    return alike, told, any(isinstance(p, DTensor) for p in again.parameters()), float(part(torch.randn(12, 16))) > 0


def test_parts_come_before_the_whole_and_what_does_not_go_together_is_said():
    for alike, told, split_again, works in run_ranks(2, in_odd_orders):
        assert alike
        assert works
        assert split_again
        assert told[0].startswith("the given plan stores ")
        assert told[0].endswith("leave plan= out, so that one is made")
        assert told[1].startswith("earlier calls of sw.parallelize store a.weight and b.weight in ways that do not go")
