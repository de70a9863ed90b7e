"""Collectives of ranks on several hosts: in shared memory within each, by gloo between them.

A large tensor is cut into a piece for each rank of a host: the ranks with one place on their hosts move a piece between
them, so that all share the work of the network, to which each host sends no byte twice. A small one is one piece, that
of the first rank. What each rank has for each other one goes from rank to rank by gloo.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.distributed.backends.between.grid import PAIR, Grid, sums_parts
from shardwright.distributed.backends.between.moving import Awaited, Moves
from shardwright.distributed.backends.segment.collectives import Collectives, check_sizes
from shardwright.distributed.backends.segment.flats import ByRows, cut, flat_of, flats_of, gathering
from shardwright.distributed.backends.segment.memory import SMALL_BYTES
from shardwright.distributed.backends.segment.notes import Note, unlike
from shardwright.distributed.backends.segment.reduction import Reduction
from shardwright.errors import WorldError

# Each ends with this rank's coming to a stage within its host, or with what it waits for from other hosts.
Steps = Iterator[Awaited | None]
STRETCH_BYTES = 2**19  # at most, of what a rank moves between hosts at once
AHEAD = 3  # stretches that are between hosts at the same time


@dataclass(frozen=True)
class _UnderWay:
    """A stretch of a sum that goes between hosts.

    Attributes:
        pieces: the stretch, cut for the ranks of this host.
        mine: that of this rank.
        moving: what has begun.
        rows: into which each host's sum of ``mine`` comes, or of this host's part of it.
        parts: those of ``mine``, where each host sums one.
    """

    pieces: Sequence[Tensor]
    mine: Tensor
    moving: Sequence[Awaited]
    rows: Sequence[Tensor]
    parts: Sequence[Tensor] = ()


class Between(ByRows):
    """Those of one group, of rank ``rank`` among ``names``.

    Args:
        inside: those of the ranks of this host.
        column: moves among the ranks that have the place of this one on their hosts.
        everyone: moves among all ranks.
    """

    def __init__(
        self, inside: Collectives, column: Moves, everyone: Moves, grid: Grid, rank: int, names: Sequence[int]
    ) -> None:
        self.inside, self.column, self.everyone, self.grid, self.names = inside, column, everyone, grid, tuple(names)
        self.rank, self.size = rank, len(self.names)
        self.row, self.index = grid.at(rank)
        self.number = 0  # of collectives that have begun
        self.met = False  # whether all ranks of this host have come to the last of them

    def reduction(self, reduce_op: Any, tensor: Tensor) -> Reduction:
        return Reduction.of(self.inside.backend, reduce_op, tensor.dtype, self.size)

    def _of_host(self, reduction: Reduction) -> Reduction:
        """Return how the ranks of a host reduce what is reduced further; who does that divides for an average."""
        name = "SUM" if reduction.name == "AVG" else reduction.name
        return replace(reduction, name=name, size=self.inside.size)

    # --- all come to the same

    def _come(
        self, kind: str, tensor: Tensor | None = None, operation: str = "", root: int = 0, sizes: Sequence[int] = ()
    ) -> Generator[Awaited | None, None, Note]:
        """Come to the next collective, which it gives; all ranks of all hosts have come to the same when this ends.

        What gloo is to move must fit from the beginning: it ends a process that gets more than it awaits. Of a large
        tensor, a piece of which each rank moves, it asks the ranks to whom it does by itself, and waits for no others.
        """
        own = self.inside.note(kind, tensor, operation, root)
        self.number, self.met = self.number + 1, False
        note = own._replace(number=self.number)
        mine = note.head() + np.asarray(sizes or [0] * self.size, np.int64).tobytes()
        alone = tensor is not None and tensor.nbytes > SMALL_BYTES
        asks = alone or self.index == 0  # the first of a host, whose others compare with it within that
        heads = [torch.frombuffer(bytearray(mine), dtype=torch.uint8) for _ in self.grid.rows if asks]
        moving = self.column.to_all(heads)
        yield from self.inside.come(own, sizes)
        self.met = True
        yield from moving
        said = [head.numpy().tobytes() for head in heads]
        if any(other != mine for other in said):
            raise WorldError(unlike(said, self.column.names, note.number, self.names))
        if not alone:
            yield None  # to which the first rank of a host comes when it has heard of the others
        return note

    def barrier(self) -> Steps:
        yield from self._come("barrier")

    # --- every rank gets the same

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps:
        flat, finish = flat_of(tensor)
        yield from self._reduce_all("all_reduce", flat, reduction)
        finish()

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction) -> Steps:
        """Into ``tensor`` of the root; that of another rank keeps its values."""
        total = tensor.data.clone()
        flat, finish = flat_of(total)
        yield from self._reduce_all("reduce", flat, reduction, root)
        finish()
        if self.rank == root:
            tensor.data.copy_(total)

    def _reduce_all(self, kind: str, flat: Tensor, reduction: Reduction, root: int = 0) -> Steps:
        """Stretch after stretch: while the network moves some, the ranks of a host reduce the next within it."""
        yield from self._come(kind, flat, reduction.name, root)
        in_parts = sums_parts(self.column.size, self.inside.size, flat.nbytes)
        count = max(1, -(-flat.nbytes // (STRETCH_BYTES * self.inside.size)))
        under_way: deque[_UnderWay] = deque()
        for stretch in cut(flat, count):
            pieces = self._pieces(stretch)
            mine = pieces[self.index]
            yield from self.inside.reduce_scatter_list(mine, pieces, self._of_host(reduction))
            under_way.append(self._sent_in_parts(pieces, mine) if in_parts else self._sent(pieces, mine))
            if len(under_way) == AHEAD:
                yield from self._ended(under_way.popleft(), reduction)
        for sent in under_way:
            yield from self._ended(sent, reduction)

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        """One for each rank of a host."""
        if flat.nbytes <= SMALL_BYTES:
            return [flat, *(flat[:0] for _ in range(1, self.inside.size))]
        return cut(flat, self.inside.size)

    def _sent(self, pieces: Sequence[Tensor], mine: Tensor) -> _UnderWay:
        """Each host's sum of a piece goes to all others, which sum them all."""
        rows = [torch.empty_like(mine) for _ in self.grid.rows]
        rows[self.row] = mine.clone() if self.column.size > PAIR else mine
        return _UnderWay(pieces, mine, self.column.to_all(rows), rows)

    def _sent_in_parts(self, pieces: Sequence[Tensor], mine: Tensor) -> _UnderWay:
        """The parts of a host's sum of a piece go each to the host that sums them."""
        parts = cut(mine, self.column.size)
        rows, moving = self._exchanged(mine, [len(part) for part in parts])
        return _UnderWay(pieces, mine, [moving], rows, parts)

    def _ended(self, sent: _UnderWay, reduction: Reduction) -> Steps:
        """The sum of all, in the order of the hosts, comes to all ranks of this one."""
        yield from sent.moving
        reduction.total(sent.rows, sent.parts[self.row] if sent.parts else sent.mine)
        if sent.parts:
            yield from self.column.to_all(sent.parts)
        yield from self.inside.all_gather_list(sent.pieces, sent.mine)

    def _exchanged(self, flat: Tensor, lengths: Sequence[int]) -> tuple[list[Tensor], Awaited]:
        """Parts of ``flat``, of these lengths, begin to go to the hosts; and where what all have for this one comes."""
        length = lengths[self.row]
        rows = flat.new_empty(self.column.size, length)
        return list(rows.unbind()), self.column.exchange(rows.view(-1), flat, [length] * self.column.size, lengths)

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        flat, finish = flat_of(tensor)
        yield from self._come("broadcast", flat, root=root)
        row, index = self.grid.at(root)
        pieces = self._pieces(flat)
        if self.row == row:
            yield from self.inside.broadcast(flat, index)
        yield from self.column.broadcast(pieces[self.index], row)
        if self.row != row:
            yield from self.inside.all_gather_list(pieces, pieces[self.index])
        if self.rank != root:
            finish()

    # --- gathering

    def _all_gather(self, rows: Sequence[Tensor], tensor: Tensor) -> Steps:
        """Each rank gets those of its column, which then all ranks of its host get from it."""
        flat, _ = flat_of(tensor)
        kind, like, sizes = gathering(rows, flat)
        yield from self._come(kind, like, sizes=sizes)
        column = [rows[rank] for rank in self.grid.column(self.index)]
        column[self.row].copy_(flat)
        yield from self.column.to_all(column)
        for ranks, mine in zip(self.grid.rows, column, strict=True):
            yield from self.inside.all_gather_list([rows[rank] for rank in ranks], mine)

    # --- a part for each

    def _reduce_scatter(self, output: Tensor, rows: Sequence[Tensor], reduction: Reduction) -> Steps:
        """Each rank gets what its host has for its column, and sends the others of that theirs."""
        flat, finish = flat_of(output)
        yield from self._come("reduce_scatter", flat[:0], reduction.name, sizes=[len(row) for row in rows])
        lengths = [len(rows[rank]) for rank in self.grid.column(self.index)]
        summed = flat.new_empty(sum(lengths))
        for ranks, part in zip(self.grid.rows, torch.split(summed, lengths), strict=True):
            yield from self.inside.reduce_scatter_list(part, [rows[rank] for rank in ranks], self._of_host(reduction))
        rows_of_hosts, moving = self._exchanged(summed, lengths)
        yield moving
        reduction.total(rows_of_hosts, flat)
        finish()

    def exchange(self, kind: str, outputs: Mapping[int, Tensor], inputs: Mapping[int, Tensor], root: int = 0) -> Steps:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it: all-to-all, gather and scatter."""
        sent, _ = flats_of(list(inputs.values()))
        received, finish = flats_of(list(outputs.values()))
        note = yield from self._come(kind, next(iter((*sent, *received)))[:0], root=root)
        out = dict(zip(inputs, (flat.view(torch.uint8) for flat in sent), strict=True))
        into = dict(zip(outputs, (flat.view(torch.uint8) for flat in received), strict=True))
        lengths, awaited = ([len(of[r]) if r in of else 0 for r in range(self.size)] for of in (out, into))
        yield from self._fit(note, lengths, awaited)
        row = _joined([out[r] for r in sorted(out)])
        arrived = torch.empty(sum(awaited), dtype=torch.uint8, device="cpu")
        yield self.everyone.exchange(arrived, row, awaited, lengths)
        for rank, part in enumerate(torch.split(arrived, awaited)):
            if rank in into:
                into[rank].copy_(part)
        finish()

    def _fit(self, note: Note, lengths: Sequence[int], awaited: Sequence[int]) -> Steps:
        """Raise `WorldError`, on all ranks alike, where one awaits more or less from another than that sends."""
        mine = torch.tensor([*lengths, *awaited], device="cpu")
        table = mine.new_empty(self.size, len(mine))
        yield self.everyone.gather(table, mine)
        check_sizes(note, table.numpy(), self.names)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")
