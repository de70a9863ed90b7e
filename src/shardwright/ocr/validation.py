"""Evaluation over all ranks: each image is counted once, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, Protocol

import torch

from shardwright.data.loading.loader import loader
from shardwright.distributed.agreement import attempt, from_all_ranks
from shardwright.distributed.precision import Precision, autocast
from shardwright.distributed.world import World
from shardwright.errors import TrainingError
from shardwright.ocr.options.sections import Settings
from shardwright.ocr.samples.dataset import TextImages
from shardwright.ocr.scoring.counts import Counts
from shardwright.ocr.tasks import TASKS
from shardwright.runtime.evaluation import Evaluation


class Predicts(Protocol):
    """A `ParallelModel`, or a network of this rank alone."""

    def predict(self, batch: Any, *, gather: bool = True) -> Any:
        """The outputs for the rows of ``batch`` that this rank was given, with ``gather=False``."""


@dataclass(frozen=True)
class Validator:
    """``validator(parallel)`` is what the model reaches on ``images``; all ranks call it together.

    Every rank takes its part of each batch, makes texts of what the network gives, and counts; the counts of all ranks
    are added before they are divided.
    """

    settings: Settings
    images: TextImages
    world: World
    precision: Precision = "float32"

    def __call__(self, parallel: Predicts) -> Evaluation:
        options = self.settings.evaluating.loader
        # Cut evenly and not as the plan does, which may give the same rows to several ranks.
        batches = loader(
            self.images,
            options.global_batch_size,
            per_rank_batch_size=options.batch_size,
            evaluate=True,
            num_workers=options.num_workers,
            world=self.world,
        )
        row = TASKS[self.settings.model.type]
        counts, problem = row.none, None
        for batch in batches:
            with autocast(self.precision, self.world.device):
                outputs = parallel.predict(batch, gather=False)
            if problem is None:  # else this rank goes on, since the others wait for it
                problem, counted = attempt(partial(self._count, batch, outputs))
                counts = counted + counts if counted is not None else counts
        return self._together(counts, problem)

    def _count(self, batch: Any, outputs: Any) -> Counts:
        rows = batch.stop - batch.start
        mine = [tensor[:rows] for tensor in batch]
        outputs = [o[:rows] for o in outputs] if isinstance(outputs, (tuple, list)) else outputs[:rows]
        with torch.no_grad():
            return TASKS[self.settings.model.type].count(self.settings, self.images, mine, outputs)

    def _together(self, counts: Counts, problem: str | None) -> Evaluation:
        everyone = from_all_ranks((counts, problem))
        failed = next((rank for rank, (_, theirs) in enumerate(everyone) if theirs), None)
        if failed is not None:
            raise TrainingError(f"rank {failed} could not evaluate its images: {everyone[failed][1]}")
        whole = reduce(add, (theirs for theirs, _ in everyone))
        if whole.images != len(self.images):
            raise TrainingError(f"the evaluation counted {whole.images} images of {len(self.images)}")
        return Evaluation(float("nan"), whole.metrics(), whole.images)
