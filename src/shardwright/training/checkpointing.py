"""A training run's checkpoints: when they are written, what of the trainer is in them, and going on from one."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import SequentialSampler

from shardwright.checkpoint.api import Best, Checkpoints, Loaded, Where, load
from shardwright.checkpoint.loading.match import Rename
from shardwright.checkpoint.loading.source import checkpoints
from shardwright.checkpoint.storage.folders import last_part, open_folder
from shardwright.checkpoint.whole_run.run_state import Run
from shardwright.errors import CheckpointError, DamageError, UsageError
from shardwright.run.planning import on_rank_zero
from shardwright.torch_private import job_store
from shardwright.training.appointment import Appointments, appointments
from shardwright.training.callbacks import EMA, Callback
from shardwright.training.preemption import EXIT_CODE, Preemption
from shardwright.world.together import all_ranks, from_rank_zero

if TYPE_CHECKING:
    from shardwright.training.trainer import Trainer

_LEAVE, _TIME_IS_UP = "leave", "time is up"


@dataclass(frozen=True)
class Begun:
    """Where a fit began, so that one that goes on in another process ends where it would have ended."""

    epoch: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Continuation:
    """What a fit that goes on from a checkpoint has to do with its loader. ``loader`` is the state of the saved one, if
    it had any, ``world_size`` the ranks of the saved run.
    """

    loader: Any = None
    world_size: int | None = None

    def place(self, trainer: Trainer, loader: Any) -> None:
        """Move the loader to the sample that comes next.

        Raises:
            UsageError: where it has no position that can be set, and the checkpoint is from the middle of an epoch.
        """
        if self.loader is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(self.loader)
        elif trainer.under_way and not isinstance(loader, Sequence):
            sampler = getattr(loader, "sampler", None)
            moves = isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch")
            if not moves or self.world_size not in (None, trainer.world.size):
                raise UsageError(
                    f"the checkpoint is from the middle of epoch {trainer.epoch}, after {trainer.step} steps, and "
                    f"{type(loader).__name__} cannot be set to the sample that comes next; take batches from "
                    "sw.loader, or checkpoints from the ends of epochs (every_epochs)"
                )

    def rest(self, trainer: Trainer, loader: Any) -> Iterator[Any]:
        """The batches of the epoch that is under way that were not trained on."""
        if self.loader is not None and hasattr(loader, "load_state_dict"):
            epoch = getattr(loader, "epoch", None)
            return iter(()) if epoch != self.loader.get("epoch", epoch) else iter(loader)  # it may have been the last
        return islice(iter(loader), trainer.batches, None)


class ModelCheckpoint(Callback):
    """Writes the whole state of the run to ``directory`` every so often, and at the end of the fit.

    A checkpoint is complete or not there; see `sw.checkpoint.save`. `Trainer.resume` goes on from it, on any number of
    ranks. When this process is told to end (TERM), all ranks save after the step under way and leave with exit code
    143, unless the launcher says that the job has failed: then a rank is missing, and they leave at once.

    Args:
        directory: of this run alone.
        every_epochs: after so many epochs and their validation; after each one where nothing else is said.
        every_steps: after so many optimizer steps.
        every_minutes: when so many minutes have gone by since the last, by rank 0's clock, after the step under way.
        latest_k: keep so many of the newest, by default all.
        top_k: ``("accuracy", 3, "max")`` keeps beside them the three best by a metric of the validation, or "loss".
        asynchronous: go on training while a checkpoint is written.
        config: what to keep as ``config.yaml``.
    """

    def __init__(
        self,
        directory: Where,
        *,
        every_epochs: int | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        latest_k: int | None = None,
        top_k: Best | None = None,
        asynchronous: bool = False,
        config: str | Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if value is not None and value < 1:
                raise UsageError(f"expected {name} of at least 1, got {value}")
        if every_minutes is not None and not every_minutes > 0:
            raise UsageError(f"expected every_minutes of more than 0, got {every_minutes}")
        if every_epochs is every_steps is every_minutes is None:
            every_epochs = 1
        if top_k is not None and every_epochs is None:
            raise UsageError(
                f"top_k={top_k} chooses by a validation, which comes after an epoch; give every_epochs= too"
            )
        self.directory = os.fspath(directory)
        self.every_epochs, self.every_steps, self.every_minutes = every_epochs, every_steps, every_minutes
        self.config = config
        self._how: dict[str, Any] = {"latest_k": latest_k, "top_k": top_k, "asynchronous": asynchronous}
        self._checkpoints: Checkpoints | None = None
        self._appointments: Appointments | None = None
        self._preemption: Preemption | None = None
        self._saved: tuple[int, bool] | None = None
        self._saved_at_s = 0.0
        self._finished = False

    def on_fit_begin(self, trainer: Trainer) -> None:
        self._checkpoints = Checkpoints(self.directory, **self._how)
        self._finished, self._saved_at_s = False, time.monotonic()
        world, fit = trainer.world, on_rank_zero(lambda: secrets.token_hex(8))
        preemption = self._preemption = Preemption()

        def tick(seconds: float) -> None:
            preemption.wait(seconds)
            waited_s = time.monotonic() - self._saved_at_s
            if self._appointments is None:
                return
            if preemption.asked:
                self._appointments.wish(_LEAVE)
            if self.every_minutes is not None and world.rank == 0 and waited_s > 60 * self.every_minutes:
                self._appointments.wish(_TIME_IS_UP)

        self._appointments = appointments(job_store(), fit, world.rank, world.size, tick)

    def resumed(self, trainer: Trainer, where: Where, name: str) -> None:
        """The run goes on from the checkpoint ``name``, so that there is no need to write it again."""
        own = os.path.abspath(self.directory)
        if where == "auto" or os.path.abspath(where) in (own, os.path.join(own, name)):
            self._saved = (trainer.steps, trainer.under_way)

    def at_rest(self, trainer: Trainer) -> None:
        assert self._checkpoints is not None
        assert self._appointments is not None
        self._checkpoints.check()
        asked = self._appointments.point()
        if trainer.under_way:
            due = self.every_steps is not None and trainer.steps % self.every_steps == 0
        else:
            due = self.every_epochs is not None and trainer.epoch % self.every_epochs == 0
        if due or asked is not None:
            self._save(trainer)
        if asked == _LEAVE:
            self._leave(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        assert self._checkpoints is not None
        if trainer.steps:
            self._save(trainer)
        self._checkpoints.wait()
        self._finished = True

    def close(self, trainer: Trainer) -> None:
        if self._appointments is not None:
            self._appointments.close()
            self._appointments = None
        preemption, self._preemption = self._preemption, None
        if preemption is not None:
            preemption.close()
            if preemption.asked and self._finished:  # too late to save anything more: end as we were told
                os.kill(os.getpid(), signal.SIGTERM)
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None

    def _save(self, trainer: Trainer) -> None:
        here = (trainer.steps, trainer.under_way)
        if self._saved == here:
            return
        assert self._checkpoints is not None
        self._checkpoints.save(
            run_of(trainer),
            step=trainer.steps,
            epoch=trainer.epoch,
            metrics=_metrics(trainer),
            extra={"trainer": trainer.state_dict(), "callbacks": _callback_states(trainer)},
            config=self.config,
        )
        self._saved, self._saved_at_s = here, time.monotonic()

    def _leave(self, trainer: Trainer) -> None:
        assert self._checkpoints is not None
        self._checkpoints.wait()
        if trainer.world.rank == 0:
            print(
                f"TERM: saved {self.directory} after step {trainer.step} of epoch {trainer.epoch}; leaving with exit "
                f"code {EXIT_CODE}",
                flush=True,
            )
        raise SystemExit(EXIT_CODE)


def run_of(trainer: Trainer) -> Run:
    """The things of which the trainer's checkpoints are made."""
    loader = trainer.loader if hasattr(trainer.loader, "state_dict") else None
    ema = _ema(trainer)
    averages = None if ema is None else ema.averages
    return Run(trainer.parallel, trainer.optimizer, loader, trainer.scheduler, trainer.scaler, averages)


def _ema(trainer: Trainer) -> EMA | None:
    found = [callback for callback in trainer.callbacks if isinstance(callback, EMA)]
    if len(found) > 1:
        raise UsageError(f"a checkpoint holds one EMA, the trainer has {len(found)}; leave out all but one")
    return found[0] if found else None


def _callback_states(trainer: Trainer) -> dict[str, Any]:
    return {name: state for name, callback in _named(trainer) if (state := callback.state_dict())}


def _named(trainer: Trainer) -> list[tuple[str, Callback]]:
    """The callbacks by their classes, the second of a class as ``EarlyStopping 2``."""
    seen: dict[str, int] = {}
    found = []
    for callback in trainer.callbacks:
        name = type(callback).__name__
        seen[name] = seen.get(name, 0) + 1
        found.append((name if seen[name] == 1 else f"{name} {seen[name]}", callback))
    return found


def _metrics(trainer: Trainer) -> dict[str, float]:
    """The validation's where one was made here, and the loss of the last step."""
    found = {"train_loss": float(trainer.loss)}
    evaluation = trainer.evaluation
    if evaluation is not None and trainer.evaluated == trainer.epoch and not trainer.under_way:
        found |= {"loss": evaluation.loss, **evaluation.metrics}
    return found


# Going on


def resume(trainer: Trainer, where: Where, strict: bool, rename: Rename | None) -> Loaded | None:
    """Put a checkpoint into ``trainer``; None where there is none and ``where`` is "auto"."""
    ema = _ema(trainer)
    if ema is not None:
        ema.begin(trainer)
    if where != "auto":
        loaded = _load(trainer, where, strict, rename)
    else:
        found = _newest(trainer, strict, rename)
        if found is None:
            return None
        loaded = found
    callbacks = (loaded.extra or {}).get("callbacks", {})
    for name, callback in _named(trainer):
        if name in callbacks:
            callback.load_state_dict(callbacks[name])
        elif callback.state_dict():
            _say(trainer, f"the checkpoint has no state of {name}, which begins anew")
    return loaded


def _newest(trainer: Trainer, strict: bool, rename: Rename | None) -> Loaded | None:
    directory = next((c.directory for c in trainer.callbacks if isinstance(c, ModelCheckpoint)), None)
    if directory is None:
        raise UsageError(
            'resume("auto") looks where a ModelCheckpoint saves, and the trainer has none; give the directory'
        )
    folder = open_folder(directory)
    names, damaged = from_rank_zero(all_ranks(), lambda: _names(directory))
    for name in damaged:
        _say(trainer, f"{directory}/{name} is no complete checkpoint and is passed over: its manifest is damaged")
    failure: DamageError | None = None
    for name in reversed(names):
        try:
            return _load(trainer, folder.inner(name).where, strict, rename)
        except DamageError as error:
            failure = error
            _say(trainer, f"{error}\nGoing on from the checkpoint before it")
    if failure is not None or damaged:
        raise CheckpointError(
            f"all checkpoints in {directory} are damaged ({', '.join([*damaged, *names])}); to begin anew, move them "
            "away or save into another directory"
        ) from failure
    _say(trainer, f"resume: no checkpoint in {directory}; beginning anew")
    return None


def _names(directory: Where) -> tuple[list[str], list[str]]:
    folder = open_folder(directory)
    good = list(checkpoints(folder))
    return good, [name for name in folder.folders() if name.startswith("step-") and name not in good]


def _load(trainer: Trainer, where: Where, strict: bool, rename: Rename | None) -> Loaded:
    run = run_of(trainer)
    loaded = load(
        where, run.model, run.optimizer, scheduler=run.scheduler, scaler=run.scaler, ema=run.ema, strict=strict,
        rename=rename,
    )  # fmt: skip
    found = os.fspath(where).rstrip("/")
    if last_part(found) != loaded.name:  # a directory of checkpoints
        found = f"{found}/{loaded.name}"
    _say(trainer, f"resume: {found}: epoch {loaded.epoch}, {loaded.step} steps")
    return loaded


def _say(trainer: Trainer, text: str) -> None:
    if trainer.world.rank == 0:
        print(text, flush=True)


def evaluation_state(evaluation: Any) -> dict[str, Any] | None:
    """An `Evaluation` as values."""
    return None if evaluation is None else {**asdict(evaluation), "metrics": dict(evaluation.metrics)}
