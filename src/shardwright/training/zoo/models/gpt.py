"""A decoder-only transformer with normalisation before each part, as GPT-2 has it (Radford et al., 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.training.zoo.rows import Data, ModelOptions, at_least, between

Turns = tuple[Tensor, Tensor]  # cosines and sines
Positions = Literal["learned", "rotary"]
_DEVIATION = 0.02  # of the initial weights
_LONGEST_WAVE = 10_000.0  # of the rotary angles, in positions per radian


class Attention(nn.Module):
    """Causal attention of ``heads`` heads: [batch, sequence, width] -> the same shape.

    Queries, keys and values have a layer each, so that a split over the heads is a split of each layer's outputs.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, turns: Turns | None) -> Tensor:
        b, s, d = x.shape
        q, k, v = (part(x).view(b, s, self.heads, d // self.heads).transpose(1, 2) for part in (self.q, self.k, self.v))
        if turns is not None:
            q, k = rotate(q, *turns), rotate(k, *turns)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, s, d))
        return out


def rotary_turns(sequence_length: int, head_width: int) -> Turns:
    """Cosine and sine of the angle by which each pair of coordinates turns at each position.

    Both are of shape [sequence_length, head_width]: coordinate i and coordinate i + head_width / 2 are a pair, and the
    sine of the first is negative.
    """
    frequencies = _LONGEST_WAVE ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.arange(sequence_length)[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([cosine, cosine], dim=1), torch.cat([-sine, sine], dim=1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of coordinates by the angle of its position.

    Su et al., *RoFormer*, 2021, arXiv:2104.09864, which pairs neighbouring coordinates instead: the same up to the
    order of a layer's outputs. x: [batch, heads, sequence, head_width]; the tables may be longer than the sequence.
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    # Cut here, not once for all layers: one small value that all of them read would tie all their strategies together.
    cosine, sine = cosine[:length].to(x.dtype), sine[:length].to(x.dtype)
    return x * cosine + x.roll(half, -1) * sine


class Layer(nn.Module):
    """Attention and a perceptron of four times the width, each beside a shortcut: [batch, sequence, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, turns: Turns | None) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), turns))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """Ids [batch, sequence], at most ``sequence_length`` of them in a row -> logits [batch, sequence, vocabulary].

    Args:
        positions: "learned" adds a trained vector per position, "rotary" turns queries and keys by their position.
        tied: the head's weight is the embedding's.
        dropout: the share that is dropped of embeddings, attention weights and what each part adds.

    Raises:
        ValueError: where the width is no multiple of the heads, or the heads' width is odd under rotary positions.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self,
        vocabulary: int,
        width: int = 128,
        heads: int = 4,
        layers: int = 4,
        sequence_length: int = 64,
        positions: Positions = "learned",
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check(width, heads, positions)
        self.sequence_length = sequence_length
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence_length, width) if positions == "learned" else None
        if positions == "rotary":  # not in the state: they follow from the arguments
            cosine, sine = rotary_turns(sequence_length, width // heads)
            self.register_buffer("cosine", cosine, persistent=False)
            self.register_buffer("sine", sine, persistent=False)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                continue
            # What is added to the shortcut 2 * layers times is smaller, so that their sum begins as large as one.
            added = name.endswith(("attention.out.weight", "down.weight"))
            nn.init.normal_(parameter, std=_DEVIATION / math.sqrt(2 * layers) if added else _DEVIATION)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.sequence_length:
            raise ValueError(f"expected at most {self.sequence_length} tokens (sequence_length), got {length}")
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=ids.device))
        x = self.drop(x)
        turns = (self.cosine, self.sine) if self.positions is None else None
        for layer in self.layers:
            x = layer(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _check(width: int, heads: int, positions: Positions) -> None:
    if positions not in get_args(Positions):
        raise ValueError(f"expected positions among {', '.join(get_args(Positions))}, got {positions!r}")
    if width % heads:
        raise ValueError(f"expected a width that is a multiple of the heads, got width={width}, heads={heads}")
    if positions == "rotary" and width // heads % 2:
        raise ValueError(
            f"rotary positions turn pairs of coordinates: expected an even width per head, got {width} / {heads}"
        )


@dataclass(frozen=True, kw_only=True)
class GPTOptions(ModelOptions):
    """The options of a GPT; ``vocabulary`` null takes that of the text."""

    vocabulary: int | None = at_least(1, None)
    width: int = at_least(1, 128)
    heads: int = at_least(1, 4)
    layers: int = at_least(1, 4)
    positions: Positions = "learned"
    tied: bool = True
    dropout: float = between(0, 1, 0.0)


def make_gpt(options: GPTOptions, data: Data) -> GPT:
    """Return the GPT that the options describe, for the sequences of the data."""
    return GPT(
        options.vocabulary or data.classes,
        options.width,
        options.heads,
        options.layers,
        data.sample_shape[0],
        options.positions,
        options.tied,
        options.dropout,
    )


def gpt_problems(options: GPTOptions, data: Data) -> list[str]:
    """Refuses all but rows of ids, and a width that cannot be divided among the heads."""
    shape, problems = list(data.sample_shape), []
    if data.sample_dtype.is_floating_point or len(shape) != 1:
        problems.append(f"model.name: gpt takes rows of ids, the data have {data.sample_dtype} of shape {shape}")
    per_head, rest = divmod(options.width, options.heads)
    if rest or (options.positions == "rotary" and per_head % 2):
        even = "an even multiple" if options.positions == "rotary" else "a multiple"
        problems.append(f"model.width: expected {even} of model.heads={options.heads}, got {options.width}")
    return problems
