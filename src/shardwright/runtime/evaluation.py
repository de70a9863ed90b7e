"""Averages the loss and metrics over all samples of an evaluation, across batches and ranks.

A metric is a scalar in the mapping that the loss function returns beside the loss: an integer counts samples, a float
is a mean over the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.distributed.agreement import from_all_ranks


@dataclass(frozen=True)
class Evaluation:
    """The mean loss, nan where none was computed, and metrics over ``samples`` samples, each counted once."""

    loss: float
    metrics: Mapping[str, float]
    samples: int

    def state(self) -> dict[str, Any]:
        """The evaluation as values, from which ``Evaluation(**values)`` makes it again."""
        return {"loss": self.loss, "metrics": dict(self.metrics), "samples": self.samples}


@dataclass(frozen=True, eq=False)
class Sums:
    """The loss and metrics of some batches, each summed over their ``samples``, on the device that computed them.

    A GPU is not waited for until their means are asked for.

    >>> parts = Sums(2.0, {"right": 1.0}, 2), Sums(16.0, {"right": 4.0}, 4)
    >>> (parts[0] + parts[1]).means()
    Evaluation(loss=3.0, metrics={'right': 0.8333333333333334}, samples=6)
    """

    loss: Tensor | float
    metrics: Mapping[str, Tensor | float]
    samples: int

    def __add__(self, other: Sums) -> Sums:
        names = (*self.metrics, *(name for name in other.metrics if name not in self.metrics))
        metrics = {name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0) for name in names}
        return Sums(self.loss + other.loss, metrics, self.samples + other.samples)

    def means(self) -> Evaluation:
        """The means over all samples, in numbers."""
        metrics = {name: float(total) / self.samples for name, total in self.metrics.items()}
        return Evaluation(float(self.loss) / self.samples, metrics, self.samples)


def metric_sums(aux: Any, samples: int) -> dict[str, Tensor | float]:
    """The metrics of a batch of ``samples`` samples, each summed over them: a count is that already."""
    found: dict[str, Tensor | float] = {}
    if isinstance(aux, Mapping):
        for name, value in aux.items():
            if isinstance(value, Tensor) and value.ndim == 0:
                found[str(name)] = value.detach().double() * (samples if value.is_floating_point() else 1)
    return found


def metric_sums_over_ranks(aux: Any, samples: int) -> dict[str, Tensor | float]:
    """The sums over all ranks' parts, of which this one has ``samples`` samples (no metrics if it is empty)."""
    everyone = from_all_ranks({name: float(total) for name, total in metric_sums(aux, samples).items()})
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    return {name: sum(theirs.get(name, 0.0) for theirs in everyone) for name in names}
