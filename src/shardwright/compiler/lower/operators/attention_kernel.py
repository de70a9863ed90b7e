"""Kernels of attention with dropout on a GPU, whose scores stay in the registers of a block, forward and backward.

As FlashAttention (Dao, *FlashAttention-2*, 2023) without its split of work: the forward keeps the logarithm of each
query's summed exponentials, and the backward computes scores again. What is dropped follows from the global position of
a score, as in `randomness`, so that it does not depend on how heads or queries are split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.lower.operators.mask_kernel import word_of

_ROWS, _COLUMNS = 64, 64


@dataclass(frozen=True)
class Dropped:
    """The arguments of the kernels that are numbers.

    ``start`` is the first query, ``across`` how many keys there are on all ranks, ``inverse`` the factor of what stays;
    ``first``, ``second`` and ``limit`` are as of `randomness.words_below`.
    """

    is_causal: bool
    scale: float
    start: int
    across: int
    inverse: float
    first: int
    second: int
    limit: int

    def given(self) -> tuple[float, ...]:
        """Return what the kernels take after the sizes; exponentials are those of 2."""
        numbers = self.scale, self.scale / math.log(2), self.inverse
        return (self.start, self.across, *numbers, self.first, self.second, self.limit)


def attention(query: Tensor, key: Tensor, value: Tensor, bases: Tensor, how: Dropped) -> Tensor:
    """Attention of heads ``[heads, queries, width]``, of which consecutive ones share one of ``[heads, keys, width]``.

    ``bases`` has for each head the global position of its first score, as int32.
    """
    result: Tensor = _Attention.apply(query, key, value, bases, how)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bases: Tensor, how: Dropped) -> Tensor:
        query, key, value = (x.contiguous() for x in (query, key, value))
        found = torch.empty_like(query)
        sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        grid, sizes, settings = _launch(query, key, how)
        _forward[grid](query, key, value, bases, found, sums, *sizes, *how.given(), **settings)
        ctx.save_for_backward(query, key, value, bases, found, sums)
        ctx.how = how
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bases, found, sums = ctx.saved_tensors
        gradient, how = gradient.contiguous(), ctx.how
        common = (found.float() * gradient.float()).sum(-1)
        made = [torch.empty_like(x) for x in (query, key, value)]
        grid, sizes, settings = _launch(query, key, how)
        given = (query, key, value, bases, gradient, sums, common)
        _of_queries[grid](*given, made[0], *sizes, *how.given(), **settings)
        grid = triton.cdiv(key.shape[1], _COLUMNS), key.shape[0]
        _of_keys[grid](*given, made[1], made[2], *sizes, *how.given(), **settings)
        return *made, None, None


def _launch(query: Tensor, key: Tensor, how: Dropped) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """The grid over blocks of queries, the sizes, and what a kernel is compiled for."""
    heads, queries, width = query.shape
    settings = {"GROUPS": heads // key.shape[0], "IS_CAUSAL": how.is_causal, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    settings |= {"WIDTH": max(triton.next_power_of_2(width), 16), "num_warps": 4, "num_stages": 2}
    return (triton.cdiv(queries, _ROWS), heads), (queries, key.shape[1], width), settings


# Keys change with each step, and other values of them are no reason to compile a kernel anew.
_CHANGING = ["first", "second", "limit"]


@triton.jit  # type: ignore[untyped-decorator]
def _block(source, head, rows, size, width, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a head, with zeros behind its end."""
    dims = tl.arange(0, WIDTH)
    there = (rows[:, None] < size) & (dims[None, :] < width)
    return tl.load(source + head * size * width + rows[:, None] * width + dims[None, :], mask=there, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _store(made, found, head, rows, size, width, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    dims = tl.arange(0, WIDTH)
    there = (rows[:, None] < size) & (dims[None, :] < width)
    at = made + head * size * width + rows[:, None] * width + dims[None, :]
    tl.store(at, found.to(made.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _seen(rows, columns, queries, keys, start, IS_CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    seen = (rows[:, None] < queries) & (columns[None, :] < keys)
    if IS_CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None] + start)
    return seen


@triton.jit
def _kept(base, rows, columns, across, first, second, limit):  # type: ignore[no-untyped-def]
    """Return which scores are not dropped; positions are those modulo 2^32."""
    position = base + rows[:, None] * across + columns[None, :]
    return word_of(position, first, second) < limit


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    query, key, value, bases, made, sums, queries, keys, width, start, across, scale, scale_of_2, inverse, first,
    second, limit, GROUPS: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q, base = _block(query, head, rows, queries, width, WIDTH), tl.load(bases + head)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    end = keys
    if IS_CAUSAL:
        end = tl.minimum(keys, start + (tl.program_id(0) + 1) * ROWS)
    for at in range(0, end, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k = _block(key, head // GROUPS, columns, keys, width, WIDTH)
        v = _block(value, head // GROUPS, columns, keys, width, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_of_2
        # Rows behind the end see what others see, so that they have a largest score; they are not stored.
        scores = tl.where(_seen(rows, columns, queries + ROWS, keys, start, IS_CAUSAL), scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights, less = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        total, largest = total * less + tl.sum(weights, 1), larger
        weights = tl.where(_kept(base, rows, columns, across, first, second, limit), weights, 0.0)
        found = found * less[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    _store(made, found * (inverse / total)[:, None], head, rows, queries, width, WIDTH)
    tl.store(sums + head * queries + rows, largest + tl.log2(total), mask=rows < queries)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    q, k, sums, head, rows, columns, queries, keys, start, scale_of_2, IS_CAUSAL: tl.constexpr
):
    """The weights of a block before any is dropped, 0 where a query does not see a key."""
    total = tl.load(sums + head * queries + rows, mask=rows < queries, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_of_2 - total[:, None]
    return tl.exp2(tl.where(_seen(rows, columns, queries, keys, start, IS_CAUSAL), scores, float("-inf")))


@triton.jit
def _of_scores(  # type: ignore[no-untyped-def]
    weights, kept, gradient, v, common, head, rows, queries, inverse
):
    """The gradient of the scores of a block."""
    of_kept = tl.where(kept, tl.dot(gradient, tl.trans(v), input_precision="ieee") * inverse, 0.0)
    return weights * (of_kept - tl.load(common + head * queries + rows, mask=rows < queries, other=0.0)[:, None])


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _of_queries(  # type: ignore[no-untyped-def]
    query, key, value, bases, gradient, sums, common, made, queries, keys, width, start, across, scale, scale_of_2,
    inverse, first, second, limit, GROUPS: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q, g = _block(query, head, rows, queries, width, WIDTH), _block(gradient, head, rows, queries, width, WIDTH)
    base = tl.load(bases + head)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    end = keys
    if IS_CAUSAL:
        end = tl.minimum(keys, start + (tl.program_id(0) + 1) * ROWS)
    for at in range(0, end, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k = _block(key, head // GROUPS, columns, keys, width, WIDTH)
        v = _block(value, head // GROUPS, columns, keys, width, WIDTH)
        weights = _weights(q, k, sums, head, rows, columns, queries, keys, start, scale_of_2, IS_CAUSAL)
        kept = _kept(base, rows, columns, across, first, second, limit)
        scores = _of_scores(weights, kept, g, v, common, head, rows, queries, inverse)
        found += tl.dot(scores.to(k.dtype), k, input_precision="ieee")
    _store(made, found * scale, head, rows, queries, width, WIDTH)


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _of_keys(  # type: ignore[no-untyped-def]
    query, key, value, bases, gradient, sums, common, of_key, of_value, queries, keys, width, start, across, scale,
    scale_of_2, inverse, first, second, limit, GROUPS: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    shared = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k, v = _block(key, shared, columns, keys, width, WIDTH), _block(value, shared, columns, keys, width, WIDTH)
    found_k, found_v = tl.zeros([COLUMNS, WIDTH], tl.float32), tl.zeros([COLUMNS, WIDTH], tl.float32)
    begin = 0
    if IS_CAUSAL:  # queries before see none of these keys
        begin = tl.maximum(tl.program_id(0) * COLUMNS - start, 0) // ROWS * ROWS
    for of_group in range(GROUPS):
        head = shared * GROUPS + of_group
        base = tl.load(bases + head)
        for at in range(begin, queries, ROWS):
            rows = at + tl.arange(0, ROWS)
            q, g = _block(query, head, rows, queries, width, WIDTH), _block(gradient, head, rows, queries, width, WIDTH)
            weights = _weights(q, k, sums, head, rows, columns, queries, keys, start, scale_of_2, IS_CAUSAL)
            kept = _kept(base, rows, columns, across, first, second, limit)
            left = tl.where(kept, weights * inverse, 0.0).to(g.dtype)
            found_v += tl.dot(tl.trans(left), g, input_precision="ieee")
            scores = _of_scores(weights, kept, g, v, common, head, rows, queries, inverse).to(q.dtype)
            found_k += tl.dot(tl.trans(scores), q, input_precision="ieee")
    _store(of_key, found_k * scale, shared, columns, keys, width, WIDTH)
    _store(of_value, found_v, shared, columns, keys, width, WIDTH)
