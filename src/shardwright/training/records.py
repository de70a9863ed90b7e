"""The numbers of a run in files and trackers, step by step: losses, rates and validations."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypedDict

from shardwright.common.schema import SchemaError, from_json
from shardwright.common.whole_file import write_whole
from shardwright.errors import TrainingError


@dataclass(frozen=True)
class Record:
    """Numbers of one moment: after so many optimizer steps, in an epoch counted from 1."""

    steps: int
    epoch: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class RecordTarget:
    """The place of the records of a run, and the moment from which they go on.

    Of a run that goes on from a checkpoint, what an earlier process recorded after ``steps`` did not happen.
    """

    folder: Path
    steps: int
    config: Mapping[str, Any]


class RecordWriter(Protocol):
    """Takes records in order; nothing else writes there at the same time."""

    def write(self, record: Record) -> None:
        """Keep a record, readable at once by others."""

    def close(self) -> None:
        """Give back what is held."""


class JsonLines:
    """``records.jsonl``: an object for each record, of ``step``, ``epoch`` and its numbers."""

    def __init__(self, target: RecordTarget) -> None:
        path = target.folder / "records.jsonl"
        kept = [line for number, line in enumerate(_lines(path), 1) if _step_of(line, path, number) <= target.steps]
        write_whole(path, lambda draft: draft.write_text("".join(f"{line}\n" for line in kept)))
        self._file = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(_flat(record)) + "\n")

    def close(self) -> None:
        self._file.close()


class Csv:
    """``records.csv``: a row for each record. A number that is new becomes a column, empty in the rows above."""

    def __init__(self, target: RecordTarget) -> None:
        self._path = target.folder / "records.csv"
        rows = enumerate(csv.DictReader(_lines(self._path)), 2)
        self._rows: list[dict[str, Any]] = [
            row for number, row in rows if _step_of_row(row, self._path, number) <= target.steps
        ]
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row)) or ["step", "epoch"]
        self._begin()

    def write(self, record: Record) -> None:
        row = _flat(record)
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._file.close()
            self._begin()
        else:
            csv.DictWriter(self._file, self._columns).writerow(row)

    def close(self) -> None:
        self._file.close()

    def _begin(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(self._rows)
        write_whole(self._path, lambda draft: draft.write_text(text.getvalue(), newline=""))
        self._file = self._path.open("a", buffering=1, newline="")


def _flat(record: Record) -> dict[str, Any]:
    return {"step": record.steps, "epoch": record.epoch, **record.values}


def _lines(path: Path) -> list[str]:
    """Read what an earlier process of the run wrote; a last line that it did not finish is left out."""
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


class _Line(TypedDict):
    """The keys of a line beside its numbers."""

    step: int


def _step_of(line: str, path: Path, number: int) -> int:
    try:
        return from_json(line, _Line)["step"]
    except SchemaError as error:
        raise _damaged(path, number, str(error)) from None


def _step_of_row(row: dict[str, Any], path: Path, number: int) -> int:
    if re.fullmatch(r"[0-9]{1,18}", step := str(row.get("step"))) is None:
        raise _damaged(path, number, f"step is {step!r}, expected a whole number")
    return int(step)


def _damaged(path: Path, number: int, why: str) -> TrainingError:
    return TrainingError(
        f"{path} is damaged in line {number}: {why}; mend or remove the file, which the run goes on writing"
    )


class TensorBoard:
    """Event files that ``tensorboard --logdir`` shows; what an earlier process recorded too much is not shown."""

    def __init__(self, target: RecordTarget) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(target.folder / "tensorboard", purge_step=target.steps + 1)

    def write(self, record: Record) -> None:
        for name, value in {**record.values, "epoch": record.epoch}.items():
            self._writer.add_scalar(name, value, record.steps)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B; its own variables (``WANDB_PROJECT``, ``WANDB_MODE``, ``WANDB_RUN_ID``) say where and which."""

    def __init__(self, target: RecordTarget) -> None:
        wandb: Any = import_module("wandb")
        self._run = wandb.init(dir=target.folder, config=dict(target.config), resume="allow")

    def write(self, record: Record) -> None:
        self._run.log({**record.values, "epoch": record.epoch}, step=record.steps)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow; its own variables (``MLFLOW_TRACKING_URI``, ``MLFLOW_RUN_ID``) say where and which."""

    def __init__(self, target: RecordTarget) -> None:
        self._mlflow: Any = import_module("mlflow")
        self._run = self._mlflow.start_run()
        self._mlflow.log_params(dict(target.config))

    def write(self, record: Record) -> None:
        values = {**record.values, "epoch": float(record.epoch)}
        self._mlflow.log_metrics(values, step=record.steps, run_id=self._run.info.run_id)

    def close(self) -> None:
        self._mlflow.end_run()


@dataclass(frozen=True)
class RecordRow:
    """One kind of record: what makes its writer, and the package that it needs, where one."""

    make: Callable[[RecordTarget], RecordWriter]
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
