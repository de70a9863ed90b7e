"""Layers and operators beyond the models of the other tests: captured and rewritten, they equal PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from graph_models import Perceptron
from torch import nn

from equals_eager import assert_equals_eager, captured_and_checked
from shardwright.compiler.capture.rewrite import rewrite


def real(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def squared(model, batch):
    out = model(*batch) if isinstance(batch, tuple) else model(batch)
    return (out[0] if isinstance(out, tuple) else out).square().mean()


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.1)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)


class Aliased(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.arange(8.0))
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(x + self.shift))


def weight_norm():
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))


def spectral_norm():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))


def image_layers():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(4, 2, 2),
        nn.InstanceNorm2d(2),
        nn.Dropout2d(0.3),
        nn.AvgPool2d(2),
    )


LAYERS = {
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), real(2, 5, 16)),
    "both coders": (
        lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True),
        (real(2, 5, 16), real(2, 6, 16)),
    ),
    "self attention": (SelfAttention, real(2, 5, 16)),
    "two layers of gru": (lambda: nn.GRU(4, 5, num_layers=2, dropout=0.2), real(5, 2, 4)),
    "image layers": (image_layers, real(2, 3, 8, 8)),
    "weight norm": (weight_norm, real(2, 8)),
    "spectral norm": (spectral_norm, real(2, 8)),
    "bag": (lambda: nn.EmbeddingBag(10, 4), torch.randint(0, 10, (3, 5))),
    "aliased": (Aliased, real(4, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    make, batch = LAYERS[name]
    model = make().double()
    captured = captured_and_checked(model, squared, batch)
    assert_equals_eager(rewrite(captured), model, squared, batch)


OPERATORS = {
    "einsum": lambda x: torch.einsum("bi,bj->ij", x, x).mean(),
    "distance": lambda x: torch.cdist(x, x + 1).mean(),
    "order": lambda x: x.topk(2, dim=-1)[0].mean() + x.max(dim=1)[0].sum() + x.std() + x.norm(),
    "pieces": lambda x: F.pad(torch.cat([x, torch.stack([x[:, 0]] * 2, 1)], 1), (1, 1)).roll(1, 0).cumsum(0).std(),
    "draws": lambda x: (x * torch.rand(4, 4, dtype=x.dtype) + torch.randn_like(x)).mean(),
    "coins": lambda x: (x * torch.bernoulli(torch.full_like(x, 0.5))).sum(),
    "masks": lambda x: x.masked_fill(x > 0, 0.0).tril().clamp(-1, 1).mean() + torch.where(x > 0, x, 0.0).sum(),
    "indices": lambda x: x[torch.tensor([0, 1])].sum() + F.one_hot(torch.arange(4), 4).mul(x).sum(),
    "complex": lambda x: torch.fft.rfft(x).abs().mean(),
    "steps": lambda x: (x * x.round() + x.sign()).sum() + x.argmax(),
    "criterion": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x, torch.arange(4)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    model, operator, batch = Perceptron().double(), OPERATORS[name], real(4, 8)

    def loss_fn(model, batch):
        return operator(model(batch))

    captured = captured_and_checked(model, loss_fn, batch)
    assert_equals_eager(rewrite(captured), model, loss_fn, batch)


def test_auxiliary_outputs_may_be_anything():
    def loss_fn(model, batch):
        out = model(batch)
        return out.mean(), {"shift": model.shift, "batch": batch, "weight": model.first.weight, "none": None, "n": 3}

    model = Aliased().double()
    captured = captured_and_checked(model, loss_fn, real(4, 8))
    assert [captured.values[name].kind for name in captured.aux] == ["buffer", "input", "parameter"]
