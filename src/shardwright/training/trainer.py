"""The training loop that people expect, over what `parallelize` returned.

The loss is that of the global batch on every rank, so that whatever the loop decides from it (stopping, skipping,
choosing a checkpoint) all ranks decide alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields
from functools import partial, reduce
from itertools import islice
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwright.checkpoint.loading.match import Rename
from shardwright.common.pulse import own_pulse
from shardwright.compiler.report.text import start_line, validation_line
from shardwright.distributed.pending_numbers import PendingNumbers
from shardwright.distributed.precision import Precision, autocast, check_precision, gradient_scaler
from shardwright.distributed.world import current_world
from shardwright.errors import UsageError
from shardwright.runtime.evaluation import Evaluation, Sums
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.module_interface import evaluating
from shardwright.training.checkpointing import ModelCheckpoint
from shardwright.training.hooks import Callback, RunView, Validation
from shardwright.training.network.traffic import TrafficWatch
from shardwright.training.resuming import Begun, Continuation, resume
from shardwright.training.same_settings import refuse_unlike_run


class Trainer:
    """Trains ``parallel`` with ``optimizer``; every rank makes one with the same arguments.

    Args:
        parallel: what `sw.parallelize` returned.
        optimizer: over ``parallel.parameters()``, in any groups.
        callbacks: called in this order at every point of `Callback`.
        scheduler: stepped once per optimizer step, whatever its kind: `sw.cosine_schedule` and its like count so.
        clip_norm: the largest norm of the gradient of all parameters together; None leaves gradients alone.
        accumulate: how many batches of the loader make one optimizer step. The gradient is that of the mean over all
            their samples, also where they differ in size.
        precision: what forwards compute in: "float32" as the model is, "bf16" or "fp16" by autocast, fp16 with a scaler
            whose overflows skip the step on all ranks; by default what `sw.parallelize` was told, else "float32".

    Where the run stands, ``epoch``, ``step``, ``steps``, ``loss``, ``evaluation`` and the like, it says under the names
    of `RunView`, which is what callbacks are given.

    Raises `UsageError` for arguments that do not fit.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        optimizer: Optimizer,
        callbacks: Sequence[Callback] = (),
        *,
        scheduler: LRScheduler | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        precision: Precision | None = None,
    ) -> None:
        if precision is not None:
            check_precision(precision)
        if not isinstance(accumulate, int) or accumulate < 1:
            raise UsageError(f"expected accumulate, batches per optimizer step, to be at least 1, got {accumulate!r}")
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"expected clip_norm to be more than 0, or None for no clipping, got {clip_norm!r}")
        told = parallel.precision
        if precision is not None and told not in (None, precision):
            raise UsageError(
                f"the trainer is to compute in {precision}, and sw.parallelize was told precision={told!r}; leave one "
                "of the two out"
            )
        self.parallel = parallel
        self.optimizer = optimizer
        self.callbacks = tuple(callbacks)
        self.scheduler = scheduler
        self.clip_norm = clip_norm
        self.accumulate = accumulate
        self.precision: Precision = precision or told or "float32"
        self.world = current_world()
        self.scaler = gradient_scaler(self.precision, self.world.device)
        self.epoch, self.step, self.steps = 0, 0, 0
        self.loss = torch.zeros((), device="cpu")
        self.evaluation: Evaluation | None = None
        self.evaluated = 0
        self.under_way = False
        self.loader: Any = None
        self.batches = 0
        self._stopping = self._stopped = self._announced = False
        self._begun = Begun()
        self._validates: Callable[[int], bool] = _every_epoch
        self._pulse = own_pulse()
        self._continues: Continuation | None = None

    def stop(self) -> None:
        """End the run after this step; every rank must call it at the same step."""
        self._stopping = self._stopped = True

    def resume(
        self, where: str | os.PathLike[str] = "auto", *, strict: bool = True, rename: Rename | None = None
    ) -> str | None:
        """Go on from a checkpoint: the newest of a directory, or the one at a path; all ranks call it before `fit`.

        "auto" takes the newest undamaged one that `ModelCheckpoint` has written, or begins anew where there is none,
        and rank 0 prints which. The next `fit` then ends where the interrupted one would have: it is to be called with
        the same arguments. It begins with the next sample, in the middle of an epoch too, and goes on counting epochs
        and steps. The number of ranks, the mode and ``accumulate`` may be others.

        Returns the name of the checkpoint, None where there was none. ``strict`` and ``rename`` as in
        `sw.checkpoint.load`.

        Raises:
            CheckpointError: where there is no checkpoint, it does not fit, or all are damaged.
            UsageError: where ranks name different folders, or have other callbacks.
        """
        self._refuse_unlike()
        loaded = resume(self._view(), where, strict, rename)
        if loaded is None:
            return None
        saved = (loaded.extra or {}).get("trainer") or {"epoch": loaded.epoch, "steps": loaded.step}
        self.load_state_dict(saved)
        self._continues = Continuation(loaded.left.get("loader"), saved.get("world_size"))
        for callback in self.callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback.resumed(self._view(), where, loaded.name)
        return loaded.name

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is, in values; what it trains has states of its own."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "steps": self.steps,
            "batches": self.batches,
            "under_way": self.under_way,
            "stopped": self._stopped,
            "begun": [self._begun.epoch, self._begun.steps],
            "evaluated": self.evaluated,
            "evaluation": None if self.evaluation is None else self.evaluation.state(),
            "world_size": self.world.size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where ``state`` was taken; `resume` calls it."""
        self.epoch, self.steps = state["epoch"], state["steps"]
        self.step, self.under_way = state.get("step", 0), state.get("under_way", False)
        self.batches, self._stopped = state.get("batches", 0), state.get("stopped", False)
        self._begun, self.evaluated = Begun(*state.get("begun", (0, 0))), state.get("evaluated", 0)
        if state.get("evaluation") is not None:
            self.evaluation = Evaluation(**state["evaluation"])

    def fit(
        self,
        loader: Iterable[Any],
        epochs: int = 1,
        *,
        validate: Validation | None = None,
        steps: int | None = None,
        validate_when: Callable[[int], bool] | None = None,
    ) -> None:
        """Train for ``epochs`` passes over ``loader``, or until ``steps`` optimizer steps where those are fewer.

        After every epoch, or after those for which ``validate_when(epoch)`` says so, ``validate`` is evaluated and rank
        0 prints its line. A run on several ranks ends with what the network devices moved, beside what the plan
        predicted (`shardwright.training.network.traffic`).
        """
        if epochs < 1 or (steps is not None and steps < 1):
            raise UsageError(f"expected epochs and steps of at least 1, got epochs={epochs}, steps={steps}")
        self._refuse_unlike()
        continues, self._continues = self._continues, None
        if continues is None:
            self._begun, self._stopped, self.under_way = Begun(self.epoch, self.steps), False, False
        last_epoch = self._begun.epoch + epochs
        last_step = None if steps is None else self._begun.steps + steps
        self._stopping = self._stopped or (last_step is not None and self.steps >= last_step)
        self.loader, self._validates = loader, validate_when or _every_epoch
        with ExitStack() as closing:
            for callback in self.callbacks:
                closing.callback(self._close, callback)
            self._call_all("on_fit_begin")
            traffic = TrafficWatch(self.parallel, self.world)
            if continues is not None:
                continues.place(self._view(), loader)
            while self.under_way or (not self._stopping and self.epoch < last_epoch):
                self._epoch(loader, last_step, validate, continues)
                continues = None
            self._call_all("on_fit_end")
            traffic.end()

    def _epoch(
        self,
        loader: Iterable[Any],
        last_step: int | None,
        validate: Validation | None,
        continues: Continuation | None,
    ) -> None:
        if not self.under_way:
            self.epoch += 1
            self.step = self.batches = 0
            self.under_way = True
            continues = None
        self._train_epoch(loader, last_step, continues)
        if validate is not None and self._validates(self.epoch):
            self._validate(validate)
        self._call_all("on_epoch_end")
        self.under_way = False
        self._call_all("at_rest")

    def _train_epoch(self, loader: Iterable[Any], last_step: int | None, continues: Continuation | None) -> None:
        sampler = getattr(loader, "sampler", None)
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch - 1)  # without it, torch's DistributedSampler repeats its order
        self.parallel.train()
        self._call_all("on_epoch_begin")
        batches = iter(loader) if continues is None else continues.rest(self._view(), loader)
        while not self._stopping and (group := self._load(batches)):
            self.step += 1
            self.steps += 1
            self.batches += len(group)
            self._pulse.begin_step(self.steps)
            self._train_step(group)
            if self._pulse.steps.has_reader:
                self._pulse.steps.computed(0, partial(PendingNumbers, self.loss))
            self._call_all("on_step_end")
            self._pulse.steps.close()
            self._stopping = self._stopping or self.steps == last_step
            self._call_all("at_rest")
        self.parallel.no_more(f"has no more batches after {self.step} steps of epoch {self.epoch}")

    def _load(self, batches: Iterator[Any]) -> list[Any]:
        """The batches of a step, which begins with that; none at the end of the epoch."""
        self._pulse.steps.open()
        with self._pulse.steps.loading():
            return list(islice(batches, self.accumulate))

    def _train_step(self, group: Sequence[Any]) -> None:
        """One optimizer step: the gradient of the mean loss over all samples of the batches in ``group``."""
        counts = [1]  # of one batch the step has all samples, whose number ranks may have to ask for
        if len(group) > 1 or not self._announced:
            counts = [self.parallel.samples(batch) for batch in group]
        if not self._announced:
            self._announced = True
            self._announce(counts)
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        for batch, count in zip(group, counts, strict=True):
            last = len(losses) == len(group) - 1
            with nullcontext() if last else self.parallel.accumulate():
                loss = self._loss(batch)
                self._call_all("on_loss", batch, loss)
                share = loss * (count / sum(counts))
                self.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
                self._call_all("on_backward", batch, loss)
            losses.append(share.detach())
        self.loss = torch.stack(losses).sum()
        self._update()

    def _update(self) -> None:
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parallel.parameters(), self.clip_norm)
        stepped = self._optimizer_steps()
        self.scaler.update()
        if self.scheduler is not None and stepped():
            self.scheduler.step()

    def _optimizer_steps(self) -> Callable[[], bool]:
        """Let the scaler make the step of the optimizer, unless gradients have overflown; what tells whether it did.

        Fused optimizers decide that on the device, so that nobody waits until it is asked for.
        """
        if any(group.get("fused") for group in self.optimizer.param_groups):
            scale = self.scaler.get_scale() if self.scheduler is not None else 0.0
            self.scaler.step(self.optimizer)
            return lambda: self.scaler.get_scale() >= scale  # only an overflow lowers it
        steps: list[Optimizer] = []
        noting = self.optimizer.register_step_post_hook(lambda optimizer, *_: steps.append(optimizer))
        try:
            self.scaler.step(self.optimizer)
        finally:
            noting.remove()
        return lambda: bool(steps)

    def _loss(self, batch: Any) -> Tensor:
        with autocast(self.precision, self.world.device):
            result = self.parallel(batch)
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        return loss

    def _announce(self, counts: Sequence[int]) -> None:
        if self.world.rank == 0:
            rates = [float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups]
            print(start_line(counts, self.world.size, rates, self.precision), flush=True)

    # Evaluating

    def evaluate(self, loader: Validation) -> Evaluation:
        """The mean loss and metrics over all samples of ``loader``, each counted once, in evaluation mode.

        In the place of a loader may stand a function, which all ranks call with the model. Metrics are what the loss
        function gives beside the loss if that is a mapping of scalars: integers count samples
        (``(logits.argmax(1) == y).sum()``), floats are means over the batch.

        Raises:
            UsageError: where there is nothing to evaluate.
        """
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(_call(callback, "evaluating", self._view()))
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(self.parallel.module))
            if callable(loader):
                return loader(self.parallel)
            sums = [self._sums(batch) for batch in loader]
            self.parallel.no_more(f"has no more batches after {len(sums)} of an evaluation")
        if not sums:
            raise UsageError("there is nothing to evaluate: the loader gave no batch")
        return reduce(add, sums).means()

    def _sums(self, batch: Any) -> Sums:
        with autocast(self.precision, self.world.device):
            return self.parallel.sums(batch)

    def _validate(self, loader: Validation) -> None:
        self.evaluation, self.evaluated = self.evaluate(loader), self.epoch
        self._pulse.steps.tell({"step": self.steps, "validation": self.evaluation.state()})
        if self.world.rank == 0:
            print(validation_line(self.epoch, self.evaluation.loss, self.evaluation.metrics), flush=True)
        self._call_all("on_validation_end", self.evaluation)

    # Callbacks

    def _refuse_unlike(self) -> None:
        """Refuse a run of which ranks have other callbacks or settings; all come by."""
        settings = {"accumulate": self.accumulate, "clip_norm": self.clip_norm, "precision": self.precision}
        refuse_unlike_run(self._view(), settings)

    def _view(self) -> RunView:
        return RunView(**{field.name: getattr(self, field.name) for field in fields(RunView)})

    def _call_all(self, hook: str, *arguments: Any) -> None:
        view = self._view()
        for callback in self.callbacks:
            _call(callback, hook, view, *arguments)

    def _close(self, callback: Callback) -> None:
        _call(callback, "close", self._view())


def _every_epoch(epoch: int) -> bool:
    return True


def _call(callback: Callback, hook: str, *arguments: Any) -> Any:
    method: Callable[..., Any] = getattr(callback, hook)
    try:
        return method(*arguments)
    except Exception as error:
        error.add_note(f"raised by the callback {type(callback).__name__}, in {hook}")
        raise
