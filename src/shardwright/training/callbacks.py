"""Callbacks beside the training steps: losses printed, runs stopped, weights averaged."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rich.progress import Progress, TaskID
from torch import Tensor

from shardwright.checkpoint.saving.asynchronous import wait_copied
from shardwright.compiler.report.text import loss_line
from shardwright.distributed.pending_numbers import PendingNumbers
from shardwright.errors import TrainingError, UsageError
from shardwright.launch.progress_notes import waiting_for
from shardwright.runtime.evaluation import Evaluation
from shardwright.runtime.programs.splitting import local_part
from shardwright.training.hooks import Callback, RunView
from shardwright.training.nonfinite import first_non_finite


@dataclass(frozen=True)
class LateStep:
    """A step whose loss is there: when it ended, by the monotonic clock, and the learning rate of its first group.

    The rate is None where it is a tensor, which a GPU may not have yet.
    """

    epoch: int
    step: int
    steps: int
    loss: float
    learning_rate: float | None
    at_s: float


class LateLosses(Callback, ABC):
    """Passes the loss to rank 0 every so many steps of an epoch, in order.

    A GPU is not waited for: the loss of a step is told when the next one, or an evaluation, has been asked of it.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"expected {type(self).__name__}(every=...) of at least 1 step, got {every}")
        self.every = every
        self._due: tuple[PendingNumbers, Callable[[float], LateStep]] | None = None

    @abstractmethod
    def on_late_step(self, step: LateStep) -> None:
        """Called on rank 0."""

    def on_step_end(self, run: RunView) -> None:
        self._report()
        if run.step % self.every == 0 and run.world.rank == 0:
            self._due = PendingNumbers(run.loss), _late_step(run)
            if self._due[0].is_there:
                self._report()

    @contextmanager
    def evaluating(self, run: RunView) -> Iterator[None]:
        """Print the losses of the steps before the evaluation first."""
        self._report()
        yield

    def on_epoch_end(self, run: RunView) -> None:
        self._report()

    def close(self, run: RunView) -> None:
        self._report()

    def _report(self) -> None:
        if self._due is not None:
            loss, late_step = self._due
            self._due = None
            self.on_late_step(late_step(loss.value()))


def _late_step(run: RunView) -> Callable[[float], LateStep]:
    rate = run.optimizer.param_groups[0]["lr"]
    known = None if isinstance(rate, Tensor) else float(rate)
    epoch, step, steps, at_s = run.epoch, run.step, run.steps, time.monotonic()
    return lambda loss: LateStep(epoch, step, steps, loss, known, at_s)


class LossMonitor(LateLosses):
    """Rank 0 prints ``epoch: 1 step: 10, loss is 2.3025854`` every so many steps of an epoch.

    A GPU is not waited for: the loss of a step is printed when the next one, or an evaluation, has been asked of it.
    """

    def on_late_step(self, step: LateStep) -> None:
        print(loss_line(step.epoch, step.step, step.loss), flush=True)


class ProgressBar(Callback):
    """A bar of the epoch's steps on rank 0, where its output is a terminal; elsewhere nothing."""

    def __init__(self, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch
        self._progress: Progress | None = None
        self._task, self._name = TaskID(0), ""

    def on_fit_begin(self, run: RunView) -> None:
        # OpenMPI's ranks have terminals of their own as stdout, from which it copies; their stderr tells.
        if run.world.rank == 0 and sys.stdout.isatty() and sys.stderr.isatty():
            self._progress = Progress(transient=True)
            self._progress.start()
            waiting_for.instead = self._say

    def on_epoch_begin(self, run: RunView) -> None:
        if self._progress is not None:
            self._name = f"epoch {run.epoch}"
            self._task = self._progress.add_task(self._name, total=self.steps_per_epoch, completed=run.step)

    def on_step_end(self, run: RunView) -> None:
        if self._progress is not None:
            self._progress.advance(self._task)

    def on_epoch_end(self, run: RunView) -> None:
        if self._progress is not None:
            self._progress.remove_task(self._task)

    def close(self, run: RunView) -> None:
        if self._progress is not None:
            waiting_for.instead = None
            self._progress.stop()
            self._progress = None

    def _say(self, text: str) -> None:
        if self._progress is not None and self._progress.tasks:
            self._progress.update(self._task, description=f"{self._name}, {text}" if text else self._name)


class EarlyStopping(Callback):
    """Stops after ``patience`` validations in a row that did not better the best one by more than ``min_delta``.

    ``metric`` is "loss", of which less is better, or a metric of the loss function's, of which more is.
    """

    on_every_rank = True

    def __init__(self, patience: int, metric: str = "loss", min_delta: float = 0.0) -> None:
        if patience < 1:
            raise UsageError(f"expected EarlyStopping(patience=...) of at least 1 validation, got {patience}")
        self.patience, self.metric, self.min_delta = patience, metric, min_delta
        self._best = -float("inf")
        self._waited = 0

    def alike(self) -> dict[str, Any]:
        return {"patience": self.patience, "metric": self.metric, "min_delta": self.min_delta}

    def on_validation_end(self, run: RunView, evaluation: Evaluation) -> None:
        values = {"loss": -evaluation.loss, **evaluation.metrics}
        if self.metric not in values:
            raise UsageError(f"EarlyStopping watches {self.metric!r}; the validation gave {', '.join(values)}")
        if values[self.metric] > self._best + self.min_delta:
            self._best, self._waited = values[self.metric], 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            run.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._waited = state["best"], state["waited"]


class EMA(Callback):
    """The exponential moving average of the parameters; evaluations use it in their place.

    ``average ← decay · average + (1 - decay) · parameter`` after every optimizer step, beginning with the parameters
    as they are at the start. Each rank averages what it holds. Buffers are used as they are.
    """

    on_every_rank = True

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise UsageError(f"expected EMA(decay=...) from 0 to below 1, got {decay}")
        self.decay = decay
        self.averages: dict[str, Tensor] = {}
        """By the names of the parameters, each stored as its parameter is."""

    def alike(self) -> dict[str, Any]:
        return {"decay": self.decay}

    def on_fit_begin(self, run: RunView) -> None:
        self.begin(run)

    def begin(self, run: RunView) -> None:
        """Take the parameters as they are for the averages, unless there are some."""
        if not self.averages:
            self.averages = {name: p.detach().clone() for name, p in run.parallel.named_parameters()}

    def on_step_end(self, run: RunView) -> None:
        wait_copied()  # where the scaler skipped the optimizer's step, nothing has waited so far
        for part, average in self._local_parts(run):
            average.lerp_(part, 1 - self.decay)

    @contextmanager
    def evaluating(self, run: RunView) -> Iterator[None]:
        """Inside, the model has the averaged parameters."""
        self.swap(run)
        try:
            yield
        finally:
            self.swap(run)

    def swap(self, run: RunView) -> None:
        """Exchange the parameters and their averages."""
        wait_copied()
        for part, average in self._local_parts(run):
            kept = part.clone()
            part.copy_(average)
            average.copy_(kept)

    def _local_parts(self, run: RunView) -> Iterator[tuple[Tensor, Tensor]]:
        for name, parameter in run.parallel.named_parameters():
            yield local_part(parameter.detach()), local_part(self.averages[name])


class NanGuard(Callback):
    """Ends the run at the first loss that is not finite, naming the operator that first gave such a value, and where.

    It looks when the backward has been asked of the device, and before parameters are updated: a GPU has that to do
    while its loss is waited for.

    Raises:
        TrainingError: on every rank.
    """

    on_every_rank = True

    def __init__(self) -> None:
        self._loss: PendingNumbers | None = None

    def on_loss(self, run: RunView, batch: Any, loss: Tensor) -> None:
        self._loss = PendingNumbers(loss)

    def on_backward(self, run: RunView, batch: Any, loss: Tensor) -> None:
        assert self._loss is not None
        value = self._loss.value()
        if isfinite(value):
            return
        message = f"the loss is {value} at epoch {run.epoch}, step {run.step}"
        replay = run.parallel.replay(batch)
        if replay is None:
            raise TrainingError(f"{message}; only a model that can be captured tells which operator began it")
        origin = first_non_finite(replay, run.world.rank)
        if origin is None:
            raise TrainingError(f"{message}; a second run of the same step gave a finite loss")
        raise TrainingError(f"{message}; first on rank {origin.rank}: {origin.what}")
