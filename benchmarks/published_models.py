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
LATENT = ("q_down", "q_up", "kv_down", "kv_up", "gate", "up", "down")  # products of DeepSeek-V3


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; ``kv_heads`` and ``inner`` of Llama alone, whose MLP has three matrices.

    With ``experts`` a router chooses ``choices`` of them for each token, and ``inner`` is that of one. ``head`` is the
    width of a head of Qwen3, whose heads together are wider than the model and have norms of queries and keys.
    DeepSeek-V3 makes them of ``latent`` vectors, for queries and for keys with values, and turns as many more entries
    of a head; all tokens go to an expert of inner width ``shared``, too.
    """

    layers: int
    width: int
    heads: int
    words: int
    length: int = 2048
    kv_heads: int = 0
    inner: int = 0
    experts: int = 0
    choices: int = 0
    head: int = 0
    latent: tuple[int, ...] = ()
    shared: int = 0

    @property
    def of_head(self) -> int:
        """The width of a head."""
        return self.head or self.width // self.heads


Add = Callable[[Tensor, Tensor], Tensor]


class Core(nn.Module):
    """Attention between its products: what selective recomputation computes again."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kernels not in ("megatron", "plain"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
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


class Experts(nn.Module):
    """Experts that take all tokens of theirs, written as `transformers` does, which is one operator to a plan."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2, shape.inner, shape.width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.width, shape.inner))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        count, choices = self.shape.experts, self.shape.choices
        ordered, order = chosen.reshape(-1).sort()
        ends = torch.histc(ordered.float(), count, min=0, max=count - 1).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x[order // choices], self.gate_up.flatten(1, 2).mT, offs=ends).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)
        rows = (rows * weights.reshape(-1)[order].unsqueeze(-1))[order.argsort()]
        return rows.view(len(x), choices, -1).sum(1)


class Heads(nn.Module):
    """Queries, keys and values in heads, of tokens of all samples in one dim."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, width, head = shape, shape.width, shape.of_head
        self.q, self.k, self.v = (
            nn.Linear(width, head * heads, bias=False) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        self.norm_q, self.norm_k = (RMSNorm(head, "compiled") if shape.head else nn.Identity() for _ in range(2))

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_of_samples(part(y), self.shape, self.shape.of_head) for part in (self.q, self.k, self.v))
        return _turned(self.norm_q(q)), _turned(self.norm_k(k)), v


class LatentHeads(nn.Module):
    """Those of DeepSeek-V3: a part of the keys, which positions turn, is the same in all heads, and copied to each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, (of_queries, of_keys, turned) = shape, shape.latent
        self.q_down, self.q_norm = nn.Linear(shape.width, of_queries, bias=False), RMSNorm(of_queries, "compiled")
        self.q_up = nn.Linear(of_queries, (shape.head + turned) * shape.heads, bias=False)
        self.kv_down, self.kv_norm = nn.Linear(shape.width, of_keys + turned, bias=False), RMSNorm(of_keys, "compiled")
        self.kv_up = nn.Linear(of_keys, 2 * shape.head * shape.heads, bias=False)

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape, (_, of_keys, turned) = self.shape, self.shape.latent
        queries = _of_samples(self.q_up(self.q_norm(self.q_down(y))), shape, shape.head + turned)
        q, q_turned = queries.split([shape.head, turned], -1)
        latent, k_turned = self.kv_down(y).split([of_keys, turned], -1)
        k, v = _of_samples(self.kv_up(self.kv_norm(latent)), shape, 2 * shape.head).split(shape.head, -1)
        k_turned = _turned(_of_samples(k_turned, shape, turned)).expand(-1, -1, shape.heads, -1)
        return torch.cat((q, _turned(q_turned)), -1), torch.cat((k, k_turned), -1), v


def _of_samples(x: Tensor, shape: Shape, head: int) -> Tensor:
    """Return tokens of samples, in heads of such a width."""
    return x.view(-1, shape.length, x.shape[-1]).unflatten(-1, (-1, head))


def _turned(x: Tensor) -> Tensor:
    """Return queries or keys with positions, by one kernel."""
    return x * torch.ones(x.shape[1], 1, x.shape[-1], dtype=x.dtype, device=x.device)


class SharedExpert(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.shared, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.shared, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.gate(x) * self.up(x))  # one kernel between products
        return found


class MixtureLayer(nn.Module):
    """A layer of a mixture, on tokens of all samples in one dim, which Megatron-Core splits over any axes."""

    def __init__(self, shape: Shape, add: Add) -> None:
        super().__init__()
        self.shape, self.add = shape, add
        self.norm1, self.norm2 = RMSNorm(shape.width, "compiled"), RMSNorm(shape.width, "compiled")
        self.heads, self.core = LatentHeads(shape) if shape.latent else Heads(shape), Core("compiled")
        self.out = nn.Linear(shape.of_head * shape.heads, shape.width, bias=False)
        self.router, self.experts = nn.Linear(shape.width, shape.experts, bias=False), Experts(shape)
        self.shared = SharedExpert(shape) if shape.shared else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.core(*(part.transpose(1, 2) for part in self.heads(self.norm1(x))))
        x = self.add(x, self.out(y.transpose(1, 2).flatten(2).flatten(0, 1)))
        y = self.norm2(x)
        weights, chosen = self.router(y).float().softmax(-1).topk(self.shape.choices)
        weights = (weights / weights.sum(-1, keepdim=True)).to(y.dtype)
        found: Tensor = self.experts(y, chosen, weights)
        return self.add(x, found if self.shared is None else found + self.shared(y))


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
        self.experts = shape.experts
        self.layers = nn.ModuleList(
            MixtureLayer(shape, add) if shape.experts else layer(shape, kernels, add) for _ in range(layers)
        )
        self.norm = RMSNorm(shape.width, kernels) if llama else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids.flatten() if self.experts else ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the words, in float32."""
    return F.cross_entropy(model(ids).float().flatten(0, -2), ids.flatten())
