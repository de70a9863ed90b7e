"""A small decoder as Llama is: rotary tables and a mask that every layer reads, few keys, a gated perceptron."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Attention with rotary positions and few keys, and a gated perceptron, as Llama has them."""

    def __init__(self, width: int, heads: int, keys: int, inner: int) -> None:
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, width // heads
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, keys * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(self.heads // self.keys, 1) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(
        self, layers: int = 2, width: int = 16, heads: int = 4, keys: int = 2, inner: int = 32, words: int = 24
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, keys, inner) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("rates", 10.0 ** -torch.linspace(0, 1, width // heads // 2))

    def forward(self, words: Tensor, seen: Tensor) -> Any:
        at = torch.arange(words.shape[1], device=words.device)
        angle = (at[:, None] * self.rates).repeat(1, 2)
        mask = (at[:, None] >= at)[None, None] & seen[:, None, None, :].bool()
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin(), mask)
        return self.head(x)


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    words, seen, label = batch
    return F.cross_entropy(model(words, seen).flatten(0, 1), label.flatten())


def batch_of(rows: int, length: int, words: int = 24) -> tuple[Tensor, ...]:
    seen = torch.ones(rows, length, dtype=torch.long)
    seen[: rows // 2, length // 2 :] = 0
    return torch.randint(0, words, (rows, length)), seen, torch.randint(0, words, (rows, length))
