"""Writes the results of a run beside its checkpoints: the best weights, a table, and a curve."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.common.whole_file import write_whole
from shardwright.distributed.agreement import from_rank_zero
from shardwright.distributed.ranks import ranks_by_collectives
from shardwright.ocr.libraries.extra import library
from shardwright.runtime.evaluation import Evaluation
from shardwright.training.hooks import Callback, RunView

BEST = "best.pth"
TABLE = "result.tsv"
CURVE = "curve.png"


class BestWeights(Callback):
    """Keeps the weights with which the ``indicator`` of a validation was highest, averaged where the run averages."""

    on_every_rank = True

    def __init__(self, folder: Path, indicator: str) -> None:
        self.file, self.indicator = folder / BEST, indicator
        self.best = -math.inf

    def alike(self) -> dict[str, Any]:
        return {"folder": str(self.file.parent), "indicator": self.indicator}

    def on_validation_end(self, run: RunView, evaluation: Evaluation) -> None:
        if evaluation.metrics[self.indicator] <= self.best:
            return
        self.best = evaluation.metrics[self.indicator]
        with ExitStack() as stack:
            for callback in run.callbacks:
                stack.enter_context(callback.evaluating(run))
            state = {name: tensor.cpu() for name, tensor in run.parallel.full_state_dict().items()}
        ranks = ranks_by_collectives("writing the best weights")
        from_rank_zero(ranks, lambda: write_whole(self.file, lambda path: torch.save(state, path)))

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best} if math.isfinite(self.best) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class ResultTable(Callback):
    """After every epoch rank 0 writes a row of ``result.tsv`` and draws ``curve.png``: loss, metrics, rate, seconds."""

    on_every_rank = True

    def __init__(self, folder: Path, indicator: str) -> None:
        self.folder, self.indicator = folder, indicator
        self.rows: list[dict[str, float]] = []
        self._total: torch.Tensor | float = 0.0
        self._steps = 0
        self._began_s = self._spent_s = 0.0

    def alike(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "indicator": self.indicator}

    def on_epoch_begin(self, run: RunView) -> None:
        if not run.step:  # else the run goes on in the middle of the epoch, whose beginning `load_state_dict` gave
            self._total, self._steps, self._spent_s = 0.0, 0, 0.0
        self._began_s = time.monotonic() - self._spent_s

    def on_step_end(self, run: RunView) -> None:
        self._total, self._steps = self._total + run.loss.double(), self._steps + 1

    def on_epoch_end(self, run: RunView) -> None:
        loss = float(self._total) / self._steps if self._steps else math.nan
        row = {"epoch": float(run.epoch), "steps": float(run.steps), "loss": loss}
        row |= {"lr": float(run.optimizer.param_groups[0]["lr"]), "seconds": time.monotonic() - self._began_s}
        if run.evaluation is not None and run.evaluated == run.epoch:
            row |= run.evaluation.metrics
        self.rows.append(row)
        if run.world.rank == 0:
            write_whole(self.folder / TABLE, lambda path: path.write_text(self._table()))

    def on_fit_end(self, run: RunView) -> None:
        ranks = ranks_by_collectives("drawing the curve")
        from_rank_zero(ranks, lambda: draw_curve(self.folder / CURVE, self.rows, self.indicator))

    def state_dict(self) -> dict[str, Any]:
        epoch = {"loss": float(self._total), "steps": self._steps, "seconds": time.monotonic() - self._began_s}
        return {"rows": self.rows, "epoch": epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = list(state["rows"])
        epoch = state.get("epoch", {})
        self._total, self._steps = epoch.get("loss", 0.0), epoch.get("steps", 0)
        self._spent_s = epoch.get("seconds", 0.0)

    def _table(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        lines = [names, *([f"{row[name]:.6g}" if name in row else "" for name in names] for row in self.rows)]
        return "".join("\t".join(line) + "\n" for line in lines)


_SIZE, _MARGIN = (960, 540), 60
_COLOURS = {"loss": (60, 60, 200), "indicator": (60, 140, 40)}  # blue, green, red


def draw_curve(path: Path, rows: list[dict[str, float]], indicator: str) -> None:
    """Draw the loss, between 0 and its largest value, and the indicator, between 0 and 1, over the epochs."""
    cv2 = library("cv2")
    width, height = _SIZE
    image = np.full((height, width, 3), 255, np.uint8)
    corner = (_MARGIN, _MARGIN), (width - _MARGIN, height - _MARGIN)
    cv2.rectangle(image, *corner, (0, 0, 0), 1)
    last = max([row["epoch"] for row in rows], default=1.0)
    largest = max([row["loss"] for row in rows if math.isfinite(row["loss"])], default=1.0) or 1.0
    for at, (name, key, scale) in enumerate((("loss", "loss", largest), ("indicator", indicator, 1.0))):
        points = [
            (
                _MARGIN + (width - 2 * _MARGIN) * row["epoch"] / last,
                height - _MARGIN - (height - 2 * _MARGIN) * row[key] / scale,
            )
            for row in rows
            if math.isfinite(row.get(key, math.nan))
        ]
        colour = _COLOURS[name]
        if points:
            line = np.rint(points).astype(np.int32).reshape(-1, 1, 2)
            cv2.polylines(image, [line], False, colour, 2, cv2.LINE_AA)
            for x, y in line[:, 0].tolist():
                cv2.circle(image, (x, y), 3, colour, -1, cv2.LINE_AA)
        values = [row[key] for row in rows if key in row]
        said = f"{key}: {values[-1]:.4f}, axis 0 to {scale:.4g}" if values else f"{key}: none"
        _write(image, said, (_MARGIN + 420 * at, _MARGIN - 20), colour)
    _write(image, f"epoch {last:g}", (width - _MARGIN - 90, height - _MARGIN + 30), (0, 0, 0))
    if not cv2.imwrite(str(path), image):
        raise OSError(f"{path} cannot be written")


def _write(image: Any, text: str, at: tuple[int, int], colour: tuple[int, int, int]) -> None:
    cv2 = library("cv2")
    cv2.putText(image, text, at, cv2.FONT_HERSHEY_SIMPLEX, 0.6, colour, 1, cv2.LINE_AA)
