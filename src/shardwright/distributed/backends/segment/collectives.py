"""Collectives in the memory that ranks share, as steps: each ends with this rank's coming to a stage.

A step writes into the slot of this rank for the next stage; what runs behind its ``yield``, when all have come there,
reads the slots of that stage. Who has come to a stage has read all of the one before, so that two slots for each rank
will do. Tensors that are larger than a slot go through it chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.distributed.backends.segment.flats import flat_of, flats_of
from shardwright.distributed.backends.segment.memory import DATA_BYTES, HEAD_BYTES, Memory
from shardwright.distributed.backends.segment.native import Rendezvous
from shardwright.distributed.backends.segment.notes import Note, unlike
from shardwright.distributed.backends.segment.reduction import Reduction
from shardwright.errors import WorldError

Steps = Iterator[None]


class Collectives:
    """Those of one group; ``names`` are its members as its users number them."""

    def __init__(self, memory: Memory, rendezvous: Rendezvous, names: Sequence[int], backend: str) -> None:
        self.memory, self.rendezvous, self.names, self.backend = memory, rendezvous, tuple(names), backend
        self.rank, self.size = memory.rank, memory.size
        self.number = 0  # of collectives that have begun

    def reduction(self, reduce_op: Any, tensor: Tensor) -> Reduction:
        return Reduction.of(self.backend, reduce_op, tensor.dtype, self.size)

    # --- slots

    @property
    def _next(self) -> int:
        """The parity of the stage to which this rank will come next."""
        return (self.rendezvous.stage + 1) & 1

    def _mine(self, like: Tensor, start: int = 0) -> Tensor:
        """Room for ``like`` in the slot of this rank for the next stage, from the byte ``start`` on."""
        return self._view(self.rank, self._next, like.dtype, like.nbytes, start)

    def _of(self, rank: int, like: Tensor, start: int = 0) -> Tensor:
        """Return what ``rank`` has written for this stage, as long as ``like``."""
        return self._view(rank, self.rendezvous.stage & 1, like.dtype, like.nbytes, start)

    def _view(self, rank: int, parity: int, dtype: torch.dtype, nbytes: int, start: int) -> Tensor:
        return self.memory.data(rank, parity).narrow(0, start, nbytes).view(dtype)

    def _of_all(self, like: Tensor, start: int = 0) -> list[Tensor]:
        return [self._of(rank, like, start) for rank in range(self.size)]

    # --- notes

    def note(self, kind: str, tensor: Tensor | None = None, operation: str = "", root: int = 0) -> Note:
        """Of the next collective."""
        self.number += 1
        dtype, count = (None, 0) if tensor is None else (tensor.dtype, tensor.numel())
        return Note(self.number, kind, dtype, count, operation, root)

    def _write(self, note: Note, sizes: Sequence[int] = ()) -> bytes:
        written = note.head() + np.asarray(sizes, np.int64).tobytes() if sizes else note.head()
        self.memory.write_note(self._next, written)
        return written

    def compare(self, written: bytes) -> None:
        """Raise `WorldError` on all ranks where one of them has written another note for this stage."""
        parity, length = self.rendezvous.stage & 1, len(written)
        for rank in range(self.size):
            if self.memory.note(rank, parity, length) != written:
                notes = [self.memory.note(other, parity, length) for other in range(self.size)]
                raise WorldError(unlike(notes, self.names, self.number, self.names))

    def come(self, note: Note | None, sizes: Sequence[int] = ()) -> Steps:
        """Come to the next stage, the first of a collective with its note: all must agree on that, and on the sizes."""
        if note is None:
            yield
            return
        written = self._write(note, sizes)
        yield
        self.compare(written)

    # --- every rank gets the same

    def barrier(self) -> Steps:
        return self.come(self.note("barrier"))

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps:
        flat, finish = flat_of(tensor)
        yield from self._reduce_each(self.note("all_reduce", flat, reduction.name), flat, reduction, True)
        finish()

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction) -> Steps:
        flat, finish = flat_of(tensor)
        here = self.rank == root
        yield from self._reduce_each(self.note("reduce", flat, reduction.name, root), flat, reduction, here)
        if here:
            finish()

    def _reduce_each(self, note: Note, flat: Tensor, reduction: Reduction, wanted: bool) -> Steps:
        """Each rank that wants the result reduces all of it."""
        for start, chunk in _chunks(flat, DATA_BYTES):
            self._mine(chunk).copy_(chunk)
            yield from self.come(None if start else note)
            if wanted:
                reduction.total(self._of_all(chunk), chunk)

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        flat, finish = flat_of(tensor)
        note = self.note("broadcast", flat, root=root)
        for start, chunk in _chunks(flat.view(torch.uint8), DATA_BYTES):
            if self.rank == root:
                self._mine(chunk).copy_(chunk)
            yield from self.come(None if start else note)
            if self.rank != root:
                chunk.copy_(self._of(root, chunk))
        if self.rank != root:
            finish()

    # --- gathering

    def all_gather(self, output: Tensor, tensor: Tensor) -> Steps:
        flat, finish = flat_of(output)
        yield from self._all_gather(flat.view(self.size, tensor.numel()).unbind(), tensor)
        finish()

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
        rows, finish = flats_of(outputs)
        yield from self._all_gather(rows, tensor)
        finish()

    def _all_gather(self, rows: Sequence[Tensor], tensor: Tensor) -> Steps:
        """Gather the elements of the ranks' tensors into the rows, one for each rank; they may differ in length."""
        flat, _ = flat_of(tensor)
        sizes = [row.numel() for row in rows]
        if len(set(sizes)) == 1:
            note, sizes = self.note("all_gather", flat), []
        else:  # on which all must agree, too
            note = self.note("all_gather of several sizes", flat[:0])
        mine, rows = flat.view(torch.uint8), [row.view(torch.uint8) for row in rows]
        for start in range(0, max(1, *(row.numel() for row in rows)), DATA_BYTES):
            chunk = mine[start : start + DATA_BYTES]
            self._mine(chunk).copy_(chunk)
            yield from self.come(None if start else note, sizes)
            for rank, row in enumerate(rows):
                part = row[start : start + DATA_BYTES]
                part.copy_(self._of(rank, part))

    # --- a part for each

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Steps:
        flat, _ = flat_of(tensor)
        return self._reduce_scatter(output, flat.view(self.size, output.numel()).unbind(), reduction)

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], reduction: Reduction) -> Steps:
        return self._reduce_scatter(output, flats_of(tensors)[0], reduction)

    def _reduce_scatter(self, output: Tensor, rows: Sequence[Tensor], reduction: Reduction) -> Steps:
        """Of each part as much at a time as all parts have room for in a slot."""
        flat, finish = flat_of(output)
        note = self.note("reduce_scatter", flat[:0], reduction.name)
        sizes = [row.numel() for row in rows]
        room = DATA_BYTES // self.size // 64 * 64
        width = room // flat.element_size()
        for start in range(0, max(1, *sizes), width):
            for rank, row in enumerate(rows):
                part = row[start : start + width]
                self._mine(part, rank * room).copy_(part)
            yield from self.come(None if start else note, sizes)
            part = flat[start : start + width]
            reduction.total(self._of_all(part, self.rank * room), part)
        finish()

    def exchange(self, kind: str, outputs: Mapping[int, Tensor], inputs: Mapping[int, Tensor], root: int = 0) -> Steps:
        sent, _ = flats_of(list(inputs.values()))
        received, finish = flats_of(list(outputs.values()))
        note = self.note(kind, next(iter((*sent, *received)))[:0], root=root)
        into = dict(zip(outputs, (flat.view(torch.uint8) for flat in received), strict=True))
        out = dict(zip(inputs, (flat.view(torch.uint8) for flat in sent), strict=True))
        yield from self._exchange(note, into, out)
        finish()

    def _exchange(self, note: Note, into: Mapping[int, Tensor], out: Mapping[int, Tensor]) -> Steps:
        """Each rank puts what it has for all in a row; the others take their part of it."""
        lengths = [out[r].numel() if r in out else 0 for r in range(self.size)]
        self._put(out, lengths, 0)
        written = self._write(note, lengths + [into[r].numel() if r in into else 0 for r in range(self.size)])
        yield
        self.compare(written[:HEAD_BYTES])
        table = self._tables()
        check_sizes(note, table, self.names)
        starts = np.cumsum(table[:, : self.size], axis=1) - table[:, : self.size]
        longest = int(table[:, : self.size].sum(1).max())
        for start in range(0, max(1, longest), DATA_BYTES):
            if start:
                self._put(out, lengths, start)
                yield
            for rank, tensor in into.items():
                self._take(rank, tensor, int(starts[rank, self.rank]), start)

    def _put(self, out: Mapping[int, Tensor], lengths: Sequence[int], start: int) -> None:
        """Write the slot-sized piece of this rank's concatenated parts that begins at the byte ``start``."""
        at = 0
        for rank, length in enumerate(lengths):
            first, end = max(at, start), min(at + length, start + DATA_BYTES)
            if first < end:
                part = out[rank][first - at : end - at]
                self._mine(part, first - start).copy_(part)
            at += length

    def _take(self, rank: int, tensor: Tensor, at: int, start: int) -> None:
        """Read the piece of ``tensor`` in the slot of ``rank``, whose part begins at byte ``at`` of its row."""
        first, end = max(at, start), min(at + tensor.numel(), start + DATA_BYTES)
        if first < end:
            part = tensor[first - at : end - at]
            part.copy_(self._of(rank, part, first - start))

    def _tables(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """By rank, how many bytes it sends to each and awaits from each."""
        length, parity = HEAD_BYTES + 16 * self.size, self.rendezvous.stage & 1
        notes = [self.memory.note(rank, parity, length)[HEAD_BYTES:] for rank in range(self.size)]
        return np.stack([np.frombuffer(note, np.int64) for note in notes])


def check_sizes(note: Note, table: np.ndarray[Any, np.dtype[np.int64]], names: Sequence[int]) -> None:
    """Raise `WorldError` where a rank awaits more or less of another one than that sends.

    ``table`` has a row for each rank, with the bytes that it sends to each and those that it awaits from each.
    """
    size = len(names)
    sent, awaited = table[:, :size], table[:, size:].T
    for source, target in np.argwhere(sent != awaited)[:1]:
        raise WorldError(
            f"{note}: rank {names[source]} sends {sent[source, target]} bytes to rank {names[target]}, which awaits "
            f"{awaited[source, target]} from it (number {note.number} of the group of the ranks "
            f"{', '.join(map(str, names))}); both must name the same size"
        )


def _chunks(flat: Tensor, most_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """Return where each piece of at most so many bytes begins, and the piece; an empty tensor has one, too."""
    most = most_bytes // flat.element_size()
    for start in range(0, max(1, flat.numel()), most):
        yield start, flat[start : start + most]
