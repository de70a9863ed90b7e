"""Reads the first batch of a loader for the capture, without consuming samples or random numbers of training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shardwright.checkpoint.whole_run.state import put_random_state, random_state
from shardwright.errors import UsageError

# Where loaders, and those that accelerate makes of them, have what draws the order of samples.
_PARTS = ("base_dataloader", "dataset", "sampler", "batch_sampler")


@contextmanager
def first_batch(loader: Any) -> Iterator[Any]:
    """The first batch; all generators of random numbers are afterwards as they were before.

    Raises `UsageError` where there is none, or where the loader or its data set gives its samples only once.
    """
    _refuse_own_iterator(loader)
    kept = [(generator, generator.get_state()) for generator in _generators(loader)]
    random = random_state()
    if getattr(loader, "persistent_workers", False):
        loader = copy.copy(loader)  # its workers go on from what they have drawn
    try:
        for batch in loader:
            yield batch
            return
        raise UsageError("the loader for training gives no batch, by which the step would be captured")
    finally:
        put_random_state(random)
        for generator, state in kept:
            generator.set_state(state)


def _refuse_own_iterator(loader: Any) -> None:
    for part in _parts(loader):
        asked = part is loader or isinstance(part, IterableDataset)
        if asked and hasattr(part, "__next__") and iter(part) is part:
            raise UsageError(
                f"{type(part).__name__} is its own iterator, so that training would miss the batch by which the "
                "step is captured; let its __iter__ return a new iterator each time, as one with `yield` does"
            )


def _generators(loader: Any) -> list[torch.Generator]:
    own = [getattr(part, "__dict__", {}).get("generator") for part in _parts(loader)]
    return [one for one in own if isinstance(one, torch.Generator)]


def _parts(loader: Any) -> list[Any]:
    parts = [loader]
    for part in parts:  # which grows
        own = getattr(part, "__dict__", {})
        parts += [own[name] for name in _PARTS if name in own and all(own[name] is not seen for seen in parts)]
    return parts
