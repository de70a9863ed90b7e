"""A mixture of experts of which each device has some: rows travel to the devices of their experts, and results back.

Where tokens are split over the same axes as experts, each device

1. sorts its rows by the device that has their expert, and by expert,
2. tells the others how many rows it has for each of their experts (an all-to-all of few numbers),
3. sends each of them its rows (an all-to-all of parts that are not even),
4. sorts what came by expert, and has its experts compute it,
5. sends the results back the same way, where they are weighted and summed.

No row is left out, however many an expert gets. The backward sends gradients of the results there, and gradients of the
rows back. Rows that are sorted by expert stand in the order of tokens, as on one device. Experts over axes along which
the tokens are replicated need no exchange: each device computes the rows of its own ones, and the results are partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.capture.tracing.experts import by_expert, combined, dispatched, within_experts
from shardwright.compiler.mesh.collectives import Axes, Communicator

Span = tuple[int, int]
"""Experts of one device: the first, and the one behind the last."""


def experts(
    x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, held: Sequence[Span],
    count: int, comm: Communicator, axes: Axes,
) -> Tensor:  # fmt: skip
    """Return for each token here the weighted sum of what those of its experts give that the members have.

    Args:
        held: the experts of each member along ``axes``, in rank order; one, where they have no axes.
        count: how many experts there are, those that no member has included.
    """
    keys, sizes = _keys(chosen, held, count), [stop - start for start, stop in held]
    order, ends = by_expert(keys, sum(sizes))
    if not axes:
        order = order if sum(sizes) == count else order[: _last(ends)]
        rows = within_experts(dispatched(x, order, chosen.shape[1]), ends, up, down, activation)
        return combined(rows, order, weights)
    counts = ends.diff(prepend=ends.new_zeros(1))
    exchange = _Exchange.of(counts, sizes, comm, axes)
    order = order[: sum(exchange.sent)]
    rows = exchange.there(dispatched(x, order, chosen.shape[1]))
    rows = within_experts(dispatched(rows, exchange.order, 1), exchange.ends, up, down, activation)
    inverse = exchange.order.argsort()
    return combined(exchange.back(dispatched(rows, inverse, 1)), order, weights)


def _keys(chosen: Tensor, held: Sequence[Span], count: int) -> Tensor:
    """Return for each choice where its expert stands among those of the members, behind all where none has it."""
    places = [count] * (count + 1)
    number = 0
    for start, stop in held:
        places[start:stop] = range(number, number + stop - start)
        number += stop - start
    if places[:count] == list(range(count)):
        return chosen
    table = torch.tensor(places, device=chosen.device)
    return table[chosen.clamp(max=count)]


def _last(ends: Tensor) -> int:
    return int(ends[-1]) if len(ends) else 0


@dataclass(frozen=True)
class _Exchange:
    """The rows that go to each member and come from it, and the order by expert of those that came."""

    sent: list[int]
    received: list[int]
    order: Tensor
    ends: Tensor
    comm: Communicator
    axes: Axes

    @classmethod
    def of(cls, counts: Tensor, sizes: Sequence[int], comm: Communicator, axes: Axes) -> _Exchange:
        """Tell the members how many rows there are for each expert of theirs, and hear of them how many come here."""
        members = comm.mesh.group(comm.rank, axes)
        mine = sizes[members.index(comm.rank)]
        coming = comm.exchange_rows(counts, sizes, [mine] * len(sizes), axes).view(len(sizes), mine)
        sent = [part.sum() for part in torch.split(counts, list(sizes))]
        both = torch.stack([torch.stack(sent), coming.sum(1)]).tolist()
        labels = torch.arange(mine, device=counts.device).repeat(len(sizes))
        order = labels.repeat_interleave(coming.flatten(), output_size=sum(both[1])).argsort(stable=True)
        return cls(both[0], both[1], order, coming.sum(0).cumsum(0), comm, axes)

    def there(self, rows: Tensor) -> Tensor:
        """Return the rows of all members for the experts here."""
        return self._moved(rows, self.sent, self.received)

    def back(self, rows: Tensor) -> Tensor:
        """Return the results of the rows from here, from all members."""
        return self._moved(rows, self.received, self.sent)

    def _moved(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        moved: Tensor = _Moved.apply(rows, sent, received, self.comm, self.axes)  # type: ignore[no-untyped-call]
        return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], comm: Communicator, axes: Axes) -> Tensor:
        ctx.back = received, sent, axes
        ctx.comm = comm
        return comm.exchange_rows(rows.contiguous(), sent, received, axes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.comm.exchange_rows(gradient.contiguous(), *ctx.back), None, None, None, None
