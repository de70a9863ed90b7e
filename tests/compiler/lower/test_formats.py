"""Convolutions of float32 take images with their channels last, and everything else what it knows."""

import re

import pytest
import torch
from torch import nn

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.formats import with_channels_last
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.lower.operators import kernels
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from whole import plain, plan_of, run, same


class Network(nn.Module):
    """Of grey images: the first convolution has one channel, the third a group for each, and what the last gives is an
    output, and viewed as rows."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, 2, padding=1), nn.BatchNorm2d(32), nn.Hardswish())
        self.third = nn.Sequential(nn.Conv2d(32, 32, 3, padding="same", groups=32), nn.BatchNorm2d(32), nn.MaxPool2d(2))
        self.last = nn.Conv2d(32, 16, 1, 2, bias=False)  # which each rank would add up in another way
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        x = self.second(self.first(x))
        maps = self.last(self.third(x + x.sigmoid()))
        return maps, self.head(maps.view(len(maps), -1))


def loss_fn(model, batch):
    maps, logits = model(batch[0])
    return nn.functional.cross_entropy(logits, batch[1]), maps


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return Network().to(dtype), (torch.randn(7, 1, 12, 12, dtype=dtype), torch.randint(5, (7,)))


def program_of(dtype):
    model, batch = network(dtype)
    capture = captured_step(model, loss_fn, batch, {})
    program = lower(make_plan(capture, PlanRequest(Mesh.of(d=2), "data")), 0)
    return program, with_channels_last(program, capture)


def test_the_order_changes_before_the_first_channels_and_before_views():
    program, changed = program_of(torch.float32)
    orders = re.findall(r"(\w+) = (kernels.channels_last\(\w+|\w+\.contiguous)", changed.source)
    assert [order for _, order in orders] == [
        "kernels.channels_last(batch_0",
        "kernels.channels_last(relu",
        "kernels.channels_last(add_2",
        "kernels.channels_last(max_pool2d",
        "conv2d_3.contiguous",
    ]
    *last, usual = (made for made, _ in orders)
    assert all(
        f"aten.conv2d.{kind}({x}, " in changed.source
        for kind, x in zip(("default", "default", "padding", "default"), last, strict=True)
    )
    assert f"aten.reshape.default({usual}, " in changed.source
    assert usual in changed.outputs.values()
    assert len(changed.instructions) == len(program.instructions) + 5


@pytest.mark.parametrize(
    ("channels", "weight", "last"),
    [(32, (16, 32, 1, 1), True), (32, (8, 32, 1, 1), False), (3, (16, 3, 3, 2), True), (3, (16, 3, 3, 1), False),
     (12, (16, 3, 3, 3), False)],
    ids=["whole blocks", "half a block made", "colours", "colours, one wide", "colours in groups"],
)  # fmt: skip
def test_parts_whose_channels_fill_no_register_stay_as_they_are(channels, weight, last):
    x = torch.randn(2, channels, 5, 5)
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        found = kernels.channels_last(given, torch.randn(weight))
        assert found.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        assert torch.equal(found, x)


def test_other_dtypes_stay_as_they_are():
    program, changed = program_of(torch.float64)
    assert changed is program


# The channels that the last convolution reads lie on two ranks.
SPLIT = {"last": ((1, 2, 1, 1), (1, 2, 1, 1))}


@pytest.mark.parametrize(
    ("mesh", "mode", "pins"),
    [(Mesh(()), "single", None), (Mesh.of(d=3), "data", None), (Mesh.of(d=2), "auto", SPLIT)],
    ids=["one device", "rows", "channels"],
)
def test_the_values_are_those_of_plain_pytorch(mesh, mode, pins):
    model, batch = network()
    found = run(plan_of(model, loss_fn, batch, mesh, mode, pins), model, batch)
    outputs = [tensor for name, tensor in found.items() if name.startswith("aux")]
    same({n: tensor for n, tensor in found.items() if not n.startswith("aux")}, plain(model, loss_fn, batch), 2e-5)
    torch.testing.assert_close(outputs, [loss_fn(model, batch)[1].detach()], rtol=1e-5, atol=1e-5)
