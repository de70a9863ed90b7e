"""Attention over keys that are split along the sequence, whose blocks go round the ranks in a ring.

Every rank holds its rows of queries, keys and values. In each of P rounds it attends to one block of keys and values,
which then goes on to the next rank, so that a rank holds two blocks at most: the one that it attends to, and the one
that comes meanwhile. The results of the rounds are merged as `attention_parts` says. In the backward blocks go round
once more, and the gradients of a block travel behind it: after P rounds they are at the rank that holds its keys.

Causal queries see the keys before them alone, so that the last rank would attend to all blocks and the first to its
own. Where queries and keys are cut alike, ranks exchange rows before and after (zig-zag): the sequence is cut into 2 P
stretches, and rank i works on the i-th and the i-th from the end, which together see as many keys as those of others.

After Liu, Zaharia, Abbeel, *Ring attention with blockwise transformers for near-infinite context* (2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.lower.operators.attention_parts import (
    Dropped,
    Heads,
    Part,
    Scores,
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
Spans = tuple[Span, ...]
"""Stretches of the sequence, one behind the other."""


@dataclass(frozen=True)
class _Dropout:
    """Dropout of the weights by their global position: ``offsets`` are those of the queries here and the first key."""

    p: float
    key: int
    shape: Sequence[int]
    offsets: Sequence[int]

    def of(self, leading: Shape, query: int, key: int) -> Dropped:
        """Return that of a part, whose first query and key are these rows."""
        return Dropped(self.p, self.key, tuple(self.shape), (*self.offsets[:-2], query, key), leading)


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None,
    enable_gqa: bool, queries: Span, keys: Sequence[Span], comm: Communicator, axes: Axes, p: float = 0.0,
    random_key: int = 0, shape: Sequence[int] = (), offsets: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Return what the queries here attend to among the keys of all ranks along ``axes``.

    Args:
        mask: of the queries here, and of all keys.
        queries: the rows of the sequence that the queries here are.
        keys: the rows that the keys of each of the ranks are, in rank order.
        p: the share of the weights that is dropped.
        random_key: what it is drawn by.
        shape: the global shape of the weights.
        offsets: where the weights of the queries here start.
    """
    held, dropout = tuple((rows,) for rows in keys), _Dropout(p, random_key, shape, offsets) if p else None
    ring = _Ring(is_causal, _scale(query, scale), (queries,), held, comm, axes, dropout)
    return _attention(query, key, value, mask, enable_gqa, ring)


def balanced_ring_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, enable_gqa: bool, rows: Sequence[Span],
    comm: Communicator, axes: Axes, p: float = 0.0, random_key: int = 0, shape: Sequence[int] = (),
    offsets: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Return the same of causal queries whose rows on each rank are those of the keys, by as much work on each.

    Args:
        rows: those that each of the ranks has, in rank order.
        p: the share of the weights that is dropped; this and what follows is as `ring_attention` has it.
    """
    dropout = _Dropout(p, random_key, shape, offsets) if p else None
    exchange = _Exchange(tuple((span,) for span in rows), _both_ends(rows), comm, axes)
    ring = _Ring(
        True, _scale(query, scale), exchange.inside[exchange.place], exchange.inside, comm, axes, dropout, exchange
    )
    return _attention(query, key, value, None, enable_gqa, ring)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, first_query: int, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Return causal attention of the queries from ``first_query`` on, over all keys, which are here."""
    queries, keys = (first_query, first_query + query.shape[-2]), (0, key.shape[-2])
    return _attention(query, key, value, None, enable_gqa, _Ring(True, _scale(query, scale), (queries,), ((keys,),)))


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool, ring: _Ring) -> Tensor:
    found: Tensor = _RingAttention.apply(query, key, value, mask, enable_gqa, ring)  # type: ignore[no-untyped-call]
    return found


def _both_ends(rows: Sequence[Span]) -> tuple[Spans, ...]:
    """Return the stretches that each rank works on: as many rows as it has, half of them from the end of the sequence.

    The rank of the first rows has the first stretch and the last one.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    counts = [stop - start for start, stop in (rows[at] for at in order)]
    sizes = [*(count - count // 2 for count in counts), *(count // 2 for count in reversed(counts))]
    spans = [(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    of = {at: (spans[i], spans[-1 - i]) for i, at in enumerate(order)}
    return tuple(of[at] for at in range(len(rows)))


def _count(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def _placed(spans: Spans) -> Iterator[tuple[int, Span]]:
    """Yield each stretch with the place of its first row among those here."""
    at = 0
    for start, stop in spans:
        yield at, (start, stop)
        at += stop - start


@dataclass(frozen=True)
class _Exchange:
    """An exchange of rows between the ranks along ``axes``: from what each has to what it works on, and back."""

    outside: tuple[Spans, ...]
    inside: tuple[Spans, ...]
    comm: Communicator
    axes: Axes

    @cached_property
    def place(self) -> int:
        """Return which of the members this rank is."""
        return self.comm.mesh.group(self.comm.rank, self.axes).index(self.comm.rank)

    def enter(self, *tensors: Tensor) -> list[Tensor]:
        """Return tensors (..., rows, width) of the rows to work on."""
        return self._moved(tensors, self.outside, self.inside)

    def leave(self, *tensors: Tensor) -> list[Tensor]:
        """Return them of the rows that were here before."""
        return self._moved(tensors, self.inside, self.outside)

    def _moved(self, tensors: Sequence[Tensor], before: tuple[Spans, ...], after: tuple[Spans, ...]) -> list[Tensor]:
        rows = torch.cat([x.movedim(-2, 0).flatten(1) for x in tensors], 1)
        sent = [list(_shared(before[self.place], spans)) for spans in after]
        received = [list(_shared(after[self.place], spans)) for spans in before]
        there, here = ([sum(part.stop - part.start for part in parts) for parts in of] for of in (sent, received))
        in_order = torch.cat([rows[part] for parts in sent for part in parts] or [rows])
        brought, at = self.comm.exchange_rows(in_order, there, here, self.axes), 0
        found = torch.empty_like(brought)
        for part in (part for parts in received for part in parts):
            found[part] = brought[at : at + part.stop - part.start]
            at += part.stop - part.start
        shapes = [(len(found), *x.shape[:-2], x.shape[-1]) for x in tensors]
        each = torch.split(found, [math.prod(shape[1:]) for shape in shapes], 1)
        return [x.reshape(shape).movedim(0, -2) for x, shape in zip(each, shapes, strict=True)]


def _shared(here: Spans, there: Spans) -> Iterator[slice]:
    """Yield the rows that are in both, by their places here and in the order of the sequence."""
    for at, (start, stop) in sorted(_placed(here), key=lambda each: each[1]):
        for first, end in sorted(there):
            low, high = max(start, first), min(stop, end)
            if low < high:
                yield slice(at + low - start, at + high - start)


@dataclass(frozen=True)
class _Ring:
    """The ring of one rank: the rows of its queries, and those of the keys of every member in rank order."""

    is_causal: bool
    scale: float
    queries: Spans
    keys: tuple[Spans, ...]
    comm: Communicator | None = None
    axes: Axes = ()
    dropout: _Dropout | None = None
    exchange: _Exchange | None = None

    @cached_property
    def place(self) -> int:
        """Return which of the members this rank is."""
        return 0 if self.comm is None else self.comm.mesh.group(self.comm.rank, self.axes).index(self.comm.rank)

    def rows_in(self, turn: int) -> Spans:
        """Return the rows of the block that is here in a round."""
        return self.keys[(self.place - turn) % len(self.keys)]

    def parts_in(self, turn: int) -> Iterator[tuple[Part, Span]]:
        """Yield the parts of a round, each with the rows of the sequence that its first query and key are."""
        for query, rows in _placed(self.queries):
            for key, columns in _placed(self.rows_in(turn)):
                for part in parts_of(rows, columns, self.is_causal):
                    first = rows[0] + part.queries.start, columns[0] + part.keys.start
                    yield Part(_behind(part.queries, query), _behind(part.keys, key), part.diagonal), first

    def shift(self, block: Tensor) -> Callable[[], Tensor]:
        """Begin to send a block to the next rank; what is returned waits for that of the rank before."""
        return (lambda: block) if self.comm is None else self.comm.start_shift(block, self.axes)


def _behind(rows: slice, count: int) -> slice:
    return slice(rows.start + count, rows.stop + count)


class _Blocks:
    """Blocks of keys and values, or of their gradients: each one tensor, which has room for the most rows of any."""

    def __init__(self, key: Tensor, value: Tensor, ring: _Ring) -> None:
        rows = max(map(_count, ring.keys))
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
        count = _count(self._ring.rows_in(turn))
        key, value = (room[..., :count, :] for room in self._rooms(block))
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

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> None:
        inner = 3 if enable_gqa else 2  # few heads of keys serve those of queries as they are
        leading = tuple(torch.broadcast_shapes(*(x.shape[:-inner] for x in (query, key, value))))  # type: ignore[no-untyped-call]
        self.of_queries: Shape = leading + query.shape[-inner:-2]
        self.of_keys: Shape = leading + key.shape[-inner:-2]
        self.mask = None if mask is None else self._apart_mask(mask)

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> Heads:
        return self.apart(query, self.of_queries), self.apart(key, self.of_keys), self.apart(value, self.of_keys)

    def parts(self, ring: _Ring, turn: int, of_mask: Tensor | None = None) -> Iterator[tuple[Part, Scores]]:
        """Yield the parts of a round, none of a rank without heads; ``of_mask`` takes the gradient of the mask."""
        if 0 in (*self.of_queries, *self.of_keys):
            return
        for part, (query, key) in ring.parts_in(turn):
            dropped = None if ring.dropout is None else ring.dropout.of(self.of_queries, query, key)
            columns = slice(key, key + part.keys.stop - part.keys.start)
            mask, gradient = (None if x is None else _cut(x, part.queries, columns) for x in (self.mask, of_mask))
            yield part, Scores(ring.scale, part.diagonal, mask, gradient, dropped)

    def mask_back(self, x: Tensor, like: Tensor) -> Tensor:
        """Return the gradient of the mask as it came."""
        whole = x.reshape(like.shape) if x.numel() == like.numel() else self.back(x, self.of_queries, like.shape)
        return whole.to(like.dtype)

    def _apart_mask(self, mask: Tensor) -> Tensor:
        """Return a mask with four dims, of which those that broadcast are not expanded where they need not be."""
        mask = mask[(None,) * max(2 - mask.ndim, 0)]
        leading, inner = mask.shape[:-2], mask.shape[-2:]
        if math.prod(leading) == 1:
            return mask.reshape(1, 1, *inner)
        if len(leading) <= 2:
            return mask if len(leading) == 2 else mask.unsqueeze(0)
        return self.apart(mask, self.of_queries)

    @staticmethod
    def apart(x: Tensor, leading: Shape) -> Tensor:
        """Return a tensor with these leading dims, as many as kernels take."""
        batch, heads = math.prod(leading[:-1]), leading[-1] if leading else 1
        return x.expand(*leading, *x.shape[-2:]).reshape(batch, heads, *x.shape[-2:])

    @staticmethod
    def back(x: Tensor, leading: Shape, shape: Shape) -> Tensor:
        """Return the sum of such a tensor in the shape that broadcast to it."""
        return x.reshape(*leading, *x.shape[-2:]).sum_to_size(shape)


def _cut(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return a part of a mask, of which dims that broadcast stay as they are."""
    return mask[:, :, rows if mask.shape[2] > 1 else slice(None), columns if mask.shape[3] > 1 else slice(None)]


def _at(rows: slice) -> tuple[slice, slice, slice]:
    return slice(None), slice(None), rows


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool, ring: _Ring
    ) -> Tensor:
        form = _Form(query, key, value, mask, enable_gqa)
        if ring.exchange is not None:
            query, key, value = ring.exchange.enter(query, key, value)
        result = sums = None
        for turn, *block in _Blocks(key, value, ring).rounds(key, value):
            queries, keys, values = form.heads(query, *block)
            if result is None or sums is None:
                result, sums = nothing_attended(queries, values)
            for part, scores in form.parts(ring, turn):
                rows, columns = _at(part.queries), _at(part.keys)
                merge(result[rows], sums[rows], *attend((queries[rows], keys[columns], values[columns]), scores))
        assert result is not None, "there is a round"
        result = result.to(query.dtype)
        if ring.exchange is not None:
            [result] = ring.exchange.leave(result)
        ctx.save_for_backward(query, key, value, mask, result, sums)
        ctx.enable_gqa, ctx.ring = enable_gqa, ring
        return result.view(*form.of_queries, *result.shape[-2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The casts of autocast are operators of the graph, also where a backward is called within one.
        with torch.autocast(gradient.device.type, enabled=False):
            query, key, value, mask, result, sums = ctx.saved_tensors
            form, of_mask = _Form(query, key, value, mask, ctx.enable_gqa), None
            if form.mask is not None and ctx.needs_input_grad[3]:
                of_mask = torch.zeros_like(form.mask, dtype=wide(form.mask.dtype))
            found = _gradients(form, ctx.ring, gradient, query, key, value, result, sums, of_mask)
            of_mask = None if of_mask is None else form.mask_back(of_mask, mask)
        return *found, of_mask, None, None


def _gradients(
    form: _Form, ring: _Ring, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, sums: Tensor,
    of_mask: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values; that of a mask is added to ``of_mask``."""
    gradient = form.apart(gradient, form.of_queries)
    if ring.exchange is not None:
        gradient, result = ring.exchange.enter(gradient, result)
    blocks, behind = _Blocks(key, value, ring), None
    of_query = torch.zeros_like(form.apart(query, form.of_queries), dtype=wide(query.dtype))
    for turn, *block in blocks.rounds(key, value):
        of_keys = blocks.zeros()
        of_block, heads = blocks.within(of_keys, turn), form.heads(query, *block)
        for part, scores in form.parts(ring, turn, of_mask):
            rows, columns = _at(part.queries), _at(part.keys)
            chosen = heads[0][rows], heads[1][columns], heads[2][columns]
            of_part = gradients(gradient[rows], chosen, result[rows], sums[rows], scores)
            of_query[rows] += of_part[0]
            for total, addend in zip(of_block, of_part[1:], strict=True):
                here = total[..., part.keys, :]
                here += form.back(addend, form.of_keys, here.shape)
        if behind is not None:
            of_keys += behind()
        behind = ring.shift(of_keys)
    assert behind is not None, "there is a round"
    of_key, of_value = blocks.within(behind(), 0)
    whole = form.back(of_query, form.of_queries, query.shape), of_key, of_value
    found = [x.to(like.dtype) for x, like in zip(whole, (query, key, value), strict=True)]
    return found if ring.exchange is None else ring.exchange.leave(*found)
