"""Writes the checkpoints of a training run, and says what of the run is in them."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Mapping
from typing import Any

from shardwright.checkpoint.api import Best, CheckpointPath, Checkpoints
from shardwright.checkpoint.whole_run.run_state import Run
from shardwright.common.torch_private import job_store
from shardwright.distributed.agreement import from_rank_zero
from shardwright.distributed.ranks import ranks_by_collectives
from shardwright.errors import UsageError
from shardwright.training.appointment import Appointments
from shardwright.training.callbacks import EMA
from shardwright.training.hooks import Callback, RunView
from shardwright.training.preemption import EXIT_CODE, Preemption

_LEAVE, _TIME_IS_UP = "leave", "time is up"


class ModelCheckpoint(Callback):
    """Writes the whole state of the run to ``directory`` every so often, and at the end of the fit.

    A checkpoint is complete or not there; see `sw.checkpoint.save`. `Trainer.resume` goes on from it, on any number of
    ranks. When this process is told to end (TERM), all ranks save after the step under way and leave with exit code
    143, unless the launcher says that the job has failed: then a rank is missing, and they leave at once.

    Args:
        directory: of this run alone, one for all ranks: each writes its part of the state into it.
        every_epochs: after so many epochs and their validation; after each one where nothing else is said.
        every_steps: after so many optimizer steps.
        every_minutes: when so many minutes have gone by since the last, by rank 0's clock, after the step under way.
        latest_k: keep so many of the newest, by default all.
        top_k: ``("accuracy", 3, "max")`` keeps beside them the three best by a metric of the validation, or "loss".
        asynchronous: go on training while a checkpoint is written.
        config: what to keep as ``config.yaml``.
    """

    on_every_rank = True

    def __init__(
        self,
        directory: CheckpointPath,
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

    def alike(self) -> dict[str, Any]:
        every = {
            "every_epochs": self.every_epochs,
            "every_steps": self.every_steps,
            "every_minutes": self.every_minutes,
        }
        return {"directory": self.directory} | every | self._how

    def on_fit_begin(self, run: RunView) -> None:
        self._checkpoints = Checkpoints(self.directory, **self._how)
        self._finished, self._saved_at_s = False, time.monotonic()
        world, fit = run.world, from_rank_zero(ranks_by_collectives("naming the fit"), lambda: secrets.token_hex(8))
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

        self._appointments = Appointments(job_store(), fit, world.rank, world.size, tick)

    def resumed(self, run: RunView, where: CheckpointPath, name: str) -> None:
        """The run goes on from the checkpoint ``name``, so that there is no need to write it again."""
        own = os.path.abspath(self.directory)
        if where == "auto" or os.path.abspath(where) in (own, os.path.join(own, name)):
            self._saved = (run.steps, run.under_way)

    def at_rest(self, run: RunView) -> None:
        assert self._checkpoints is not None
        assert self._appointments is not None
        self._checkpoints.check()
        asked = self._appointments.point()
        if run.under_way:
            due = self.every_steps is not None and run.steps % self.every_steps == 0
        else:
            due = self.every_epochs is not None and run.epoch % self.every_epochs == 0
        if due or asked is not None:
            self._save(run)
        if asked == _LEAVE:
            self._leave(run)

    def on_fit_end(self, run: RunView) -> None:
        assert self._checkpoints is not None
        if run.steps:
            self._save(run)
        self._checkpoints.wait()
        self._finished = True

    def close(self, run: RunView) -> None:
        if self._appointments is not None:
            self._appointments.close()
            self._appointments = None
        preemption, self._preemption = self._preemption, None
        if preemption is not None:
            preemption.close()
            if preemption.asked and self._finished:  # too late to save anything more: end as TERM would have
                os.kill(os.getpid(), signal.SIGTERM)
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None

    def _save(self, run: RunView) -> None:
        here = (run.steps, run.under_way)
        if self._saved == here:
            return
        assert self._checkpoints is not None
        self._checkpoints.save(
            run_of(run),
            step=run.steps,
            epoch=run.epoch,
            metrics=_metrics(run),
            extra={"trainer": run.state_dict(), "callbacks": _callback_states(run)},
            config=self.config,
        )
        self._saved, self._saved_at_s = here, time.monotonic()

    def _leave(self, run: RunView) -> None:
        assert self._checkpoints is not None
        self._checkpoints.wait()
        if run.world.rank == 0:
            print(
                f"TERM: saved {self.directory} after step {run.step} of epoch {run.epoch}; leaving with exit "
                f"code {EXIT_CODE}",
                flush=True,
            )
        raise SystemExit(EXIT_CODE)


def run_of(run: RunView) -> Run:
    """The things of which the run's checkpoints are made."""
    loader = run.loader if hasattr(run.loader, "state_dict") else None
    ema = averaging(run)
    averages = None if ema is None else ema.averages
    return Run(run.parallel, run.optimizer, loader, run.scheduler, run.scaler, averages)


def averaging(run: RunView) -> EMA | None:
    """The run's `EMA`, whose averages its checkpoints hold.

    Raises:
        UsageError: where there are several.
    """
    all_of_them = [callback for callback in run.callbacks if isinstance(callback, EMA)]
    if len(all_of_them) > 1:
        raise UsageError(f"a checkpoint holds one EMA, the trainer has {len(all_of_them)}; leave out all but one")
    return all_of_them[0] if all_of_them else None


def _callback_states(run: RunView) -> dict[str, Any]:
    return {name: state for name, callback in named_callbacks(run) if (state := callback.state_dict())}


def named_callbacks(run: RunView) -> list[tuple[str, Callback]]:
    """The callbacks by their classes, the second of a class as ``EarlyStopping 2``."""
    seen: dict[str, int] = {}
    named = []
    for callback in run.callbacks:
        name = type(callback).__name__
        seen[name] = seen.get(name, 0) + 1
        named.append((name if seen[name] == 1 else f"{name} {seen[name]}", callback))
    return named


def _metrics(run: RunView) -> dict[str, float]:
    """The loss of the last step, and the metrics of the validation where the epoch has just ended with one."""
    metrics = {"train_loss": float(run.loss)}
    evaluation = run.evaluation
    if evaluation is not None and run.evaluated == run.epoch and not run.under_way:
        metrics |= {"loss": evaluation.loss, **evaluation.metrics}
    return metrics
