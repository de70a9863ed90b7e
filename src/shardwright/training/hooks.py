"""The protocol of callbacks, and what they see of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwright.distributed.world import World
from shardwright.runtime.evaluation import Evaluation
from shardwright.runtime.model import ParallelModel

Validation = Iterable[Any] | Callable[[ParallelModel], Evaluation]
"""Batches to evaluate by the loss function, or a function that evaluates the model in its own way."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunView:
    """A run as a callback sees it, at the moment at which the callback is called.

    Its parts are those of the `Trainer`, under the same names. ``epoch`` and ``step`` (within the epoch) count from 1,
    ``batches`` are those of the epoch so far, ``steps`` the optimizer steps begun so far, ``under_way`` says that the
    epoch has steps or its validation to come, ``loss`` is the last step's, a tensor, and ``evaluation`` the last
    validation's, in epoch ``evaluated``. ``stop()`` ends the run after the step that is under way; every rank must call
    it at the same step.
    """

    parallel: ParallelModel
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler
    callbacks: tuple[Callback, ...]
    loader: Any
    world: World

    epoch: int
    step: int
    steps: int
    batches: int
    under_way: bool
    loss: Tensor
    evaluation: Evaluation | None
    evaluated: int

    stop: Callable[[], None]
    evaluate: Callable[[Validation], Evaluation]
    state_dict: Callable[[], dict[str, Any]]


class Callback:
    """Called by `Trainer` on every rank at these points; a subclass overrides those that it wants.

    An exception ends the run, with a note that names the callback. What one rank does alone must not be a collective.
    """

    on_every_rank = False
    """Whether all ranks must have this callback where one has it; else the run is refused."""

    def alike(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks with this callback, by name; a path is a folder's."""
        return {}

    def on_fit_begin(self, run: RunView) -> None:
        """Called before the first step."""

    def on_epoch_begin(self, run: RunView) -> None:
        """Called before the first batch of ``run.epoch`` is read."""

    def on_loss(self, run: RunView, batch: Any, loss: Tensor) -> None:
        """Called before the backward of each batch; ``loss`` is that of the global batch."""

    def on_backward(self, run: RunView, batch: Any, loss: Tensor) -> None:
        """Called after the backward of each batch, and before the optimizer's step."""

    def on_step_end(self, run: RunView) -> None:
        """Called after each optimizer step."""

    def on_validation_end(self, run: RunView, evaluation: Evaluation) -> None:
        """Called after each validation."""

    def on_epoch_end(self, run: RunView) -> None:
        """Called after each epoch and its validation."""

    def at_rest(self, run: RunView) -> None:
        """Called after all callbacks have seen the end of a step, or of an epoch.

        The state of the run is complete, and from a checkpoint of it the run goes on here. All ranks come by.
        """

    def on_fit_end(self, run: RunView) -> None:
        """Called after the last epoch; not after an error."""

    def close(self, run: RunView) -> None:
        """Called at the very end, after an error or Ctrl-C too: gives back what is held. No collectives here."""

    def evaluating(self, run: RunView) -> AbstractContextManager[None]:
        """Gives the context in which each evaluation runs."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: numbers, strings, lists and dicts of them, the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
