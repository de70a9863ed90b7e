"""The callback that records a run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.errors import UsageError
from shardwright.runtime.evaluation import Evaluation
from shardwright.training.callbacks import LateLosses, LateStep
from shardwright.training.hooks import RunView
from shardwright.training.records import RECORDS, Record, RecordTarget, RecordWriter, record_problems


class Recorder(LateLosses):
    """Rank 0 records the loss, the learning rate and the seconds of a step every so many steps, and each validation.

    Numbers are recorded under the count of optimizer steps: ``loss``, ``learning_rate``, ``step_seconds`` (the mean
    since the last record), ``validation_loss``, and a metric as ``validation_accuracy``. A run that goes on from a
    checkpoint goes on in the same files, without what came after that checkpoint. A GPU is not waited for.

    Args:
        folder: where the files are, the same on all ranks.
        to: some of "csv", "jsonl", "tensorboard", "wandb", "mlflow".
        every: how many steps apart.
        config: what the trackers keep beside the numbers.

    Raises:
        UsageError: where a kind is unknown, or its package is not installed.
    """

    def __init__(
        self, folder: str | Path, to: Sequence[str] = ("csv",), every: int = 1, config: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(every)
        if problems := record_problems(to):
            raise UsageError(f"expected Recorder(to=...) of what there is: {'; '.join(problems)}")
        self.folder, self.to, self.config = Path(folder), tuple(to), dict(config or {})
        self._writers: list[RecordWriter] = []
        self._since: tuple[int, float] | None = None

    def alike(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "to": self.to, "every": self.every}

    def on_fit_begin(self, run: RunView) -> None:
        if run.world.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            target = RecordTarget(self.folder, run.steps, self.config)
            self._writers = [RECORDS[name].make(target) for name in self.to]
            self._since = run.steps, time.monotonic()

    def on_late_step(self, step: LateStep) -> None:
        assert self._since is not None
        steps, since_s = self._since
        values = {"loss": step.loss, "step_seconds": (step.at_s - since_s) / max(1, step.steps - steps)}
        if step.learning_rate is not None:
            values["learning_rate"] = step.learning_rate
        self._since = step.steps, step.at_s
        self._write(Record(step.steps, step.epoch, values))

    def on_validation_end(self, run: RunView, evaluation: Evaluation) -> None:
        values = {} if math.isnan(evaluation.loss) else {"validation_loss": evaluation.loss}
        values |= {f"validation_{name}": value for name, value in evaluation.metrics.items()}
        self._write(Record(run.steps, run.epoch, values))
        if run.world.rank == 0:
            self._since = run.steps, time.monotonic()

    def close(self, run: RunView) -> None:
        super().close(run)
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()

    def _write(self, record: Record) -> None:
        for writer in self._writers:
            writer.write(record)
