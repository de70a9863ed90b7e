"""Norms that models spell out become torch's `rms_norm` where that rounds as they do, and no others."""

import pytest
import torch
from torch import nn

from rows import slow
from shardwright.compiler.capture.step import captured_step
from whole import like_plain


def of_transformers(norm, x):
    """As LlamaRMSNorm of transformers, whose casts leave nothing of float32."""
    dtype = x.dtype
    x = x.to(torch.float32) if dtype in (torch.bfloat16, torch.float32) else x
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return norm.weight * x.to(dtype)


def other_order(norm, x):
    return torch.rsqrt(x.pow(2).mean(x.ndim - 1, True) + 1e-5) * x * norm.weight


def of_another_dim(norm, x):
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * norm.weight


def of_cubes(norm, x):
    return x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 1e-6) * norm.weight


def of_other_numbers(norm, x):
    return x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight


def of_one_weight(norm, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight[:1]


def read_twice(norm, x):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return y * norm.weight + y


class Norm(nn.Module):
    def __init__(self, spelled):
        super().__init__()
        self.weight, self.spelled = nn.Parameter(torch.linspace(0.5, 2, 8)), spelled

    def forward(self, x):
        return self.spelled(self, x)


def network(spelled):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Norm(spelled), nn.Tanh(), nn.Linear(8, 8), Norm(spelled))


def loss_fn(model, batch):
    return model(batch).square().sum()


def norms(captured):
    return sum(node.op == "aten.rms_norm.default" for node in captured.nodes)


SPELLED = [
    (other_order, 2), (of_another_dim, 0), (of_one_weight, 0), (read_twice, 0),
    *slow((of_transformers, 2), (of_cubes, 0), (of_other_numbers, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("spelled", "expected"), SPELLED)
def test_norms_become_one_operator_each_and_equal_plain_pytorch(float64, spelled, expected):
    plan, *_ = like_plain(network(spelled), loss_fn, torch.randn(4, 3, 6), sizes=(2,))
    assert norms(plan.capture) == expected


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 0), (torch.float32, 2)])
def test_a_norm_that_rounds_to_half_precision_before_the_weight_is_left_as_it_is(dtype, expected):
    model, batch = network(of_transformers).to(dtype), torch.randn(4, 3, 6, dtype=dtype)
    assert norms(captured_step(model, loss_fn, batch, {})) == expected


def test_under_autocast_norms_of_float32_become_one_operator_each():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.norm, self.linear = nn.Embedding(10, 8), Norm(of_transformers), nn.Linear(8, 8)

        def forward(self, ids):
            x = self.words(ids)
            return x + self.linear(self.norm(x))

    def autocast_loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).square().sum()

    assert norms(captured_step(Residual(), autocast_loss, torch.randint(10, (4, 3)), {})) == 1
