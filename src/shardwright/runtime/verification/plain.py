"""A model as plain PyTorch runs it, behind the face of `ParallelModel`: the reference of a loop that is verified."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from shardwright.compiler.capture.capture import flatten_batch
from shardwright.compiler.capture.tracing.trace import LossFunction
from shardwright.data.loading.batch import Batch
from shardwright.distributed.lockstep import Lockstep
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.programs.execute import Execution
from shardwright.runtime.programs.inputs import rows_of


class PlainModel(ParallelModel):
    """``model(batch)`` calls the loss function on the whole batch; nothing is captured, and no rank talks."""

    plan = None

    def __init__(self, module: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__(module, Lockstep())
        self._loss_fn = loss_fn

    def __call__(self, batch: Any) -> Any:
        return self._loss_fn(self.module, batch)

    def _predicted(self, batch: Any, gather: bool) -> Any:
        return self._loss_fn(self.module, batch)[1]

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def samples(self, batch: Any) -> int:
        return (
            batch.global_size if isinstance(batch, Batch) else rows_of(batch, flatten_batch(batch), "global", 1).total
        )

    def replay(self, batch: Any) -> None:
        return None

    def executions(self) -> list[Execution]:
        return []

    def close(self) -> None:
        pass

    def full_state_dict(self) -> dict[str, Any]:
        return self.state_dict()

    def random_state(self) -> None:
        return None

    def load_random_state(self, state: Mapping[str, int]) -> None:
        pass
