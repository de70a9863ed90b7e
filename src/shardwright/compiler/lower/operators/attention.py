"""Attention on local parts: causal over some of the queries, and with dropout that is drawn by position.

No kernel of torch's takes a mask of what is dropped without the scores of all queries and keys, which grow with the
square of the sequence. On GPUs half precision without a mask has kernels of ours (`attention_kernel`). Elsewhere blocks
of scores are made one after the other, and made again in the backward, which draws the same numbers: a device holds one
block at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shardwright.compiler.capture import operators
from shardwright.compiler.lower.operators import randomness
from shardwright.compiler.lower.operators.draws import dropout

Sizes = Sequence[int]
Slices = tuple[slice, ...]
# Scores in a block: what stays in the caches of a CPU; on a GPU so many that starting its kernels takes no part of it.
_MOST_CPU, _MOST_GPU = 1 << 20, 1 << 25
_FEWEST_ROWS = 128  # of a causal block: those of fewer leave out more keys, and are slower for each
_WITH_KERNELS = ("cuda",)
_MOST_WIDTH = 128  # of a head: wider ones take more shared memory than the blocks of the kernels have
_APART = 0.05  # by which half precision may round otherwise, beside the largest number
_FEWEST_GPU = 1 << 23  # scores of a causal block on a GPU: starting the kernels of more blocks takes longer


def attention_by(
    backends: Sequence[str], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Attention by the kernels that the captured step chose by `torch.nn.attention.sdpa_kernel`."""
    with operators.attention_by(backends):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )


def attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, is_causal: bool, scale: float | None,
    random_key: int, shape: Sizes, offsets: Sizes,
) -> Tensor:  # fmt: skip
    """Return attention whose dropout is drawn by the global position of every score.

    ``shape`` is the global shape of the scores (batch, heads, queries, keys), of which the part here starts at
    ``offsets``.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    rest = p, is_causal, factor, random_key, shape, offsets
    drops_some = randomness.words_below(random_key, p) is not None
    fits = mask is None and drops_some and _has_kernel(query, key, value)
    fused = one_kernel(query.device, query.dtype, query.shape[-1]) if fits else None
    return fused(query, key, value, *rest) if fused else _by_blocks(query, key, value, mask, *rest)


Fused = Callable[..., Tensor]
"""`fused_attention`, of its arguments."""


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, p: float, is_causal: bool, scale: float, random_key: int, shape: Sizes,
    offsets: Sizes,
) -> Tensor:  # fmt: skip
    """Return `attention_with_dropout` by kernels that hold no scores, where some are dropped and others are not."""
    from shardwright.compiler.lower.operators import attention_kernel  # triton comes with torch for GPUs alone

    words = randomness.words_below(random_key, p)
    assert words is not None, "all are dropped, or none"
    bases = randomness.positions(shape, offsets, (*query.shape[:-2], 1, 1), query.device)
    how = attention_kernel.Dropped(is_causal, scale, offsets[-2], shape[-1], 1 / (1 - p), *words)
    query_heads, key_heads, value_heads = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
    return attention_kernel.attention(query_heads, key_heads, value_heads, bases, how).view(query.shape)


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernels take such heads: of half precision, as float32 would need products in TF32."""
    is_half = query.dtype in operators.HALF and query.dtype == key.dtype == value.dtype
    if (
        query.device.type not in _WITH_KERNELS
        or not is_half
        or query.ndim < 3
        or 0 in (*query.shape, *key.shape)
        or query.shape[-1] > _MOST_WIDTH
    ):
        return False
    same_heads = key.shape == value.shape and query.shape[:-3] == key.shape[:-3] and query.shape[-1] == key.shape[-1]
    return same_heads and query.shape[-3] % key.shape[-3] == 0


@cache
def one_kernel(device: torch.device, dtype: torch.dtype, width: int) -> Fused | None:
    """Return what makes attention with dropout on a GPU without its scores in memory; None where that cannot be.

    It is used after it has given here what blocks of scores give, to the rounding of half precision.

    Cached by the device, and by the dtype and width of heads, for which kernels are compiled. It does not matter for
    what is dropped which of the two is given.
    """
    # The step around it may be without gradients or under autocast, and may keep what its backward needs elsewhere.
    as_they_are = torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), as_they_are:
            apart = _apart(device, dtype, width)
        problem = "" if apart <= _APART else f"the kernels give other numbers, which deviate by {apart:.2g}"
    except Exception as error:  # there are as many as there are compilers that may be missing
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if not problem:
        return fused_attention
    warnings.warn(f"attention with dropout makes blocks of scores, as it cannot be one kernel: {problem}", stacklevel=2)
    return None


def _apart(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Return how far results and gradients of kernels and blocks are apart, beside the largest number."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
    query, key, value = heads = [torch.randn(2, n, 150, width, **options).requires_grad_() for n in (4, 2, 2)]
    gradient = torch.randn(2, 4, 150, width, **options)
    given: Any = (0.3, True, 0.125, 5, (3, 4, 200, 150), (1, 0, 50, 0))
    made = fused_attention(query, key, value, *given), _by_blocks(query, key, value, None, *given)
    found, expected = ([x.detach(), *torch.autograd.grad(x, heads, gradient)] for x in made)
    apart = [(a.double() - b).abs().max() / b.double().abs().max() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(apart).max())  # which is no number where one is none


def _by_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, is_causal: bool, factor: float,
    random_key: int, shape: Sizes, offsets: Sizes,
) -> Tensor:  # fmt: skip
    """Return the same block by block."""
    if mask is not None and mask.ndim == 1:
        mask = mask.unsqueeze(0)
    groups = query.shape[-3] // max(key.shape[-3], 1) if query.ndim > 2 else 1
    if groups > 1:  # each head of keys serves a group of queries' heads: a dim of its own
        query, key, value = _grouped(query, groups), key.unsqueeze(-3), value.unsqueeze(-3)
        if mask is not None and mask.ndim > 2:
            mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else _grouped(mask, groups)
        shape = (*shape[:-3], shape[-3] // groups, groups, *shape[-2:])
        offsets = (*offsets[:-3], offsets[-3] // groups, 0, *offsets[-2:])
    scores = _Scores(p, is_causal, factor, random_key, tuple(shape), tuple(offsets))
    result: Tensor = _Attention.apply(query, key, value, mask, scores)  # type: ignore[no-untyped-call]
    return result.flatten(-4, -3) if groups > 1 else result


@dataclass(frozen=True)
class _Scores:
    """The way from scores to weights; the fields are the arguments of `attention_with_dropout`."""

    p: float
    is_causal: bool
    scale: float
    key: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def blocks(self, leading: Sizes, queries: int, keys: int, most: int, fewest: int) -> Iterator[Slices]:
        """Blocks of at most so many scores where rows are not longer: slices of the leading dims and the queries.

        Causal ones, which leave out the keys behind their queries, have at least ``fewest``.
        """
        enough = -(-fewest // max(math.prod(leading) * keys, 1))
        rows = min(max(_FEWEST_ROWS, -(-queries // 8), enough), queries) if self.is_causal else queries
        left, extents = max(most // max(keys, 1), 1), list[int]()
        for size in (rows, *reversed(leading)):
            extents.append(max(min(size, left), 1))
            left = max(left // extents[-1], 1)
        parts = [
            [slice(start, min(start + extent, size)) for start in range(0, size, extent)]
            for size, extent in zip((*leading, queries), reversed(extents), strict=True)
        ]
        return product(*parts)

    def attend(self, at: Slices, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return what the queries of a block attend to; the tensors are those of the block."""
        if self.is_causal:
            first = self.offsets[-2] + at[-1].start
            keys = min(key.shape[-2], first + query.shape[-2])
            key, value = key[..., :keys, :], value[..., :keys, :]
            hidden = torch.ones(query.shape[-2], keys, dtype=torch.bool, device=query.device).triu_(first + 1)
        scores = query * self.scale @ key.transpose(-2, -1)
        if self.is_causal:
            scores = scores.masked_fill(hidden, -math.inf)
        elif mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if mask is None or self.is_causal:
            probabilities = scores.softmax(-1)
        else:  # a query that sees no key attends to nothing, as in torch
            blind = (scores == -math.inf).all(-1, keepdim=True)
            probabilities = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
        starts = (*(offset + part.start for offset, part in zip(self.offsets, at, strict=False)), self.offsets[-1])
        return dropout(probabilities, self.p, self.key, self.shape, starts) @ value


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: _Scores) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scores = scores
        leading = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))  # type: ignore[no-untyped-call]
        result = query.new_empty(*leading, query.shape[-2], value.shape[-1])
        for at, parts, mask_part in _blocks(scores, result, query, key, value, mask):
            result[at] = scores.attend(at, *parts, mask_part)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors, scores = ctx.saved_tensors, ctx.scores
        wanted = [i for i in range(4) if ctx.needs_input_grad[i]]
        # Sums over blocks, which half precision would round after each.
        sums = {i: torch.zeros_like(tensors[i], dtype=_wide(tensors[i].dtype)) for i in wanted}
        for at, parts, mask in _blocks(scores, gradient, *tensors):
            leaves = [part.detach().requires_grad_(i in sums) for i, part in enumerate(parts)]
            mask = mask if mask is None else mask.detach().requires_grad_(3 in sums)
            # The casts of autocast are operators of the graph, also where a backward is called within one.
            with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
                block = scores.attend(at, *leaves, mask)
            kept = [x for i, x in enumerate((*leaves, mask)) if i in sums and x is not None]
            for i, part in zip(wanted, torch.autograd.grad(block, kept, gradient[at]), strict=True):
                sums[i][_within(tensors[i], at, rows=i in (0, 3))] += part
        return *(sums[i].to(tensors[i].dtype) if i in sums else None for i in range(4)), None


def _blocks(
    scores: _Scores, result: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Iterator[tuple[Slices, tuple[Tensor, Tensor, Tensor], Tensor | None]]:
    """Return where each block lies in the result, and its parts of query, key and value and of the mask."""
    most, fewest = (_MOST_CPU, 0) if result.device.type == "cpu" else (_MOST_GPU, _FEWEST_GPU)
    for at in scores.blocks(result.shape[:-2], result.shape[-2], key.shape[-2], most, fewest):
        parts = query[_within(query, at, True)], key[_within(key, at, False)], value[_within(value, at, False)]
        yield at, parts, None if mask is None else mask[_within(mask, at, True)]


def _grouped(heads: Tensor, groups: int) -> Tensor:
    """Heads (..., heads, rows, columns) with a dim of their own for those that share a head of keys."""
    return heads.view(*heads.shape[:-3], heads.shape[-3] // groups, groups, *heads.shape[-2:])


def _within(tensor: Tensor, at: Slices, rows: bool) -> Slices:
    """Return where a block lies in a tensor that broadcasts to the scores; ``rows`` says that it has queries."""
    leading = at[:-1][len(at) + 1 - tensor.ndim :]
    parts = zip(tensor.shape[:-2], leading, strict=True)
    queries = at[-1] if rows and tensor.shape[-2] > 1 else slice(None)
    return *(slice(None) if size == 1 else part for size, part in parts), queries


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
