"""The table of what a run can be recorded into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from shardwright.training.records.files import Csv, JsonLines
from shardwright.training.records.record import Target, Writer
from shardwright.training.records.trackers import MLflow, TensorBoard, WeightsAndBiases


@dataclass(frozen=True)
class RecordRow:
    """One kind of record: what makes its writer, and the package that it needs, where one."""

    make: Callable[[Target], Writer]
    package: str | None = None


RECORDS: dict[str, RecordRow] = {
    "csv": RecordRow(Csv),
    "jsonl": RecordRow(JsonLines),
    "tensorboard": RecordRow(TensorBoard, "tensorboard"),
    "wandb": RecordRow(WeightsAndBiases, "wandb"),
    "mlflow": RecordRow(MLflow, "mlflow"),
}


def record_problems(to: Sequence[str]) -> list[str]:
    """Return what keeps runs from being recorded so, in one line each."""
    problems = [f"{name!r} is unknown; choose of {', '.join(RECORDS)}" for name in to if name not in RECORDS]
    packages = [RECORDS[name].package for name in to if name in RECORDS]
    missing = [package for package in packages if package is not None and find_spec(package) is None]
    return [*problems, *(f"{package} is not installed; type `pip install {package}`" for package in missing)]
