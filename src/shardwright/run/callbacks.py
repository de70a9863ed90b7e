"""What happens beside the training steps: losses printed, checkpoints written, runs stopped, weights averaged."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.progress import Progress, TaskID
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.errors import TrainingError, UsageError
from shardwright.report.text import loss_line
from shardwright.run.captured import Parallel
from shardwright.run.nonfinite import first_non_finite
from shardwright.run.storage import local_part
from shardwright.torch_private import tree_map

if TYPE_CHECKING:
    from shardwright.run.trainer import Evaluation, Trainer


class Callback:
    """Called by `Trainer` on every rank at these points; a subclass overrides those that it wants.

    An exception ends the run, with a note that names the callback. What one rank does alone must not be a collective.
    """

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Before the first step."""

    def on_epoch_begin(self, trainer: Trainer) -> None:
        """Before the first batch of ``trainer.epoch`` is read."""

    def on_loss(self, trainer: Trainer, batch: Any, loss: Tensor) -> None:
        """Before the backward of each batch; ``loss`` is that of the global batch."""

    def on_step_end(self, trainer: Trainer) -> None:
        """After each optimizer step."""

    def on_validation_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """After each validation."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """After each epoch and its validation."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """After the last epoch; not after an error."""

    def close(self, trainer: Trainer) -> None:
        """At the very end, after an error or Ctrl-C too: give back what is held. No collectives here."""

    def evaluating(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Around each evaluation."""
        return nullcontext()


class LossMonitor(Callback):
    """Rank 0 prints ``epoch: 1 step: 10, loss is 2.3025854`` every so many steps of an epoch."""

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"expected LossMonitor(every=...) of at least 1 step, got {every}")
        self.every = every

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0 and trainer.world.rank == 0:
            print(loss_line(trainer.epoch, trainer.step, trainer.loss.item()), flush=True)


class ProgressBar(Callback):
    """A bar of the epoch's steps on rank 0, where its output is a terminal; elsewhere nothing."""

    def __init__(self, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def on_fit_begin(self, trainer: Trainer) -> None:
        # OpenMPI's ranks have terminals of their own as stdout, from which it copies; their stderr tells.
        if trainer.world.rank == 0 and sys.stdout.isatty() and sys.stderr.isatty():
            self._progress = Progress(transient=True)
            self._progress.start()

    def on_epoch_begin(self, trainer: Trainer) -> None:
        if self._progress is not None:
            self._task = self._progress.add_task(f"epoch {trainer.epoch}", total=self.steps_per_epoch)

    def on_step_end(self, trainer: Trainer) -> None:
        if self._progress is not None:
            self._progress.advance(self._task)

    def on_epoch_end(self, trainer: Trainer) -> None:
        if self._progress is not None:
            self._progress.remove_task(self._task)

    def close(self, trainer: Trainer) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class EarlyStopping(Callback):
    """Stops after ``patience`` validations in a row that did not better the best one by more than ``min_delta``.

    ``metric`` is "loss", of which less is better, or a metric of the loss function's, of which more is.
    """

    def __init__(self, patience: int, metric: str = "loss", min_delta: float = 0.0) -> None:
        if patience < 1:
            raise UsageError(f"expected EarlyStopping(patience=...) of at least 1 validation, got {patience}")
        self.patience, self.metric, self.min_delta = patience, metric, min_delta
        self._best = -float("inf")
        self._waited = 0

    def on_validation_end(self, trainer: Trainer, evaluation: Evaluation) -> None:
        values = {"loss": -evaluation.loss, **evaluation.metrics}
        if self.metric not in values:
            raise UsageError(f"EarlyStopping watches {self.metric!r}; the validation gave {', '.join(values)}")
        if values[self.metric] > self._best + self.min_delta:
            self._best, self._waited = values[self.metric], 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            trainer.stop()


class EMA(Callback):
    """The exponential moving average of the parameters; evaluations use it in their place.

    ``average ← decay · average + (1 - decay) · parameter`` after every optimizer step, beginning with the parameters
    as they are at the start. Each rank averages what it holds. Buffers are used as they are.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise UsageError(f"expected EMA(decay=...) from 0 to below 1, got {decay}")
        self.decay = decay
        self._averages: list[Tensor] = []

    def on_fit_begin(self, trainer: Trainer) -> None:
        if not self._averages:
            self._averages = [part.clone() for part in _local_parts(trainer)]

    def on_step_end(self, trainer: Trainer) -> None:
        for average, part in zip(self._averages, _local_parts(trainer), strict=True):
            average.lerp_(part, 1 - self.decay)

    @contextmanager
    def evaluating(self, trainer: Trainer) -> Iterator[None]:
        """Inside, the model has the averaged parameters."""
        self.swap(trainer)
        try:
            yield
        finally:
            self.swap(trainer)

    def swap(self, trainer: Trainer) -> None:
        """Exchange the parameters and their averages."""
        for part, average in zip(_local_parts(trainer), self._averages, strict=True):
            kept = part.clone()
            part.copy_(average)
            average.copy_(kept)


def _local_parts(trainer: Trainer) -> list[Tensor]:
    return [local_part(parameter.detach()) for parameter in trainer.parallel.parameters()]


class NanGuard(Callback):
    """Ends the run at the first loss that is not finite, naming the operator that first gave such a value, and where.

    Looking costs a transfer of the loss from the device at every step.

    Raises:
        TrainingError: on every rank.
    """

    def on_loss(self, trainer: Trainer, batch: Any, loss: Tensor) -> None:
        if bool(torch.isfinite(loss.detach())):
            return
        message = f"the loss is {loss.item()} at epoch {trainer.epoch}, step {trainer.step}"
        if not isinstance(trainer.parallel, Parallel):
            raise TrainingError(f"{message}; only a model that can be captured tells which operator began it")
        origin = first_non_finite(trainer.parallel, batch)
        if origin is None:
            raise TrainingError(f"{message}; a second run of the same step gave a finite loss")
        raise TrainingError(f"{message}; first on rank {origin.rank}: {origin.what}")


class ModelCheckpoint(Callback):
    """Writes the training state to ``directory`` every so many epochs, or steps where ``every_steps`` is given.

    "shared": rank 0 writes ``epoch_3.pt`` with whole tensors. "per-rank": each rank writes what it holds to
    ``rank_N/epoch_3.pt``. A file is complete when it has its name: it is written under another, which is removed when
    anything goes wrong. The format will change.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_epochs: int = 1,
        every_steps: int | None = None,
        kind: Literal["shared", "per-rank"] = "shared",
    ) -> None:
        if kind not in ("shared", "per-rank"):
            raise UsageError(f"ModelCheckpoint(kind={kind!r}) is unknown; choose 'shared' or 'per-rank'")
        if every_epochs < 1 or (every_steps is not None and every_steps < 1):
            raise UsageError(f"expected every_epochs and every_steps of at least 1, got {every_epochs}, {every_steps}")
        self.directory = Path(directory)
        self.every_epochs, self.every_steps, self.kind = every_epochs, every_steps, kind

    def on_step_end(self, trainer: Trainer) -> None:
        if self.every_steps is not None and trainer.steps % self.every_steps == 0:
            self._save(trainer, f"step_{trainer.steps}.pt")

    def on_epoch_end(self, trainer: Trainer) -> None:
        if self.every_steps is None and trainer.epoch % self.every_epochs == 0:
            self._save(trainer, f"epoch_{trainer.epoch}.pt")

    def _save(self, trainer: Trainer, name: str) -> None:
        shared, parallel = self.kind == "shared", trainer.parallel
        whole = shared and isinstance(parallel, Parallel)
        model = parallel.full_state_dict() if whole else parallel.state_dict()  # type: ignore[union-attr]
        keep = _whole if shared else _local
        state = {
            "model": tree_map(keep, model),
            "optimizer": tree_map(keep, trainer.optimizer.state_dict()),
            "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
            "scaler": trainer.scaler.state_dict(),
            "epoch": trainer.epoch,
            "steps": trainer.steps,
        }
        rank = trainer.world.rank
        if not shared or rank == 0:
            folder = self.directory if shared else self.directory / f"rank_{rank}"
            write_whole(folder / name, lambda path: torch.save(state, path))


def _whole(leaf: Any) -> Any:
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def _local(leaf: Any) -> Any:
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file under a temporary name, then give it its own: nobody ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
