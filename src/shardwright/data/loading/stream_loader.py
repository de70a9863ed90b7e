"""Batches of data that come one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from shardwright.data.collate import collate
from shardwright.data.iterable import Stream
from shardwright.data.loading.batch import Batch
from shardwright.data.loading.position import Batching, Collate, Loader, Position, Range, columns_of
from shardwright.data.loading.same_data import check_same_stream
from shardwright.errors import UsageError


class StreamLoader(Loader):
    """Yields this rank's part of each global batch of a stream as a `Batch`; made by `sw.loader`.

    Every rank reads every sample, and collates its own rows: what it costs to make a sample is paid on each. One
    ``for`` loop is one pass, to the end of the stream; the next loop is the next epoch. Where a loop is left early, the
    next one continues it, by reading and throwing away what was handed out (see `Stream` for a shorter way); with
    ``anew`` (``evaluate=True`` or ``shuffle=False``) every loop begins at the first sample. The ranks compare the first
    samples alone: where streams end at different places, the ranks wait for each other.
    """

    def __init__(self, stream: Stream, batching: Batching, *, anew: bool) -> None:
        super().__init__(batching)
        self.stream = stream
        self._anew = anew
        self._collate: Collate = collate if batching.collate_fn is None else batching.collate_fn

    def _identity(self) -> dict[str, Any]:
        return {"stream": self.stream.name}

    def _next(self) -> Position:
        return Position(self.epoch) if self._anew and not self._loaded else self._position

    def _whole(self, begin: Position) -> Batch:
        _, samples = next(self._global_batches(begin))
        return self._batch(samples, ((0, len(samples)),) * self._size)

    def _check_data(self) -> None:
        check_same_stream(self.stream.samples)

    def _pass(self, number: int, begin: Position) -> Iterator[Batch]:
        epoch = begin.epoch
        for position, samples in self._global_batches(begin):
            self._must_be(number)
            self._position, epoch = position, position.epoch
            yield self._batch(samples, self._rows_of_ranks(len(samples)))
        if number == self._passes:
            self._position = Position(epoch + 1)

    def _global_batches(self, begin: Position) -> Iterator[tuple[Position, list[Any]]]:
        """Each global batch to the end of the epoch, with the position after it.

        A position at the end of an epoch, which nobody knew to be its end, is the beginning of the next.
        """
        epoch, start = begin.epoch, begin.samples
        while True:
            source, position = self.stream.samples(epoch, start), start
            while samples := list(islice(source, self.batch_size)):
                if self._drop_last and len(samples) < self.batch_size:
                    break
                position += len(samples)
                yield Position(epoch, position), samples
            if position > start:
                return
            if start == 0:
                raise UsageError(
                    f"{self.stream.name} gave no batch in epoch {epoch}: expected at least "
                    f"{self.batch_size if self._drop_last else 1} samples from what can be begun anew in every epoch"
                )
            epoch, start = epoch + 1, 0

    def _batch(self, samples: list[Any], ranges: tuple[Range, ...]) -> Batch:
        start, stop = ranges[self._rank]
        # An empty part still has to show the shapes and types of the others: one sample tells them.
        chosen = samples[start:stop] or samples[:1]
        columns = columns_of(self._collate(chosen), len(chosen))
        if start == stop:
            columns = tuple(column[:0] for column in columns)
        if self._pin_memory and torch.cuda.is_available():
            columns = tuple(column.pin_memory() for column in columns)
        return Batch(columns, global_size=len(samples), start=start, stop=stop, ranges=ranges)
