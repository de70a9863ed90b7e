"""The position in the data, and the base class of loaders, which cuts global batches among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwright.common.step_lines import own_steps
from shardwright.data.loading.batch import Batch
from shardwright.data.order import chunk_range
from shardwright.errors import UsageError

Range = tuple[int, int]


class HasRank(Protocol):
    """A `World`, or anything else that knows which of how many ranks this is."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class CutsBatches(Protocol):
    """A plan, or anything else that knows which rows of a global batch of ``rows`` are a rank's."""

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
class Batching:
    """The arguments of `sw.loader`: how samples become this rank's batches, whatever they come from."""

    batch_size: int
    rank: int
    size: int
    drop_last: bool
    pin_memory: bool
    collate_fn: Collate | None
    plan: CutsBatches | None
    check_data: bool


class Loader:
    """The base of what `sw.loader` makes: its position in the data, and this rank's part of a global batch."""

    def __init__(self, batching: Batching) -> None:
        self.batch_size = batching.batch_size
        self._rank, self._size, self._plan = batching.rank, batching.size, batching.plan
        self._known_rows: tuple[int, tuple[Range, ...]] = 0, ()
        self._drop_last, self._pin_memory = batching.drop_last, batching.pin_memory
        self._position = Position()
        self._loaded = False  # the position was loaded: the next pass begins there in any case
        self._passes = 0
        self._unchecked = batching.check_data and batching.size > 1

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

    def __iter__(self) -> Iterator[Batch]:
        """This rank's part of every global batch, to the end of the epoch."""
        self._check_once()
        self._move_to(self._next())
        self._loaded = False
        return _timed(self._pass(self._passes, self._position))

    def __len__(self) -> int:
        """The number of global batches in a whole epoch; raises `TypeError` where it is unknown."""
        raise TypeError("a stream does not say how many batches it has")

    def sample_batch(self) -> Batch:
        """The whole global batch that comes next, the same on every rank; the position stays where it is.

        Every rank must call it, since the ranks compare their data first.
        """
        self._check_once()
        return self._whole(self._next())

    def _identity(self) -> dict[str, Any]:
        """The arguments that fix the order of every epoch."""
        raise NotImplementedError

    def _next(self) -> Position:
        """Return where the next loop begins."""
        raise NotImplementedError

    def _whole(self, begin: Position) -> Batch:
        """The whole global batch at a position."""
        raise NotImplementedError

    def _pass(self, number: int, begin: Position) -> Iterator[Batch]:
        """The batches from ``begin`` to the end of the epoch, in the loop that is the ``number``-th."""
        raise NotImplementedError

    def _check_data(self) -> None:
        """Raises `UsageError` where the ranks have different data; every rank calls it."""
        raise NotImplementedError

    def _check_once(self) -> None:
        # With a world that was passed in and is not the default group there is nobody to ask.
        if self._unchecked and dist.is_initialized() and dist.get_world_size() == self._size:
            self._check_data()
        self._unchecked = False

    def _move_to(self, position: Position) -> None:
        self._position = position
        self._passes += 1  # a loop that is under way ends with an error: its batches are no longer the next ones

    def _must_be(self, number: int) -> None:
        """Raises `UsageError` in a loop that is not the newest one."""
        if number != self._passes:
            raise UsageError(
                "this loop is no longer the loader's own: a newer one has begun, or the position was set; "
                "one loader serves one loop at a time"
            )

    def _rows_of_ranks(self, rows: int) -> tuple[Range, ...]:
        """Return which of the ``rows`` of a global batch each rank reads: as the plan splits them, or evenly."""
        if self._known_rows[0] != rows:
            ranks = range(self._size)
            if self._plan is not None:
                self._known_rows = rows, tuple(self._plan.batch_rows(rank, rows) for rank in ranks)
            else:
                self._known_rows = rows, tuple(chunk_range(rows, self._size, rank) for rank in ranks)
        return self._known_rows[1]


def _timed(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches, and report to the launcher how long each took."""
    loading = own_steps().loading
    while True:
        with loading():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def columns_of(collated: Any, count: int) -> tuple[torch.Tensor, ...]:
    """The tensors of a collated batch of ``count`` samples; raises `UsageError` where it is something else."""
    columns = tuple(collated) if isinstance(collated, Sequence) else (collated,)
    for column in columns:
        if not isinstance(column, torch.Tensor) or len(column) != count:
            raise UsageError(
                f"expected a sample to be a tensor or a tuple of tensors and numbers, got a batch with a "
                f"{type(column).__name__} of {count} samples; pass a collate_fn that returns tensors "
                "with the samples along dim 0"
            )
    return columns
