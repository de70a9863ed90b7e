"""The checkpoints to keep: the latest few, the best few by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.checkpoint.format.manifest import Manifest
from shardwright.errors import CheckpointError


@dataclass(frozen=True)
class Retention:
    """Keep the ``latest_k`` newest checkpoints, and beside them the ``top_k`` best by ``metric``.

    ``mode`` says whether ``"min"`` or ``"max"`` is best. The metric is looked up in ``info["metrics"]`` of each
    manifest; a checkpoint without it, or with nan, is none of the best. With neither number all are kept.
    """

    latest_k: int | None = None
    top_k: int | None = None
    metric: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        for name, number in (("latest_k", self.latest_k), ("top_k", self.top_k)):
            if number is not None and number < 1:
                raise CheckpointError(f"{name}={number}: keep at least 1, or give None to keep all")
        if (self.top_k is None) != (self.metric is None):
            raise CheckpointError(
                f"top_k={self.top_k} with metric={self.metric!r}: a metric tells the best, so give both or neither"
            )
        if self.mode not in ("min", "max"):
            raise CheckpointError(f"mode={self.mode!r}: say whether 'min' or 'max' is best")

    @property
    def keeps_all(self) -> bool:
        return self.latest_k is None and self.top_k is None

    def given_up(self, complete: Mapping[str, Manifest], newest: str) -> Sequence[str]:
        """Return which of the complete checkpoints, oldest first, go now that ``newest`` stands."""
        if self.keeps_all:
            return []
        kept = {newest, *list(complete)[-(self.latest_k or 1) :], *self.best(complete)}
        return [name for name in complete if name not in kept]

    def best(self, complete: Mapping[str, Manifest]) -> Sequence[str]:
        """The best by the metric, the best one first; of equals the newer one is better."""
        scores = {
            name: float(manifest.info.get("metrics", {}).get(self.metric, "nan")) for name, manifest in complete.items()
        }
        sign = 1 if self.mode == "min" else -1
        newest_first = [name for name in reversed(list(complete)) if not math.isnan(scores[name])]
        return sorted(newest_first, key=lambda name: sign * scores[name])[: self.top_k or 0]


KEEP_ALL = Retention()
