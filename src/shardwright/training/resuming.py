"""Resumes a training run: finds the newest complete checkpoint and loads it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import SequentialSampler

from shardwright.checkpoint.api import CheckpointPath, Loaded, load
from shardwright.checkpoint.loading.match import Rename
from shardwright.checkpoint.loading.source import TO_LOAD, checkpoints
from shardwright.checkpoint.storage.folders import last_part, open_folder
from shardwright.data.loading.stream_loader import StreamLoader
from shardwright.distributed.agreement import from_rank_zero
from shardwright.distributed.ranks import ranks_by_messages
from shardwright.distributed.seed import RandomNumbers
from shardwright.errors import CheckpointError, DamageError, UsageError
from shardwright.training.checkpointing import ModelCheckpoint, averaging, named_callbacks, run_of
from shardwright.training.hooks import RunView


@dataclass(frozen=True)
class Begun:
    """The position where a fit began, so that a fit resumed in another process ends where the first would have."""

    epoch: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Continuation:
    """How a resumed fit uses its loader.

    ``loader`` is the state of the saved one, if it had any, ``world_size`` the number of ranks of the saved run.
    """

    loader: Any = None
    world_size: int | None = None

    def place(self, run: RunView, loader: Any) -> None:
        """Move the loader to the sample that comes next.

        Raises:
            UsageError: where it has no position that can be set, and the checkpoint is from the middle of an epoch.
        """
        if self.loader is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(self.loader)
        elif run.under_way and not isinstance(loader, Sequence):
            sampler = getattr(loader, "sampler", None)
            moves = isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch")
            if not moves or self.world_size not in (None, run.world.size):
                raise UsageError(
                    f"the checkpoint is from the middle of epoch {run.epoch}, after {run.step} steps, and "
                    f"{type(loader).__name__} cannot be set to the sample that comes next; take batches from "
                    "sw.loader, or checkpoints from the ends of epochs (every_epochs)"
                )

    def rest(self, run: RunView, loader: Any) -> Iterator[Any]:
        """The batches of the epoch that is under way on which it has not trained yet."""
        if self.loader is not None and hasattr(loader, "load_state_dict"):
            epoch = getattr(loader, "epoch", None)
            if epoch != self.loader.get("epoch", epoch):  # it was the last
                return iter(())
            if not isinstance(loader, StreamLoader):
                return iter(loader)
            numbers, batches = RandomNumbers(), iter(loader)
            first = [*islice(batches, 1)]
            if getattr(loader, "epoch", None) == epoch:
                return chain(first, batches)
            if first:  # of the next epoch: a stream knows its end when nothing more comes
                loader.load_state_dict({**self.loader, "epoch": loader.epoch, "samples": 0})
            numbers.restore()
            return iter(())
        return islice(iter(loader), run.batches, None)


def resume(run: RunView, where: CheckpointPath, strict: bool, rename: Rename | None) -> Loaded | None:
    """Load a checkpoint into the objects of ``run``; None if there is none and ``where`` is "auto"."""
    ema = averaging(run)
    if ema is not None:
        ema.begin(run)
    loaded = _newest(run, strict, rename) if where == "auto" else _load(run, where, strict, rename)
    if loaded is None:
        return None
    callbacks = (loaded.extra or {}).get("callbacks", {})
    for name, callback in named_callbacks(run):
        if name in callbacks:
            callback.load_state_dict(callbacks[name])
        elif callback.state_dict():
            _say(run, f"the checkpoint has no state of {name}, which begins anew")
    return loaded


def _newest(run: RunView, strict: bool, rename: Rename | None) -> Loaded | None:
    directory = next((c.directory for c in run.callbacks if isinstance(c, ModelCheckpoint)), None)
    if directory is None:
        raise UsageError(
            'resume("auto") looks where a ModelCheckpoint saves, and the trainer has none; give the directory'
        )
    folder = open_folder(directory)
    names, damaged = from_rank_zero(ranks_by_messages(TO_LOAD), lambda: _names(directory))
    for name in damaged:
        _say(run, f"{directory}/{name} is no complete checkpoint and is passed over: its manifest is damaged")
    failure: DamageError | None = None
    for name in reversed(names):
        try:
            return _load(run, folder.inner(name).where, strict, rename)
        except DamageError as error:
            failure = error
            _say(run, f"{error}\nGoing on from the checkpoint before it")
    if failure is not None or damaged:
        raise CheckpointError(
            f"all checkpoints in {directory} are damaged ({', '.join([*damaged, *names])}); to begin anew, move them "
            "away or save into another directory"
        ) from failure
    _say(run, f"resume: no checkpoint in {directory}; beginning anew")
    return None


def _names(directory: CheckpointPath) -> tuple[list[str], list[str]]:
    """The checkpoints of the directory, oldest first, and the folders that should be some but have no good manifest."""
    folder = open_folder(directory)
    good = list(checkpoints(folder))
    return good, [name for name in folder.folders() if name.startswith("step-") and name not in good]


def _load(run: RunView, where: CheckpointPath, strict: bool, rename: Rename | None) -> Loaded:
    into = run_of(run)
    loaded = load(
        where, into.model, into.optimizer, scheduler=into.scheduler, scaler=into.scaler, ema=into.ema, strict=strict,
        rename=rename,
    )  # fmt: skip
    path = os.fspath(where).rstrip("/")
    if last_part(path) != loaded.name:  # a directory of checkpoints
        path = f"{path}/{loaded.name}"
    _say(run, f"resume: {path}: epoch {loaded.epoch}, {loaded.step} steps")
    return loaded


def _say(run: RunView, text: str) -> None:
    if run.world.rank == 0:
        print(text, flush=True)
