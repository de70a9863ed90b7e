"""Attention of some queries over some keys, and how such parts are merged, forward and backward.

A part gives its result with two numbers for each query: its greatest score, and the sum of the exponentials of its
scores less that one. From these the results of several parts are merged into that of all keys (Milakov, Gimelshein,
*Online normalizer calculation for softmax*, 2018), and the backward of a part needs of the others nothing but the
merged result and numbers. Torch's kernels give the logarithm of a sum, which is as good: a score with a sum of 1. Where
there are no kernels, and with a mask or dropout, blocks of scores are made, one at a time.

Causal attention of queries from one position on, over keys from another on, falls into parts that are whole and squares
on the diagonal: no mask is ever made but that of a square of a block.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.capture import operators
from shardwright.compiler.lower.operators import randomness

Span = tuple[int, int]
"""Rows of a sequence: the first, and the one behind the last."""

# Scores in a block, where torch has no kernel: what stays in the caches of a CPU; enough to fill a GPU.
_MOST_CPU, _MOST_GPU = 1 << 20, 1 << 25
_MOST_WIDTH, _MULTIPLE = 256, 8  # of the heads that torch's kernels for GPUs take
_APART = 0.05  # by which half precision may round otherwise, beside the largest number


@dataclass(frozen=True)
class Part:
    """Rows of queries and of keys, counted from the first ones here; the ``diagonal`` ones are causal, and as many."""

    queries: slice
    keys: slice
    diagonal: bool = False


def parts_of(queries: Span, keys: Span, is_causal: bool) -> Iterator[Part]:
    """Yield the parts in which queries attend to keys, where query i sees the keys up to the i-th if it is causal."""
    (first, end), (start, stop) = queries, keys
    if first >= end or start >= stop:
        return
    if not is_causal:
        yield Part(slice(0, end - first), slice(0, stop - start))
        return
    seen = min(stop, first)  # before here all queries see all keys
    if start < seen:
        yield Part(slice(0, end - first), slice(0, seen - start))
    low, high = max(start, first), min(stop, end)
    if low < high:
        here = slice(low - start, high - start)
        yield Part(slice(low - first, high - first), here, diagonal=True)
        if high < end:
            yield Part(slice(high - first, end - first), here)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of several parts are summed."""
    return torch.promote_types(dtype, torch.float32)


def nothing_attended(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of no keys, to merge others into: zeros, no score, and sums of 0.

    Heads of a query lie beside each other, as those of torch's kernels do.
    """
    batch, heads, rows, _ = query.shape
    dtype = wide(query.dtype)
    result = query.new_zeros(batch, rows, heads, value.shape[-1], dtype=dtype).transpose(1, 2)
    return result, query.new_tensor((-math.inf, 0.0), dtype=dtype).repeat(batch, heads, rows, 1)


def merge(result: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Merge the result of other keys, and its sums, into those of the same queries, in place."""
    greatest = torch.maximum(sums[..., 0], part_sums[..., 0])
    base = _finite(greatest)
    ours, theirs = (of[..., 1] * (of[..., 0] - base).exp_() for of in (sums, part_sums))
    total = ours + theirs
    shared = total.clamp(min=torch.finfo(total.dtype).tiny)  # of a query that has seen no key yet
    result.mul_((ours / shared).unsqueeze(-1)).addcmul_(part.to(result.dtype), (theirs / shared).unsqueeze(-1))
    torch.stack((greatest, total), -1, out=sums)


def _finite(scores: Tensor) -> Tensor:
    """Return greatest scores, and 0 where there are none."""
    return scores.masked_fill(scores == -math.inf, 0)


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries (batch, heads, rows, width), keys and values; of these a head may serve several heads of queries."""


@dataclass(frozen=True)
class Dropped:
    """What is dropped of the weights of a part, drawn by the global position of every one.

    ``shape`` is the global shape of the weights, of which those of the part start at ``offsets``; its heads here have
    the dims ``leading``.
    """

    p: float
    key: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    leading: tuple[int, ...]

    def factors(self, rows: slice, weights: Tensor) -> Tensor:
        """Return what the weights of some rows, of all heads, are multiplied with: 0, or what makes up for those."""
        *before, first, column = self.offsets
        offsets, shape = (*before, first + rows.start, column), (*self.leading, *weights.shape[-2:])
        kept = randomness.kept(self.key, self.p, self.shape, offsets, shape, weights.device)
        return kept.view(weights.shape).to(weights.dtype).mul_(1 / (1 - self.p) if self.p < 1 else 0.0)


@dataclass(frozen=True)
class Scores:
    """How the scores of a part become weights.

    ``diagonal`` ones are causal, with as many keys as queries. A ``mask`` (batch, heads, rows, keys), of which any dim
    may be 1, is added to them, or says which are seen; its gradient is added to ``of_mask``.
    """

    scale: float
    diagonal: bool = False
    mask: Tensor | None = None
    of_mask: Tensor | None = None
    dropped: Dropped | None = None


def attend(heads: Heads, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the result of a part and its sums (batch, heads, rows, 2)."""
    return _way_of(heads, scores).attend(_adjacent(heads), scores)


def gradients(gradient: Tensor, heads: Heads, result: Tensor, sums: Tensor, scores: Scores) -> Heads:
    """Return the gradients of queries, keys and values of a part from those of the merged result and its sums."""
    way = _way_of(heads, scores)
    return way.gradients(_aligned(gradient), _aligned(result), _adjacent(heads), sums, scores)


def _adjacent(heads: Heads) -> Heads:
    query, key, value = map(_aligned, heads)
    return query, key, value


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor with the numbers of a row beside each other, as kernels take them."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Blocks:
    """Blocks of scores, of some queries and all keys each, one at a time."""

    def attend(self, heads: Heads, scores: Scores) -> tuple[Tensor, Tensor]:
        query, key, value = heads
        result, sums = nothing_attended(query, value)
        for rows in self._rows(query, key):
            weights = self._scores(query, key, rows, scores)
            greatest = weights.amax(-1, keepdim=True)
            total = weights.sub_(_finite(greatest)).exp_().sum(-1, keepdim=True)
            sums[:, :, rows] = _ungrouped(torch.cat((greatest, total), -1))
            weights.div_(total.clamp_(min=torch.finfo(total.dtype).tiny))
            if scores.dropped is not None:
                weights.mul_(scores.dropped.factors(rows, weights))
            result[:, :, rows] = _ungrouped(weights @ _by_group(value, query, None).to(weights.dtype))
        return result.to(query.dtype), sums

    def gradients(self, gradient: Tensor, result: Tensor, heads: Heads, sums: Tensor, scores: Scores) -> Heads:
        query, key, value = heads
        dtype = wide(query.dtype)
        of_query = torch.zeros_like(query, dtype=dtype)
        keys, values = (_by_group(x, query, None).to(dtype) for x in (key, value))
        of_key, of_value = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in self._rows(query, key):
            weights = self._scores(query, key, rows, scores)
            greatest, total = torch.split(_by_group(sums, key, rows), 1, -1)
            weights.sub_(_finite(greatest)).exp_().div_(total.clamp(min=torch.finfo(dtype).tiny))
            here = _by_group(gradient, key, rows).to(dtype)
            common, of_weights = (here * _by_group(result, key, rows)).sum(-1, keepdim=True), here @ values.mT
            left = weights
            if scores.dropped is not None:
                factors = scores.dropped.factors(rows, weights)
                left, of_weights = weights * factors, of_weights.mul_(factors)
            of_value += (left.mT @ here).sum(2, keepdim=True)
            weights.mul_(of_weights.sub_(common))
            if scores.of_mask is not None:
                there = scores.of_mask[:, :, rows] if scores.of_mask.shape[2] > 1 else scores.of_mask
                there += _ungrouped(weights).sum_to_size(there.shape)
            weights.mul_(scores.scale)
            of_query[:, :, rows] = _ungrouped(weights @ keys)
            of_key += (weights.mT @ _by_group(query, key, rows).to(dtype)).sum(2, keepdim=True)
        return of_query, of_key.squeeze(2), of_value.squeeze(2)

    @staticmethod
    def _rows(query: Tensor, key: Tensor) -> Iterator[slice]:
        batch, heads, count, _ = query.shape
        most = _MOST_CPU if query.is_cpu else _MOST_GPU
        step = max(most // max(batch * heads * key.shape[-2], 1), 1)
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    @staticmethod
    def _scores(query: Tensor, key: Tensor, rows: slice, scores: Scores) -> Tensor:
        """Return scores (batch, heads of keys, heads of queries that share one, rows, keys)."""
        dtype = wide(query.dtype)
        found = (_by_group(query, key, rows).to(dtype) * scores.scale) @ _by_group(key, query, None).to(dtype).mT
        if scores.diagonal:
            hidden = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).triu_(rows.start + 1)
            found.masked_fill_(hidden, -math.inf)
        if (mask := scores.mask) is not None:
            mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
            mask = mask.unsqueeze(2) if mask.shape[1] == 1 else _by_group(mask, key, slice(None))
            found = found.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else found.add_(mask)
        return found


def _by_group(x: Tensor, other: Tensor, rows: slice | None) -> Tensor:
    """Return some rows of heads with a dim of those that share a head of keys, of size 1 for keys themselves."""
    if rows is None:
        return x.unsqueeze(2)
    chosen = x[:, :, rows]
    return chosen.reshape(len(x), other.shape[1], -1, *chosen.shape[2:])


def _ungrouped(x: Tensor) -> Tensor:
    return x.flatten(1, 2)


def _sums(logs: Tensor) -> Tensor:
    """Return logarithms of sums as sums."""
    return torch.stack((logs, torch.ones_like(logs)), -1)


def _logs(sums: Tensor) -> Tensor:
    return sums[..., 0] + sums[..., 1].log()


class _CpuKernels:
    """Torch's kernels for CPUs."""

    def attend(self, heads: Heads, scores: Scores) -> tuple[Tensor, Tensor]:
        diagonal, scale = scores.diagonal, scores.scale
        result, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, diagonal, scale=scale)
        return result, _sums(logs)

    def gradients(self, gradient: Tensor, result: Tensor, heads: Heads, sums: Tensor, scores: Scores) -> Heads:
        found: Heads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *heads, result, _logs(sums), 0.0, scores.diagonal, scale=scores.scale
        )
        return found


class _GpuKernels:
    """Torch's kernels for GPUs, of half precision."""

    def attend(self, heads: Heads, scores: Scores) -> tuple[Tensor, Tensor]:
        diagonal, scale = scores.diagonal, scores.scale
        result, logs, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, diagonal, scale=scale)
        return result, _sums(logs)

    def gradients(self, gradient: Tensor, result: Tensor, heads: Heads, sums: Tensor, scores: Scores) -> Heads:
        query, key, _ = heads
        no_seed = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_zeros(0)
        found: Heads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, *heads, result, _logs(sums).contiguous(), None, None, query.shape[-2], key.shape[-2], 0.0,
            scores.diagonal, *no_seed, scale=scores.scale,
        )  # fmt: skip
        return found


_Way = _Blocks | _CpuKernels | _GpuKernels
_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _way_of(heads: Heads, scores: Scores) -> _Way:
    """Return what attends in parts on the device of such heads."""
    query, _, value = heads
    width = query.shape[-1]
    by_numbers = scores.mask is not None or scores.dropped is not None
    if by_numbers or width != value.shape[-1] or len({x.dtype for x in heads}) > 1:
        return _Blocks()
    if query.is_cpu:
        return _CpuKernels() if query.dtype in _CPU_DTYPES else _Blocks()
    if query.is_cuda and query.dtype in operators.HALF and width <= _MOST_WIDTH and width % _MULTIPLE == 0:
        return _way_on_gpu(query.device, query.dtype, width)
    return _Blocks()


@cache
def _way_on_gpu(device: torch.device, dtype: torch.dtype, width: int) -> _Way:
    """Return torch's kernels, once they have given on a GPU what blocks give, to the rounding of half precision.

    Cached by the device, and by the dtype and width of heads, by which torch chooses a kernel.
    """
    return _checked(_GpuKernels(), device, dtype, width)


def _checked(kernels: _Way, device: torch.device, dtype: torch.dtype, width: int) -> _Way:
    """Return the kernels, or blocks with a warning where kernels fail or give something else."""
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            apart = max(_apart(kernels, device, dtype, width, diagonal) for diagonal in (False, True))
        problem = "" if apart <= _APART else f"the kernels give other numbers, which deviate by {apart:.2g}"
    except Exception as error:  # of a kernel that is not there for this GPU
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if not problem:
        return kernels
    warnings.warn(
        f"attention in parts makes blocks of scores, as torch's kernels cannot be used: {problem}", stacklevel=3
    )
    return _Blocks()


def _apart(kernels: _Way, device: torch.device, dtype: torch.dtype, width: int, diagonal: bool) -> float:
    """Return how far kernels and blocks are apart on two parts, beside the largest number."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
    heads = tuple(torch.randn(2, count, 160, width, **options) for count in (4, 2, 2))
    gradient = torch.randn(2, 4, 160, width, **options)
    found = [_both_ways(way, heads, gradient, diagonal) for way in (kernels, _Blocks())]
    apart = [(a.double() - b).abs().max() / b.double().abs().max() for a, b in zip(*found, strict=True)]
    return float(torch.stack(apart).nan_to_num(nan=math.inf).max())


def _both_ways(way: _Way, heads: Any, gradient: Tensor, diagonal: bool) -> list[Tensor]:
    """Return what attention over some keys gives and its gradients, where as many others count beside them."""
    scores = Scores(0.125, diagonal)
    result, sums = way.attend(heads, scores)
    found = way.gradients(gradient, result, heads, sums.mul(sums.new_tensor((1, 2))), scores)
    return [result, _logs(sums), *found]
