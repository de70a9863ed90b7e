"""The models of published runs, as they were written: what one kernel did there is one operator here.

A price is the bytes and the products of an operator, so that what is fused is told by the operators that a model has:
a norm of Llama that torch.compile fuses reads its input and writes its result, and without it each of its eight
operators does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Of GPT: Megatron-LM's fused kernels, PyTorch's own operators, fused attention. Of Llama: every operator alone, norms
# fused by hand, and what torch.compile fuses.
Kernels = Literal["megatron", "plain", "flash", "eager", "fused norms", "compiled"]
LLAMA = ("eager", "fused norms", "compiled")


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; ``kv_heads`` and ``inner`` of Llama alone, whose MLP has three matrices."""

    layers: int
    width: int
    heads: int
    words: int
    length: int = 2048
    kv_heads: int = 0
    inner: int = 0


Add = Callable[[Tensor, Tensor], Tensor]


class Core(nn.Module):
    """Attention between its products: what selective recomputation computes again."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kernels not in ("megatron", "plain"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-1, -2)  # Megatron-LM scales in the product, and masks in the kernel of the softmax
        if self.kernels == "plain":
            later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
            scores = (scores * (1 / math.sqrt(q.shape[-1]))).masked_fill(later, -math.inf)
        return F.dropout(scores.softmax(-1), 0.1) @ v


def _gelu_of_many_kernels(x: Tensor) -> Tensor:
    """Return the GELU as minGPT writes it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _in_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class GPTLayer(nn.Module):
    def __init__(self, shape: Shape, kernels: Kernels, add: Add) -> None:
        super().__init__()
        width, bias = shape.width, kernels != "flash"
        self.heads, self.kernels, self.add = shape.heads, kernels, add
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.core = Core(kernels)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (_in_heads(part(y), self.heads) for part in (self.q, self.k, self.v))
        x = self._added(x, self.out(self.core(q, k, v).transpose(1, 2).flatten(2)))
        y = self.up(self.norm2(x))
        return self._added(x, self.down(_gelu_of_many_kernels(y) if self.kernels == "plain" else F.gelu(y)))

    def _added(self, x: Tensor, y: Tensor) -> Tensor:
        # Megatron-LM's kernel drops and adds at once, and MPT drops nothing.
        return self.add(x, F.dropout(y, 0.1) if self.kernels == "plain" else y)


class RMSNorm(nn.Module):
    def __init__(self, width: int, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.fused = nn.Parameter(torch.ones(width)), kernels != "eager"

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return F.rms_norm(x, self.weight.shape, self.weight)
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


class LlamaLayer(nn.Module):
    def __init__(self, shape: Shape, kernels: Kernels, add: Add) -> None:
        super().__init__()
        self.shape, self.add, self.compiled = shape, add, kernels == "compiled"
        width, inner, of_keys = shape.width, shape.inner, shape.width // shape.heads * shape.kv_heads
        self.norm1, self.norm2 = RMSNorm(width, kernels), RMSNorm(width, kernels)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, of_keys, bias=False), nn.Linear(width, of_keys, bias=False)
        self.core = Core(kernels)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k = self._turned(self.q(y), self.shape.heads), self._turned(self.k(y), self.shape.kv_heads)
        v = self.v(y).unflatten(-1, (self.shape.kv_heads, -1))
        y = self.core(q.transpose(1, 2), self._repeated(k), self._repeated(v))
        x = self.add(x, self.out(y.transpose(1, 2).flatten(2)))
        y = self.norm2(x)
        gate, up = self.gate(y), self.up(y)
        # One kernel reads both and writes their product, where torch.compile fuses them.
        return self.add(x, self.down(gate * up if self.compiled else F.silu(gate) * up))

    def _turned(self, x: Tensor, heads: int) -> Tensor:
        """Return queries or keys in heads with positions: torchtitan turns them as complex numbers in float32."""
        x = x.unflatten(-1, (heads, -1))
        dtype = x.dtype if self.compiled else torch.float32
        turns = torch.ones(x.shape[1], 1, x.shape[-1], dtype=dtype, device=x.device)
        return (x.to(dtype) * turns).to(x.dtype)

    def _repeated(self, x: Tensor) -> Tensor:
        """Return a copy of each head of keys or values for each query that shares it."""
        many = self.shape.heads // self.shape.kv_heads
        if many > 1:
            x = x.unsqueeze(3).expand(-1, -1, -1, many, -1).clone(memory_format=torch.contiguous_format).flatten(2, 3)
        return x.transpose(1, 2)


class Model(nn.Module):
    """A model of a kind, with as many layers as are asked for.

    Args:
        add: adds a layer's two results to what it was given.
    """

    def __init__(self, shape: Shape, layers: int, kernels: Kernels, add: Add) -> None:
        super().__init__()
        llama = kernels in LLAMA
        self.tokens = nn.Embedding(shape.words, shape.width)
        self.positions = None if llama else nn.Embedding(shape.length, shape.width)
        layer = LlamaLayer if llama else GPTLayer
        self.layers = nn.ModuleList(layer(shape, kernels, add) for _ in range(layers))
        self.norm = RMSNorm(shape.width, kernels) if llama else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the words, in float32."""
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
