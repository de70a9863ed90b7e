"""The base of what `sw.parallelize` returns: nothing that trains or saves asks which way a model runs.

`runtime.captured.Parallel` runs the programs of a plan, `runtime.eager_parallel.EagerParallel` torch's
DistributedDataParallel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.common.pulse import own_pulse
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.lower.program import LocalProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.distributed.control import control_group
from shardwright.distributed.lockstep import Lockstep
from shardwright.distributed.pending_numbers import PendingNumbers
from shardwright.distributed.precision import Precision
from shardwright.distributed.ranks import alone
from shardwright.errors import UsageError
from shardwright.runtime.evaluation import Evaluation, Sums, metric_sums
from shardwright.runtime.module_interface import ModuleInterface, evaluating
from shardwright.runtime.programs.execute import Execution
from shardwright.runtime.updates.optimizers import look_at, note_trained


@dataclass(frozen=True, eq=False)
class Replay:
    """A forward that was run once more: its graph, this rank's program, and the value of each variable of that."""

    capture: Capture
    program: LocalProgram
    values: Mapping[str, Any]


class ParallelModel(ModuleInterface):
    """``parallel(batch)`` is the loss of the global batch, the same on every rank; its backward leaves gradients.

    Where the loss function returns ``(loss, aux)``, so does this, and a backward that comes to ``aux`` is refused.
    `close`, or the end of a ``with``, gives back process groups that nobody else uses.
    """

    plan: Plan | None
    """The plan for the shapes of the sample batch; None where the model runs by DistributedDataParallel."""
    precision: Precision | None = None
    """The ``precision`` that `sw.parallelize` was given."""

    def __init__(self, module: nn.Module, lockstep: Lockstep) -> None:
        self.module = module
        self._lockstep = lockstep
        self._failure = ""  # of a step that other ranks may still be in
        self._pulse = own_pulse()
        note_trained(module.parameters())

    # Running

    @abstractmethod
    def __call__(self, batch: Any) -> Any:
        """The loss of the global batch, or ``(loss, aux)``; in training mode it is one more step."""

    def predict(self, batch: Any, *, gather: bool = True) -> Any:
        """Return what ``predict_fn`` returns, or the loss function beside the loss, in evaluation mode, no gradients.

        Whole on every rank; with ``gather=False`` the rows of the batch that this rank was given.
        """
        with self._lockstep.call():
            self._refuse_failed()
            with evaluating(self.module), torch.no_grad():
                return self._predicted(batch, gather)

    @abstractmethod
    def _predicted(self, batch: Any, gather: bool) -> Any:
        """The outputs for a batch; the model is in evaluation mode."""

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Inside, backwards do not reduce gradients between ranks; the next one outside reduces the sum of all."""

    def _summed(self, mine: int) -> int:
        """Return the sum of the numbers of all ranks, who ask for it together."""
        total = torch.tensor(mine, device="cpu")
        with self._lockstep.call():
            self._lockstep.run(dist.all_reduce, total, group=control_group())
        return int(total)

    def no_more(self, words: str) -> None:
        """Wait until no rank makes a call any more, as where batches end; ``words`` say why, and follow "rank 1".

        Raises:
            UsageError: on every rank, where another one makes a call.
        """
        self._lockstep.rest(words)

    @abstractmethod
    def samples(self, batch: Any) -> int:
        """Return how many samples the global batch has, of which ``batch`` is this rank's part; a collective call."""

    def evaluate(self, batch: Any) -> Evaluation:
        """The loss and the metrics of the global batch; all ranks call it together."""
        return self.sums(batch).means()

    def sums(self, batch: Any) -> Sums:
        """Return what `evaluate` gives the means of, left on the device: many batches are then waited for once."""
        with torch.set_grad_enabled(self.module.training and torch.is_grad_enabled()):
            result, samples = self._step_and_samples(batch)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        return Sums(loss.detach().double() * samples, self._metrics(aux, batch, samples), samples)

    def _step_and_samples(self, batch: Any) -> tuple[Any, int]:
        """Return what a call gives for a batch, and how many samples the global batch has."""
        return self(batch), self.samples(batch)

    def _metrics(self, aux: Any, batch: Any, samples: int) -> Mapping[str, Tensor | float]:
        """The metrics among what was returned beside the loss of the global batch, summed over its samples."""
        return metric_sums(aux, samples)

    @abstractmethod
    def replay(self, batch: Any) -> Replay | None:
        """The forward of the training step that was run last, once more for the same ``batch``.

        Draws the same random numbers and changes nothing. None where the model was not captured.
        """

    @abstractmethod
    def executions(self) -> list[Execution]:
        """The programs that were made so far, each with a count of its runs."""

    @abstractmethod
    def close(self) -> None:
        """Give back process groups, once no backward is to come; every rank calls it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_failed(self) -> None:
        """Asked at the beginning of each call that all ranks make together.

        Raises:
            UsageError: where an earlier step has failed here, since what this rank sends would reach those who wait.
        """
        if self._failure:
            raise UsageError(
                f"an earlier step failed on this rank ({self._failure}), in which others may still wait for it; "
                "let such an error end the job, and look for bad batches before they are passed"
            )

    def _failed_in_step(self, error: Exception) -> None:
        """Told of an error in what ranks do together in a step, where others may wait for this one."""
        self._lockstep.lost(error)
        self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        """Let no further step begin here: what it sends would reach ranks that are still in this one."""
        if not alone():
            self._failure = str(error).partition("\n")[0]

    def _tell_computed(self, samples: int, loss: Tensor) -> None:
        """Tell those who watch the job what a batch of a step gave."""
        if (steps := self._pulse.steps).has_reader:
            steps.computed(samples, partial(PendingNumbers, loss.detach()))

    # The state

    @abstractmethod
    def full_state_dict(self) -> dict[str, Any]:
        """The state of the model, every tensor whole on every rank; all ranks call it together."""

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was made before the model was split have its parts now, not only at its first step.

        Raises:
            UsageError: where it has state already, which belongs to whole parameters.
        """
        look_at(optimizer)

    @abstractmethod
    def random_state(self) -> dict[str, int] | None:
        """Return what the random numbers of the next training step depend on, beside positions: the same on every rank.

        None where they are those of torch's generators, which differ between ranks.
        """

    @abstractmethod
    def load_random_state(self, state: Mapping[str, int]) -> None:
        """Draw from here on what the one that gave ``state`` would draw; every rank calls it with the same."""
