"""Attention over keys that are split along the sequence, whose blocks go round the ranks in a ring.

Every rank holds its rows of queries, keys and values. In each of P rounds it attends to one block of keys and values,
which then goes on to the next rank, so that a rank holds two blocks at most: the one that it attends to, and the one
that comes meanwhile. The results of the rounds are merged as `attention_parts` says. In the backward blocks go round
once more, and the gradients of a block travel behind it: after P rounds they are at the rank that holds its keys.

After Liu, Zaharia, Abbeel, *Ring attention with blockwise transformers for near-infinite context* (2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.lower.operators.attention_parts import (
    Heads,
    Part,
    Span,
    attend,
    gradients,
    merge,
    nothing_attended,
    parts_of,
    wide,
)
from shardwright.compiler.mesh.collectives import Axes, Communicator

Shape = tuple[int, ...]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, enable_gqa: bool, queries: Span,
    keys: Sequence[Span], comm: Communicator, axes: Axes,
) -> Tensor:  # fmt: skip
    """Return what the queries here attend to among the keys of all ranks along ``axes``.

    Args:
        queries: the rows of the sequence that the queries here are.
        keys: the rows that the keys of each of the ranks are, in rank order.
    """
    return _attention(
        query, key, value, enable_gqa, _Ring(is_causal, _scale(query, scale), queries, tuple(keys), comm, axes)
    )


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, first_query: int, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Return causal attention of the queries from ``first_query`` on, over all keys, which are here."""
    queries = first_query, first_query + query.shape[-2]
    return _attention(query, key, value, enable_gqa, _Ring(True, _scale(query, scale), queries, ((0, key.shape[-2]),)))


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _attention(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, ring: _Ring) -> Tensor:
    found: Tensor = _RingAttention.apply(query, key, value, enable_gqa, ring)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class _Ring:
    """The ring of one rank: the rows of its queries, and those of the keys of every member in rank order."""

    is_causal: bool
    scale: float
    queries: Span
    keys: tuple[Span, ...]
    comm: Communicator | None = None
    axes: Axes = ()

    @cached_property
    def place(self) -> int:
        """Return which of the members this rank is."""
        return 0 if self.comm is None else self.comm.mesh.group(self.comm.rank, self.axes).index(self.comm.rank)

    def rows_in(self, turn: int) -> Span:
        """Return the rows of the block that is here in a round."""
        return self.keys[(self.place - turn) % len(self.keys)]

    def parts_in(self, turn: int) -> Iterator[Part]:
        """Return the parts of a round."""
        return parts_of(self.queries, self.rows_in(turn), self.is_causal)

    def shift(self, block: Tensor) -> Callable[[], Tensor]:
        """Begin to send a block to the next rank; what is returned waits for that of the rank before."""
        return (lambda: block) if self.comm is None else self.comm.start_shift(block, self.axes)


class _Blocks:
    """Blocks of keys and values, or of their gradients: each one tensor, which has room for the most rows of any."""

    def __init__(self, key: Tensor, value: Tensor, ring: _Ring) -> None:
        rows = max(stop - start for start, stop in ring.keys)
        self._shapes = [(*x.shape[:-2], rows, x.shape[-1]) for x in (key, value)]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._key, self._ring = key, ring

    def zeros(self) -> Tensor:
        """Return an empty block of gradients: sums over rounds, which half precision would round after each."""
        return self._key.new_zeros(sum(self._sizes), dtype=wide(self._key.dtype))

    def of(self, key: Tensor, value: Tensor) -> Tensor:
        """Return keys and values as a block."""
        block = key.new_zeros(sum(self._sizes))
        for x, room in zip((key, value), self._rooms(block), strict=True):
            room[..., : x.shape[-2], :] = x
        return block

    def within(self, block: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        """Return views of the block that is here in a round: keys and values, or their gradients."""
        start, stop = self._ring.rows_in(turn)
        key, value = (room[..., : stop - start, :] for room in self._rooms(block))
        return key, value

    def rounds(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each round with its keys and values; the next block is under way until the round is over."""
        if self._ring.comm is None:
            yield 0, key, value
            return
        block, count = self.of(key, value), len(self._ring.keys)
        for turn in range(count):
            coming = self._ring.shift(block) if turn + 1 < count else None
            yield turn, *self.within(block, turn)
            if coming is not None:
                block = coming()

    def _rooms(self, block: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(torch.split(block, self._sizes), self._shapes, strict=True)]


class _Form:
    """Heads as kernels take them, (batch, heads, rows, width), whatever dims and broadcasts they come with."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
        inner = 3 if enable_gqa else 2  # few heads of keys serve those of queries as they are
        leading = tuple(torch.broadcast_shapes(*(x.shape[:-inner] for x in (query, key, value))))  # type: ignore[no-untyped-call]
        self.of_queries: Shape = leading + query.shape[-inner:-2]
        self.of_keys: Shape = leading + key.shape[-inner:-2]

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> Heads:
        return self.apart(query, self.of_queries), self.apart(key, self.of_keys), self.apart(value, self.of_keys)

    def parts(self, ring: _Ring, turn: int) -> Iterator[Part]:
        """Yield the parts of a round; of a rank without heads there are none."""
        return iter(()) if 0 in (*self.of_queries, *self.of_keys) else ring.parts_in(turn)

    @staticmethod
    def apart(x: Tensor, leading: Shape) -> Tensor:
        """Return a tensor with these leading dims, as many as kernels take."""
        batch, heads = math.prod(leading[:-1]), leading[-1] if leading else 1
        return x.expand(*leading, *x.shape[-2:]).reshape(batch, heads, *x.shape[-2:])

    @staticmethod
    def back(x: Tensor, leading: Shape, shape: Shape) -> Tensor:
        """Return the sum of such a tensor in the shape that broadcast to it."""
        return x.reshape(*leading, *x.shape[-2:]).sum_to_size(shape)


def _at(rows: slice) -> tuple[slice, slice, slice]:
    return slice(None), slice(None), rows


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, ring: _Ring) -> Tensor:
        form = _Form(query, key, value, enable_gqa)
        result = logs = None
        for turn, *block in _Blocks(key, value, ring).rounds(key, value):
            queries, keys, values = form.heads(query, *block)
            if result is None or logs is None:
                result, logs = nothing_attended(queries, values)
            for part in form.parts(ring, turn):
                rows, columns = _at(part.queries), _at(part.keys)
                found = attend((queries[rows], keys[columns], values[columns]), part.diagonal, ring.scale)
                merge(result[rows], logs[rows], *found)
        assert result is not None, "there is a round"
        result = result.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, logs)
        ctx.form, ctx.ring = form, ring
        return result.view(*form.of_queries, *result.shape[-2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The casts of autocast are operators of the graph, also where a backward is called within one.
        with torch.autocast(gradient.device.type, enabled=False):
            return *_gradients(ctx.form, ctx.ring, gradient, *ctx.saved_tensors), None, None


def _gradients(
    form: _Form, ring: _Ring, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, logs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    blocks, behind = _Blocks(key, value, ring), None
    gradient = form.apart(gradient, form.of_queries)
    of_query = torch.zeros_like(form.apart(query, form.of_queries), dtype=wide(query.dtype))
    for turn, *block in blocks.rounds(key, value):
        sums = blocks.zeros()
        of_block, heads = blocks.within(sums, turn), form.heads(query, *block)
        for part in form.parts(ring, turn):
            rows, columns = _at(part.queries), _at(part.keys)
            chosen = heads[0][rows], heads[1][columns], heads[2][columns]
            found = gradients(gradient[rows], chosen, result[rows], logs[rows], part.diagonal, ring.scale)
            of_query[rows] += found[0]
            for total, addend in zip(of_block, found[1:], strict=True):
                here = total[..., part.keys, :]
                here += form.back(addend, form.of_keys, here.shape)
        if behind is not None:
            sums += behind()
        behind = ring.shift(sums)
    assert behind is not None, "there is a round"
    of_key, of_value = blocks.within(behind(), 0)
    found_of_query = form.back(of_query, form.of_queries, query.shape)
    return found_of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)
