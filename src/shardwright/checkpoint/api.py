"""`sw.checkpoint.save` and `sw.checkpoint.load`: a whole run to a directory of checkpoints, and back.

`shardwright.checkpoint` knows nothing of how models are trained: it takes a model from `sw.parallelize`, torch's
DistributedDataParallel or a plain module, and whatever else has ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from shardwright.checkpoint.exchange.exchange import load_state
from shardwright.checkpoint.loading.match import Rename
from shardwright.checkpoint.loading.source import TO_LOAD, latest, open_source
from shardwright.checkpoint.saving.asynchronous import AsyncSaver, own_ranks
from shardwright.checkpoint.saving.save import ONE_FOLDER, TO_SAVE
from shardwright.checkpoint.saving.save import save as write
from shardwright.checkpoint.storage.folders import open_folder
from shardwright.checkpoint.storage.objects import open_store
from shardwright.checkpoint.storage.store import Retention
from shardwright.checkpoint.whole_run.restore import RunRestore
from shardwright.checkpoint.whole_run.run_state import (
    Run,
    Stateful,
    generators,
    info,
    name_of,
    run_files,
    steady,
    whole_state,
)
from shardwright.compiler.mesh.changed import refuse_lost_changes
from shardwright.distributed.agreement import from_rank_zero, refuse_unlike, together
from shardwright.distributed.ranks import ranks_by_messages
from shardwright.errors import UsageError
from shardwright.launch.progress_notes import waiting_for

CheckpointPath = str | os.PathLike[str]
Best = tuple[str, int, Literal["min", "max"]]

_PLAIN = (".pth", ".pt", ".bin", ".safetensors")


@dataclass(frozen=True)
class Loaded:
    """The values that `load` found beside what it put into its arguments.

    ``name`` is the checkpoint's; ``skipped`` what did not fit, with ``strict=False``; ``left`` what it has of a
    loader, a scheduler or a scaler that was not passed.
    """

    name: str
    step: int
    epoch: int
    metrics: Mapping[str, float]
    extra: Any
    skipped: tuple[str, ...] = ()
    left: Mapping[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints that one run writes into a directory; every rank makes it and calls it together.

    With ``asynchronous`` this rank's part is copied in memory while training goes on, until the next step of the
    optimizer, and written from there. `check` raises what went wrong since, and never waits; `close` waits.
    """

    def __init__(
        self,
        directory: CheckpointPath,
        *,
        latest_k: int | None = None,
        top_k: Best | None = None,
        asynchronous: bool = False,
    ) -> None:
        retention = Retention(latest_k)
        if top_k is not None:
            metric, count, mode = top_k
            retention = Retention(latest_k, count, metric, mode)
        self.store = open_store(os.fspath(directory), retention)
        self._saver = AsyncSaver(self.store, own_ranks()) if asynchronous else None

    def save(
        self,
        run: Run,
        *,
        step: int,
        epoch: int = 0,
        metrics: Mapping[str, float] | None = None,
        extra: Any = None,
        config: str | Mapping[str, Any] | None = None,
    ) -> str:
        """Save ``run``, as `save` does with its parts; returns the name."""
        name = name_of(step)
        with waiting_for(f"saving {name}"):
            self.check()
            refuse_lost_changes()
            ranks = ranks_by_messages(TO_SAVE)
            state = together(ranks, lambda: whole_state(run, extra))
            state["run", "generators"] = generators(ranks)
            about, files = info(run, step, epoch, metrics), run_files(run, config)
            if self._saver is None:
                write(self.store, name, state, about, files, ranks)
            else:
                self._saver.save(name, state, about, files, steady(run, state))
        return name

    def check(self) -> None:
        """Raises `CheckpointError` where a save that has ended failed."""
        if self._saver is not None:
            self._saver.check()

    def wait(self) -> None:
        """Wait for the save under way; raises as `check`."""
        if self._saver is not None:
            with waiting_for("saving"):
                self._saver.wait()

    def close(self) -> None:
        """Wait for the save under way and give back its memory; raises as `check`."""
        if self._saver is not None:
            with waiting_for("saving"):
                self._saver.close()


# The savers of models that are saved asynchronously by `save`. Cached by the model, and made anew where the folder or
# what is kept in it is another.
_running: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Checkpoints]] = WeakKeyDictionary()


def save(
    directory: CheckpointPath,
    parallel: Any,
    optimizer: Optimizer | None = None,
    loader: Stateful | None = None,
    *,
    step: int,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    ema: Any = None,
    epoch: int = 0,
    metrics: Mapping[str, float] | None = None,
    extra: Any = None,
    config: str | Mapping[str, Any] | None = None,
    latest_k: int | None = None,
    top_k: Best | None = None,
    asynchronous: bool = False,
) -> str:
    """Save a run as the checkpoint ``step-00000100`` in ``directory``; all ranks call it together.

    Args:
        directory: of the run, the same on all ranks, made where it is not there; one run at a time saves into it.
        parallel: what `sw.parallelize` returned, a DistributedDataParallel, or a plain module that is whole and the
            same on every rank.
        optimizer: over the parameters of the model, in any groups.
        loader: from `sw.loader`, or anything else with ``state_dict`` and ``load_state_dict``, the same on every rank.
        step: optimizer steps done, which name the checkpoint; one of the same name is replaced.
        scheduler, scaler: as ``loader``.
        ema: averaged parameters: names to tensors, or something whose ``state_dict()`` gives them (`sw.EMA`,
            torch's AveragedModel). Their memory is what is loaded into.
        epoch: epochs begun.
        metrics: scores by which ``top_k`` chooses.
        extra: numbers, strings, tensors, and lists and dictionaries of them.
        config: text, or a mapping, kept as ``config.yaml``.
        latest_k: keep so many of the newest checkpoints, by default all.
        top_k: ``("accuracy", 3, "max")`` keeps beside them the three best by a metric.
        asynchronous: copy this rank's part in memory while training goes on, and write it from there. The next step of
            a torch optimizer waits for the copy; call `wait_copied` before anything else changes weights or averages.
            What goes wrong is raised by the next `save` or by `wait`.

    Returns the name of the checkpoint.

    Raises:
        CheckpointError: the same on every rank; the directory then has the checkpoints that it had before.
        UsageError: where ranks name different directories or steps.
    """
    run = Run(parallel, optimizer, loader, scheduler, scaler, ema)
    refuse_unlike(ranks_by_messages(TO_SAVE), "the directory and the step", (os.fspath(directory), step), ONE_FOLDER)
    said = (os.fspath(directory), latest_k, top_k)
    found = _running.get(parallel)
    if found is not None and (not asynchronous or found[0] != said):
        _running.pop(parallel)[1].close()
        found = None
    if found is None:
        found = said, Checkpoints(directory, latest_k=latest_k, top_k=top_k, asynchronous=asynchronous)
        if asynchronous:
            _running[parallel] = found
    return found[1].save(run, step=step, epoch=epoch, metrics=metrics, extra=extra, config=config)


def newest(directory: CheckpointPath) -> str | None:
    """The name of the newest complete checkpoint in a directory, None where there is none; the same on every rank."""
    ranks = ranks_by_messages(TO_LOAD)
    refuse_unlike(ranks, "the directory", os.fspath(directory), ONE_FOLDER)
    return from_rank_zero(ranks, lambda: latest(open_folder(directory)))


def wait(parallel: Any) -> None:
    """Wait until what `save` saves asynchronously of ``parallel`` is complete; the end of the process does so, too.

    Raises:
        CheckpointError: where it failed.
    """
    if parallel in _running:
        _running[parallel][1].wait()


def load(
    directory: CheckpointPath,
    parallel: Any,
    optimizer: Optimizer | None = None,
    loader: Stateful | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    ema: Any = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Load the newest checkpoint of a directory, or the one at a path, into a run as `save` takes it; in place.

    A file ``.pth``, ``.pt``, ``.bin`` or ``.safetensors`` is a plain state dict: of a model alone.

    The number of ranks, the mode and the plan may be others than those that saved; each rank reads what it needs. What
    is not passed is not loaded, so that a model can be loaded alone.

    Args:
        strict: refuse a checkpoint that does not fit, naming all that is missing, unknown or of another shape; with
            False load what fits, and return the names of the rest in `Loaded.skipped`.
        rename: how parameters of the checkpoint are called here, ``{"encoder.*": "backbone.*"}``, or a function.

    Torch's, numpy's and Python's generators are set as they were on each rank. Where they differed between ranks and
    the number of ranks is another, ranks get new ones, with a `RandomState` warning: what draws by them (a model that
    runs by DistributedDataParallel) then draws other numbers than in an uninterrupted run.

    Raises:
        CheckpointError: the same on every rank, where there is no checkpoint, it does not fit, or is damaged. Damage
            of a tensor shows while it is read: the model is then partly loaded.
        UsageError: where ``loader`` has other data, ``rename`` fits nothing, or ranks name different directories.
    """
    run = Run(parallel, optimizer, loader, scheduler, scaler, ema)
    with waiting_for(f"loading {os.fspath(directory)}"):
        refuse_unlike(ranks_by_messages(TO_LOAD), "the directory", os.fspath(directory), ONE_FOLDER)
        if os.fspath(directory).endswith(_PLAIN):
            return _load_plain(directory, run, strict, rename)
        wait(parallel)
        return _load(directory, run, strict, rename)


def _load(directory: CheckpointPath, run: Run, strict: bool, rename: Rename | None) -> Loaded:
    ranks = ranks_by_messages(TO_LOAD)
    where = from_rank_zero(ranks, lambda: open_source(directory).where)
    source = together(ranks, lambda: open_source(where))
    loading = together(ranks, lambda: RunRestore.of(source, run, strict, rename))
    skipped = together(ranks, loading.fill)
    loading.put(ranks)
    about = source.manifest.info
    name = source.where.rstrip("/").rsplit("/", 1)[-1]
    return Loaded(
        name, int(about.get("step", 0)), int(about.get("epoch", 0)), about.get("metrics", {}),
        loading.values.get("extra"), skipped,
        {n: v for n, v in loading.values.items() if n in ("loader", "scheduler", "scaler") and n not in run.others},
    )  # fmt: skip


def _load_plain(file: CheckpointPath, run: Run, strict: bool, rename: Rename | None) -> Loaded:
    """A plain state dict, which has a model and nothing else."""
    others = [name for name in ("optimizer", "loader", "scheduler", "scaler", "ema") if getattr(run, name) is not None]
    if others:
        raise UsageError(
            f"{file} is loaded as the state dict of a model alone; leave out {', '.join(others)}, or load a checkpoint"
        )
    found = together(ranks_by_messages(TO_LOAD), lambda: load_state(file, run.model, strict=strict, rename=rename))
    return Loaded(Path(file).name, 0, 0, {}, None, (*found.missing, *found.extra, *found.differing))
