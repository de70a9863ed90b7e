"""Gradients that a loss function takes itself: simulated ranks give what plain PyTorch gives."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from rows import slow
from shardwright.compiler.capture.capture import capture
from shardwright.errors import CaptureError
from whole import like_plain

pytestmark = pytest.mark.usefixtures("float64")


class Smooth(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Softmax(-1), nn.Linear(8, 1)
        )


class Convolutions(nn.Sequential):
    def __init__(self):
        layers = nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten()
        super().__init__(*layers, nn.Linear(12, 1))


def penalty(model, batch):
    between = (batch[0] * batch[1] + (1 - batch[1]) * batch[0].flip(0)).detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return model(batch[0]).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


def second_order(model, batch):
    x = batch[0].clone().requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (second.sum(1, keepdim=True) + u - batch[1]).square().mean()


def of_parameters(model, batch):
    slopes = torch.autograd.grad(model(batch[0]).square().mean(), list(model.parameters()), create_graph=True)
    adapted = {name: p - 0.1 * g for (name, p), g in zip(model.named_parameters(), slopes, strict=True)}
    return functional_call(model, adapted, (batch[0],)).sub(batch[1]).square().mean()


def without_a_graph(model, batch):
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    return (model(batch[0]) * slope).square().mean()


def by_func(model, batch):
    return grad(lambda x: model(x).sum())(batch[0]).square().mean()


def each_sample(model, batch):
    parameters = dict(model.named_parameters())
    slopes = vmap(grad(lambda p, x: functional_call(model, p, (x,)).sum()), in_dims=(None, 0))(parameters, batch[0])
    return sum(slope.square().mean() for slope in slopes.values())


def jacobians(model, batch):
    return (vmap(jacrev(model))(batch[0]) * vmap(jacfwd(model))(batch[0])).mean()


def forward_mode(model, batch):
    value, slope = jvp(model, (batch[0],), (torch.ones_like(batch[0]),))
    return (value * slope).mean()


def hessians(model, batch):
    return vmap(hessian(lambda x: model(x).sum()))(batch[0]).square().mean()


def only_vmap(model, batch):
    return vmap(lambda x, y: (model(x) - y).square().sum())(batch[0], batch[1]).mean()


@pytest.mark.parametrize("loss_fn", [penalty, *slow(second_order, of_parameters), without_a_graph, only_vmap])
def test_gradients_inside_a_loss_are_exact(loss_fn):
    like_plain(Smooth(), loss_fn, (torch.randn(8, 6), torch.rand(8, 1)))


def test_through_convolutions():
    like_plain(Convolutions(), penalty, (torch.randn(8, 6), torch.rand(8, 1)), sizes=(2,))


@pytest.mark.parametrize("norm", [*slow(nn.Identity), lambda: nn.BatchNorm1d(8)], ids=["alone", "and batch norm"])
def test_through_a_spectral_norm_which_writes_into_its_buffers(norm):
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
    critic = nn.Sequential(normed, norm(), nn.Tanh(), nn.Linear(8, 1))
    like_plain(critic, penalty, (torch.randn(8, 6), torch.rand(8, 1)), sizes=(2,))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("loss_fn", [by_func, *slow(each_sample, hessians), jacobians, forward_mode])
def test_transforms_that_take_gradients_are_refused(loss_fn):
    batch = torch.randn(8, 6), torch.rand(8, 1)
    with pytest.raises(CaptureError, match=r"a transform of torch.func takes a gradient") as error:
        capture(Smooth(), loss_fn, batch)
    assert f" in {loss_fn.__name__}: " in str(error.value)
    loss_fn(Smooth(), batch).backward()  # torch is left as it was
