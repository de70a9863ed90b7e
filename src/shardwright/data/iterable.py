"""Data that come one after the other: generators and iterable datasets.

They have no order that could be divided, so every rank reads the whole stream and keeps its rows of each global batch.
The position is the number of samples that were handed out. Going on from a position costs reading and throwing away
what lies before it, unless the function that makes the stream takes ``start`` and begins there itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from shardwright.errors import UsageError


class Stream:
    """A source of samples that can be begun anew in every epoch, with the same samples in the same order on every rank.

    Args:
        source: an iterable that can be iterated more than once, or a function that returns an iterator. A function that
            has a parameter ``epoch`` is called with the epoch, one that has ``start`` with the samples to leave out.

    Raises `UsageError` for an iterator, which can be read only once.

    >>> def count(epoch):
    ...     yield from range(100 * epoch, 100 * epoch + 4)
    >>> list(Stream(count).samples(epoch=2, start=1))
    [201, 202, 203]
    """

    def __init__(self, source: Iterable[Any] | Callable[..., Iterator[Any]]) -> None:
        if isinstance(source, Iterator):
            raise UsageError(
                f"got a {type(source).__name__}, which can be read only once; expected what can be begun anew in every "
                "epoch: pass the function that makes it, without calling it"
            )
        self._source = source
        self._takes: frozenset[str] = frozenset()
        if callable(source) and not isinstance(source, Iterable):
            self._takes = frozenset(inspect.signature(source).parameters.keys() & {"epoch", "start"})

    @property
    def name(self) -> str:
        source = self._source
        while isinstance(source, functools.partial):
            source = source.func
        return str(getattr(source, "__qualname__", type(source).__qualname__))

    def samples(self, epoch: int = 0, start: int = 0) -> Iterator[Any]:
        """The samples of an epoch without the first ``start`` of them."""
        if isinstance(self._source, Iterable):
            return islice(iter(self._source), start, None)
        arguments = {name: value for name, value in (("epoch", epoch), ("start", start)) if name in self._takes}
        return islice(iter(self._source(**arguments)), 0 if "start" in arguments else start, None)


def as_stream(dataset: Any) -> Stream | None:
    """``dataset`` as a stream, or None where its samples have indices."""
    if isinstance(dataset, Stream):
        return dataset
    if isinstance(dataset, (torch.utils.data.IterableDataset, Iterator)):
        return Stream(dataset)
    if hasattr(dataset, "__getitem__") or hasattr(dataset, "__len__"):
        return None
    return Stream(dataset) if callable(dataset) or isinstance(dataset, Iterable) else None
