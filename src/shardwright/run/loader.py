"""Batches in an order that any number of ranks agrees on without talking.

The order of an epoch is fixed by (seed, epoch). A global batch is the next ``batch_size`` samples of it, and a rank's
part is what `chunk_range` says. So the place in the data is two numbers, the epoch and the samples consumed, and a run
can go on from it on any other number of ranks.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from shardwright.data.order import KEY_LIMIT, chunk_range, permutation, worker_seed
from shardwright.errors import UsageError
from shardwright.launch.environment import read_environment
from shardwright.run.batch import Batch
from shardwright.run.same_data import check_same_data


class Ranks(Protocol):
    """A `World`, or anything else that knows which of how many ranks this is."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class Cut(Protocol):
    """A plan, or anything else that knows which rows of a global batch of ``rows`` a rank is to be given."""

    def batch_rows(self, rank: int, rows: int) -> tuple[int, int]: ...


class Collate(Protocol):
    """Turns a list of samples into a tensor, or a tuple of tensors, with the samples along dim 0."""

    def __call__(self, samples: list[Any], /) -> Any: ...


@dataclass(frozen=True)
class Position:
    """The place in the data: ``samples`` of the order of ``epoch`` have been handed out."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class _Part:
    """One rank's part of a global batch: which samples, and where in the global batch they are."""

    indices: npt.NDArray[np.int64]
    global_size: int
    start: int
    stop: int


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
    world: Ranks | None = None,
    plan: Cut | None = None,
    check_data: bool = True,
) -> Loader:
    """A `Loader` over ``dataset``, which is the same whole dataset on every rank.

    Args:
        dataset: anything with ``len(dataset)`` and ``dataset[index]``; a sample is a tensor or a tuple of them (what
            torch's ``default_collate`` stacks). A dataset with ``gather(indices)`` returns whole batches at once; with
            ``gather(indices, seed, epoch)`` it is told what random numbers are to depend on, beside the indices.
        batch_size: samples of the global batch, or
        per_rank_batch_size: samples per rank; the global batch is that times the ranks.
        seed: with the epoch it fixes the order.
        shuffle: a new order each epoch (default), or the order of the dataset.
        drop_last: leave out a last batch that is not full.
        evaluate: every sample exactly once, in the order of the dataset; the same as ``shuffle=False``, and it refuses
            what would break that.
        num_workers: processes that read ahead, 0 for none.
        pin_memory: put batches into memory that a GPU copies from without waiting.
        collate_fn: in place of ``default_collate``.
        world: which of how many ranks this is; by default the default process group, or one rank where there is none.
        plan: cuts batches as this plan wants them (``parallel.plan``); by default into ceil-sized parts.
        check_data: before the first batch, compare size and sampled checksums of the dataset over all ranks.

    Raises `UsageError` for arguments that do not fit.
    """
    rank, size = _rank_and_size(world)
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
    if drop_last and batch_size > len(dataset):
        raise UsageError(
            f"drop_last=True leaves no batch: the global batch is {batch_size}, the dataset has {len(dataset)} samples"
        )
    return Loader(
        dataset,
        batch_size,
        rank=rank,
        size=size,
        seed=seed,
        shuffle=not evaluate if shuffle is None else shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=collate_fn,
        plan=plan,
        check_data=check_data,
    )


class Loader:
    """Yields this rank's part of each global batch as a `Batch`; made by `sw.loader`.

    One ``for`` loop is one pass, to the end of the epoch; the next loop is the next epoch. Where a loop is left
    early, the next one continues it when the loader shuffles, so that nothing is repeated or skipped; without shuffling
    every loop begins at the first sample, so that an evaluation is always whole. After `load_state_dict` the next loop
    begins at the position that was loaded.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int,
        size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        num_workers: int,
        pin_memory: bool,
        collate_fn: Collate | None,
        plan: Cut | None,
        check_data: bool,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._rank, self._size = rank, size
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._rows = _Rows(dataset, collate_fn, seed)
        self._plan = plan
        self._unchecked = check_data and size > 1
        self._position = Position()
        self._loaded = False  # the position was loaded: the next pass begins there even without shuffling
        self._passes = 0

    def __len__(self) -> int:
        """The number of global batches in a whole epoch."""
        return self._batches_after(0)

    def _batches_after(self, samples: int) -> int:
        left = len(self.dataset) - samples
        return left // self.batch_size if self._drop_last else -(-left // self.batch_size)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or the next one between two passes; the first is 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` with the next loop, unless it is the epoch that is under way already."""
        if epoch < 0:
            raise UsageError(f"expected an epoch of at least 0, got {epoch}")
        if epoch != self.epoch:
            self._move_to(Position(epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position and what makes it valid; it counts the samples handed out, not those read ahead."""
        return {**asdict(self._position), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the loader that made ``state`` was; batch size and number of ranks may differ.

        Raises `UsageError` where the position would not mean the same samples.
        """
        if state.keys() != self.state_dict().keys():
            raise UsageError(
                f"expected what state_dict() of a loader returned ({', '.join(self.state_dict())}), "
                f"got {', '.join(map(str, state)) or 'nothing'}"
            )
        for name, ours in self._identity().items():
            if state[name] != ours:
                raise UsageError(
                    f"the saved position belongs to a loader with {name}={state[name]}, this one has {name}={ours}: "
                    "going on would repeat some samples and skip others; make this loader as that one was"
                )
        self._move_to(Position(state["epoch"], state["samples"]))
        self._loaded = True
        self._position = self._next()

    def _identity(self) -> dict[str, Any]:
        """What fixes the order of every epoch."""
        return {"seed": self._seed, "shuffle": self._shuffle, "dataset_size": len(self.dataset)}

    def _move_to(self, position: Position) -> None:
        self._position = position
        self._passes += 1  # a loop that is under way ends with an error: its batches are no longer the next ones

    def _next(self) -> Position:
        """Where the next loop begins."""
        if not (self._shuffle or self._loaded):
            return Position(self.epoch)
        if self._position.samples and not self._batches_after(self._position.samples):
            return Position(self.epoch + 1)
        return self._position

    def sample_batch(self) -> Batch:
        """The whole global batch that comes next, the same on every rank; the position stays where it is.

        Every rank must call it, since the ranks compare their data first.
        """
        self._check_once()
        position = self._next()
        indices = self._order(position.epoch)[position.samples : position.samples + self.batch_size]
        return _as_batch(self._rows[indices, position.epoch], _Part(indices, len(indices), 0, len(indices)))

    def __iter__(self) -> Iterator[Batch]:
        self._check_once()
        self._move_to(self._next())
        self._loaded = False
        return self._pass(self._passes, self._position)

    def _check_once(self) -> None:
        # With a world that was passed in and is not the default group there is nobody to ask.
        if self._unchecked and dist.is_initialized() and dist.get_world_size() == self._size:
            check_same_data(self.dataset)
        self._unchecked = False

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
            start, stop = self._cut(len(rows))
            parts.append(_Part(rows[start:stop], len(rows), start, stop))
        return parts

    def _cut(self, rows: int) -> tuple[int, int]:
        """Which of the rows of a global batch are this rank's."""
        if self._plan is not None:
            return self._plan.batch_rows(self._rank, rows)
        return chunk_range(rows, self._size, self._rank)

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
        samples = begin.samples
        for part, rows in zip(parts, tensors, strict=True):
            if number != self._passes:
                raise UsageError(
                    "this loop is no longer the loader's own: a newer one has begun, or the position was set; "
                    "one loader serves one loop at a time"
                )
            samples += part.global_size
            self._position = Position(begin.epoch, samples)
            yield _as_batch(rows, part)
        if number == self._passes:
            self._position = Position(begin.epoch + 1)


class _Rows(torch.utils.data.Dataset[Any]):
    """The dataset as DataLoader sees it: one item is the collated batch of some indices in some epoch."""

    def __init__(self, dataset: Any, collate_fn: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate: Collate = default_collate if collate_fn is None else collate_fn
        self._gather = getattr(dataset, "gather", None) if collate_fn is None else None
        self._keyed = (
            self._gather is not None and {"seed", "epoch"} <= inspect.signature(self._gather).parameters.keys()
        )
        self._seed = seed

    def __getitem__(self, request: tuple[npt.NDArray[np.int64], int]) -> tuple[Any, ...]:
        indices, epoch = request
        # An empty part still has to show the shapes and types of the others: one sample tells them.
        chosen: list[int] = indices.tolist() or [0]
        if self._gather is not None:
            collated = self._gather(chosen, **({"seed": self._seed, "epoch": epoch} if self._keyed else {}))
        elif hasattr(self._dataset, "__getitems__"):
            collated = self._collate(self._dataset.__getitems__(chosen))
        else:
            collated = self._collate([self._dataset[index] for index in chosen])
        columns = tuple(collated) if isinstance(collated, Sequence) else (collated,)
        for column in columns:
            if not isinstance(column, torch.Tensor) or len(column) != len(chosen):
                raise UsageError(
                    f"expected a sample to be a tensor or a tuple of tensors and numbers, got a batch with a "
                    f"{type(column).__name__} of {len(chosen)} samples; pass a collate_fn that returns tensors "
                    "with the samples along dim 0"
                )
        return columns if len(indices) else tuple(column[:0] for column in columns)


def _unchanged(rows: Any) -> Any:
    return rows


def _as_batch(rows: Sequence[torch.Tensor], part: _Part) -> Batch:
    return Batch(rows, global_size=part.global_size, start=part.start, stop=part.stop)


def _rank_and_size(world: Ranks | None) -> tuple[int, int]:
    if world is not None:
        return world.rank, world.size
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    told = read_environment(os.environ)
    if told.size > 1:
        raise UsageError(
            f"{told.launcher} started this process as one of {told.size}, but the process group is not there yet: "
            "every rank would read everything; call sw.init() before sw.loader(...)"
        )
    return 0, 1


def _check_dataset(dataset: Any) -> None:
    for method, purpose in (("__len__", "its size"), ("__getitem__", "a sample by its index")):
        if not hasattr(dataset, method):
            raise UsageError(
                f"expected a dataset with {method} ({purpose}), got {type(dataset).__name__} without; an iterable "
                "dataset has no order that ranks can agree on: give it a list of its samples"
            )
    if len(dataset) == 0:
        raise UsageError(f"the dataset ({type(dataset).__name__}) is empty; expected at least one sample")
