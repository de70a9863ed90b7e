"""Batches in an order that is the same for any number of ranks, without communication.

The order of an epoch is fixed by (seed, epoch). A global batch is the next ``batch_size`` samples of it, which
`Loader._rows_of_ranks` splits among the ranks: by the plan's ``batch_rows``, without a plan by `chunk_range`. What a
step takes of a rank's rows is `runtime.programs.inputs.input_parts`. So the position in the data is two numbers, the
epoch and the samples consumed, and a run can resume from it on any number of ranks.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, get_worker_info

from shardwright.data.collate import collate
from shardwright.data.iterable import as_stream
from shardwright.data.loading.batch import Batch
from shardwright.data.loading.position import Batching, Collate, CutsBatches, HasRank, Position, Range, columns_of
from shardwright.data.loading.position import Loader as Loader
from shardwright.data.loading.same_data import check_same_data
from shardwright.data.loading.stream_loader import StreamLoader
from shardwright.data.order import KEY_LIMIT, permutation, sample_seeds, worker_seed
from shardwright.distributed.seed import RandomNumbers
from shardwright.errors import UsageError
from shardwright.launch.hosts.environment import read_environment


@dataclass(frozen=True)
class _Part:
    """One rank's part of a global batch: which samples, and which rows of it each rank has."""

    indices: npt.NDArray[np.int64]
    global_size: int
    ranges: tuple[Range, ...]
    rank: int


def loader(
    dataset: Any,
    batch_size: int | None = None,
    *,
    per_rank_batch_size: int | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool = False,
    evaluate: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
    collate_fn: Collate | None = None,
    world: HasRank | None = None,
    plan: CutsBatches | None = None,
    check_data: bool = True,
) -> Loader:
    """A loader over ``dataset``, which is the same whole dataset on every rank.

    Args:
        dataset: anything with ``len(dataset)`` and ``dataset[index]``; a sample is a tensor or a tuple of them (what
            torch's ``default_collate`` stacks). What a sample draws from python's, numpy's or torch's global generators
            follows from seed, epoch and index, on any number of ranks. A dataset with ``gather(indices)`` returns whole
            batches at once; with ``gather(indices, seed, epoch)`` its random numbers can depend on them, too.
            Or a stream: an iterable dataset, or a function that makes an iterator (see `Stream`); every rank reads all
            of it, which `StreamLoader` tells more about.
        batch_size: samples of the global batch, or
        per_rank_batch_size: samples per rank; the global batch is that times the ranks.
        seed: with the epoch it fixes the order.
        shuffle: a new order each epoch (default), or the order of the dataset; a stream has only its own.
        drop_last: leave out a last batch that is not full.
        evaluate: every sample exactly once, in the order of the dataset; the same as ``shuffle=False``, and it refuses
            what would break that.
        num_workers: processes that read ahead, 0 for none.
        pin_memory: put batches into memory that a GPU copies from without waiting.
        collate_fn: in place of ``default_collate``. What it draws follows from seed, epoch and the first index of this
            rank's part: the same in every run, but not what one device draws for the whole batch.
        world: which of how many ranks this is; by default the default process group, or one rank where there is none.
        plan: cuts batches as this plan wants them (``parallel.plan``); by default into ceil-sized parts.
        check_data: before the first batch, compare size and sampled checksums of the dataset over all ranks.

    Raises `UsageError` for arguments that do not fit.
    """
    rank, size = _rank_and_size(world)
    stream = as_stream(dataset)
    if stream is None:
        _check_dataset(dataset)
    if (batch_size is None) == (per_rank_batch_size is None):
        raise UsageError(
            "expected either batch_size (samples of the global batch) or per_rank_batch_size (samples per rank), got "
            + ("neither" if batch_size is None else f"both: {batch_size} and {per_rank_batch_size}")
        )
    for name, value, least in (
        ("batch_size", batch_size, 1), ("per_rank_batch_size", per_rank_batch_size, 1), ("num_workers", num_workers, 0),
    ):  # fmt: skip
        if value is not None and (not isinstance(value, int) or value < least):
            raise UsageError(f"expected {name} to be a whole number of at least {least}, got {value!r}")
    if not 0 <= seed < KEY_LIMIT:
        raise UsageError(f"expected seed from 0 to 2**64 - 1, got {seed}")
    if evaluate and (shuffle or drop_last):
        raise UsageError(
            "evaluate=True counts every sample once, in order; remove "
            + ("shuffle" if shuffle else "drop_last")
            + "=True"
        )
    batch_size = batch_size or (per_rank_batch_size or 0) * size
    batching = Batching(batch_size, rank, size, drop_last, pin_memory, collate_fn, plan, check_data)
    if stream is not None:
        refused = "shuffle=True" if shuffle else f"num_workers={num_workers}" if num_workers else ""
        if refused:
            raise UsageError(
                f"{stream.name} is a stream: its samples come in an order of their own, and each process reads them "
                f"all; remove {refused}"
            )
        return StreamLoader(stream, batching, anew=evaluate or shuffle is False)
    if drop_last and batch_size > len(dataset):
        raise UsageError(
            f"drop_last=True leaves no batch: the global batch is {batch_size}, the dataset has {len(dataset)} samples"
        )
    shuffle = not evaluate if shuffle is None else shuffle
    return IndexedLoader(dataset, batching, seed=seed, shuffle=shuffle, num_workers=num_workers)


class IndexedLoader(Loader):
    """Yields this rank's part of each global batch as a `Batch`; made by `sw.loader`.

    One ``for`` loop is one pass, to the end of the epoch; the next loop is the next epoch. Where a loop is left
    early, the next one continues it when the loader shuffles, so that nothing is repeated or skipped; without shuffling
    every loop begins at the first sample, so that an evaluation is always whole. After `load_state_dict` the next loop
    begins at the position that was loaded.
    """

    def __init__(self, dataset: Any, batching: Batching, *, seed: int, shuffle: bool, num_workers: int) -> None:
        super().__init__(batching)
        self.dataset = dataset
        self._seed, self._shuffle, self._num_workers = seed, shuffle, num_workers
        self._rows = _Rows(dataset, batching.collate_fn, seed)

    def __len__(self) -> int:
        return self._batches_after(0)

    def _batches_after(self, samples: int) -> int:
        left = len(self.dataset) - samples
        return left // self.batch_size if self._drop_last else -(-left // self.batch_size)

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "dataset_size": len(self.dataset)}

    def _next(self) -> Position:
        if not (self._shuffle or self._loaded):
            return Position(self.epoch)
        if self._position.samples and not self._batches_after(self._position.samples):
            return Position(self.epoch + 1)
        return self._position

    def _whole(self, begin: Position) -> Batch:
        indices = self._order(begin.epoch)[begin.samples : begin.samples + self.batch_size]
        everyone = ((0, len(indices)),) * self._size
        return _as_batch(self._rows[indices, begin.epoch], _Part(indices, len(indices), everyone, self._rank))

    def _check_data(self) -> None:
        check_same_data(self.dataset)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        size = len(self.dataset)
        return permutation(size, self._seed, epoch) if self._shuffle else np.arange(size)

    def _parts(self, begin: Position) -> list[_Part]:
        """This rank's part of every global batch from ``begin`` to the end of the epoch."""
        order = self._order(begin.epoch)
        parts = []
        for number in range(self._batches_after(begin.samples)):
            first = begin.samples + number * self.batch_size
            rows = order[first : first + self.batch_size]
            ranges = self._rows_of_ranks(len(rows))
            start, stop = ranges[self._rank]
            parts.append(_Part(rows[start:stop], len(rows), ranges, self._rank))
        return parts

    def _pass(self, number: int, begin: Position) -> Iterator[Batch]:
        parts = self._parts(begin)
        tensors = DataLoader(
            self._rows,
            batch_size=None,
            sampler=[(part.indices, begin.epoch) for part in parts],
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            collate_fn=_unchanged,
            # One of our own, since DataLoader would draw the workers' seed from the user's generator.
            generator=torch.Generator().manual_seed(worker_seed(self._seed, begin.epoch, self._rank)),
        )
        with torch.device("cpu"):  # where DataLoader draws the seed of its workers
            read = iter(tensors)
        samples = begin.samples
        for part, rows in zip(parts, read, strict=True):
            self._must_be(number)
            samples += part.global_size
            self._position = Position(begin.epoch, samples)
            yield _as_batch(rows, part)
        if number == self._passes:
            self._position = Position(begin.epoch + 1)


class _Rows(torch.utils.data.Dataset[Any]):
    """The dataset as DataLoader sees it: one item is the collated batch of some indices in some epoch."""

    def __init__(self, dataset: Any, collate_fn: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate: Collate = collate if collate_fn is None else collate_fn
        self._gather = getattr(dataset, "gather", None) if collate_fn is None else None
        self._keyed = (
            self._gather is not None and {"seed", "epoch"} <= inspect.signature(self._gather).parameters.keys()
        )
        self._seed = seed
        self._draws = False

    def __getitem__(self, request: tuple[npt.NDArray[np.int64], int]) -> tuple[Any, ...]:
        indices, epoch = request
        # An empty part still has to show the shapes and types of the others: one sample tells them.
        chosen: list[int] = indices.tolist() or [0]
        if self._gather is not None:
            collated = self._gather(chosen, **({"seed": self._seed, "epoch": epoch} if self._keyed else {}))
        else:
            collated = self._read(chosen, epoch)
        columns = columns_of(collated, len(chosen))
        return columns if len(indices) else tuple(column[:0] for column in columns)

    def _read(self, chosen: list[int], epoch: int) -> Any:
        """Return the samples, collated.

        A data set that draws from global generators draws each sample by its index. That it draws is found out when it
        first does; then its samples are read once more, one by one.
        """
        numbers, restores = RandomNumbers(), get_worker_info() is None  # nobody else draws in a process that only loads
        try:
            samples = [] if self._draws else self._samples(chosen)
            self._draws = self._draws or numbers.drawn
            if not self._draws and self._collate is collate:  # which draws nothing either
                restores = False
                return self._collate(samples)
            seeds = sample_seeds(self._seed, epoch, chosen if self._draws else chosen[:1])
            if self._draws:
                samples = []
                for index, seed in zip(chosen, seeds, strict=True):
                    numbers.set(seed)
                    samples.append(self._dataset[index])
            numbers.set(seeds[0])
            return self._collate(samples)
        finally:
            if restores:
                numbers.restore()

    def _samples(self, chosen: list[int]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            samples: list[Any] = self._dataset.__getitems__(chosen)
            return samples
        return [self._dataset[index] for index in chosen]


def _unchanged(rows: Any) -> Any:
    return rows


def _as_batch(rows: Sequence[torch.Tensor], part: _Part) -> Batch:
    start, stop = part.ranges[part.rank]
    return Batch(rows, global_size=part.global_size, start=start, stop=stop, ranges=part.ranges)


def _rank_and_size(world: HasRank | None) -> tuple[int, int]:
    if world is not None:
        return world.rank, world.size
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    environment = read_environment(os.environ)
    if environment.size > 1:
        raise UsageError(
            f"{environment.launcher} started this process as one of {environment.size}, but the process group is not "
            "there yet: every rank would read everything; call sw.init() before sw.loader(...)"
        )
    return 0, 1


def _check_dataset(dataset: Any) -> None:
    for method, purpose in (("__len__", "its size"), ("__getitem__", "a sample by its index")):
        if not hasattr(dataset, method):
            raise UsageError(
                f"expected a dataset with {method} ({purpose}), got {type(dataset).__name__} without; or a stream: "
                "a function that makes an iterator, or an IterableDataset"
            )
    if len(dataset) == 0:
        raise UsageError(f"the dataset ({type(dataset).__name__}) is empty; expected at least one sample")
