"""Means of the loss and of metrics over samples, from batches and from ranks.

A metric is a scalar in the mapping that the loss function returns beside the loss: an integer counts samples, a float
is a mean over the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.world.agreement import from_all_ranks


@dataclass(frozen=True)
class Evaluation:
    """The mean loss, nan where none was computed, and metrics over ``samples`` samples, each counted once."""

    loss: float
    metrics: Mapping[str, float]
    samples: int

    def state(self) -> dict[str, Any]:
        """The evaluation as values, from which ``Evaluation(**values)`` makes it again."""
        return {"loss": self.loss, "metrics": dict(self.metrics), "samples": self.samples}


def together(parts: Iterable[Evaluation]) -> Evaluation | None:
    """The means over the samples of all parts; None where there are none.

    >>> together([Evaluation(1.0, {"accuracy": 0.5}, 2), Evaluation(4.0, {"accuracy": 1.0}, 4)])
    Evaluation(loss=3.0, metrics={'accuracy': 0.8333333333333334}, samples=6)
    """
    samples, loss, metrics = 0, 0.0, dict[str, float]()
    for part in parts:
        samples += part.samples
        loss += part.loss * part.samples
        for name, mean in part.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + mean * part.samples
    if not samples:
        return None
    return Evaluation(loss / samples, {name: total / samples for name, total in metrics.items()}, samples)


def metric_means(aux: Any, samples: int) -> dict[str, float]:
    """The metrics of a global batch of ``samples`` samples, each as a mean over them."""
    return {name: total / samples for name, total in _totals(aux, samples)}


def metric_means_over_ranks(aux: Any, samples: int) -> dict[str, float]:
    """The means over all ranks' parts, of which this one has ``samples`` samples (no metrics if it is empty)."""
    everyone = from_all_ranks((dict(_totals(aux, samples)), samples))
    whole = sum(count for _, count in everyone)
    names = next((list(metrics) for metrics, count in everyone if count), [])
    return {name: sum(metrics.get(name, 0.0) for metrics, _ in everyone) / whole for name in names}


def _totals(aux: Any, samples: int) -> Iterator[tuple[str, float]]:
    """Each metric summed over ``samples`` samples: a count is that already."""
    if isinstance(aux, Mapping):
        for name, value in aux.items():
            if isinstance(value, Tensor) and value.ndim == 0:
                yield str(name), float(value) * (samples if value.is_floating_point() else 1)
