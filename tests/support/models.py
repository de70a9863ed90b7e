"""The networks that the tests train: small, and with everything in them that makes splitting hard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


class Branching(nn.Module):
    """Cannot be captured: it looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.flatten(1))
        return y if y.sum().item() > -1e9 else y * 2


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, 1, 1)
        self.bn = nn.BatchNorm2d(12)
        self.blocks = nn.Sequential(Block(12, 12, 1), Block(12, 24, 2))
        self.head = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.stem(x)), inplace=True), 2)
        return self.head(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (f(x).view(b, s, self.heads, d // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.o(y.transpose(1, 2).reshape(b, s, d))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.ln1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


class Transformer(nn.Module):
    """GPT-like: learned positions, tied head, dropout everywhere."""

    def __init__(
        self, vocabulary: int = 48, width: int = 24, heads: int = 12, layers: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(16, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Straight(torch.autograd.Function):
    """Gives no gradient to its second operand, though that requires one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale, None


def classify(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits, y), logits


def next_token(model: nn.Module, batch: Any) -> Tensor:
    ids, targets = batch
    logits = model(ids)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100)


def perceptron_batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, 12, generator=g), torch.randint(0, 12, (rows,), generator=g)


def resnet_batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 8, 8, generator=g), torch.randint(0, 12, (rows,), generator=g)


def transformer_batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 48, (rows, 8), generator=g)
    targets = torch.randint(0, 48, (rows, 8), generator=g)
    targets[torch.rand(rows, 8, generator=g) < 0.2] = -100
    return ids, targets


# name -> (model, loss function, batch of so many rows)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[..., Any]]] = {
    "perceptron": (Perceptron, classify, perceptron_batch),
    "resnet": (SmallResNet, classify, resnet_batch),
    "transformer": (Transformer, next_token, transformer_batch),
}
