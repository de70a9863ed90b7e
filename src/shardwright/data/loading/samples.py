"""The samples of a batch, in any nest of tuples, lists and dicts that the user's loss function takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from torch import Tensor

from shardwright.data.loading.batch import Batch
from shardwright.errors import UsageError

_PLAIN = (str, bytes, bool, int, float, complex, Enum, type(None))  # what a loss function may be given beside tensors


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return the same nest with ``function`` applied to every tensor, and its numbers and words as they are.

    Raises:
        UsageError: for anything else in it.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, _PLAIN):
        return batch
    if isinstance(batch, Batch):
        return batch.of(function(tensor) for tensor in batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(function, value) for value in batch)
    raise UsageError(
        f"a batch holds {type(batch).__name__} {batch!r:.60}; expected tensors, numbers and words, in tuples, lists or "
        "dicts if there are several"
    )


def part_of_batch(batch: Any, start: int, stop: int) -> Any:
    """Return the samples ``start`` to ``stop`` of a batch.

    They are taken from each tensor, and from each list of as many words or numbers as there are samples, as loaders
    make of names.
    """
    return _part_of(batch, count_samples(batch), slice(start, stop))


def _part_of(batch: Any, samples: int, part: slice) -> Any:
    if isinstance(batch, dict):
        return {key: _part_of(value, samples, part) for key, value in batch.items()}
    named = isinstance(batch, tuple) and hasattr(batch, "_fields")
    if isinstance(batch, (tuple, list)) and not isinstance(batch, Batch):
        if len(batch) == samples and not named and all(isinstance(entry, _PLAIN) for entry in batch):
            return batch[part]
        entries = [_part_of(value, samples, part) for value in batch]
        return type(batch)(*entries) if named else type(batch)(entries)
    return map_tensors(lambda tensor: tensor[part], batch)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor of the nest, in order."""
    tensors: list[Tensor] = []
    map_tensors(lambda tensor: tensors.append(tensor) or tensor, batch)  # type: ignore[func-returns-value]
    yield from tensors


def count_samples(batch: Any) -> int:
    """The samples in a batch: the size of dim 0, which all its tensors share.

    Raises `UsageError` when they do not, or when there is no tensor.
    """
    shapes = [list(tensor.shape) for tensor in tensors_of(batch)]
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) != 1 or None in sizes:
        raise UsageError(f"a batch has tensors of the shapes {shapes}; expected the samples along dim 0 of each")
    count = sizes.pop()
    if isinstance(batch, Batch) and count != batch.stop - batch.start:
        raise UsageError(f"{batch} holds {count} samples; expected {batch.stop - batch.start}")
    return int(count or 0)
