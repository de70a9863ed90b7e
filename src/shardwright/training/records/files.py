"""Records in files that any program reads: CSV and JSON lines."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any, TypedDict

from shardwright.common.schema import SchemaError, from_json
from shardwright.common.whole_file import write_whole
from shardwright.errors import TrainingError
from shardwright.training.records.record import Record, Target


class JsonLines:
    """``records.jsonl``: an object for each record, of ``step``, ``epoch`` and its numbers."""

    def __init__(self, target: Target) -> None:
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

    def __init__(self, target: Target) -> None:
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
        """All rows anew, whole or not at all, and ready for more."""
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
