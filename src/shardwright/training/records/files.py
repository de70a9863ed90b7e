"""Records in files that any program reads: CSV and JSON lines."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from shardwright.training.records.record import Record, Target
from shardwright.whole_file import write_whole


class JsonLines:
    """``records.jsonl``: an object for each record, of ``step``, ``epoch`` and its numbers."""

    def __init__(self, target: Target) -> None:
        path = target.folder / "records.jsonl"
        kept = [line for line in _lines(path) if _step_of(line) <= target.steps]
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
        rows = list(csv.DictReader(_lines(self._path)))
        self._rows: list[dict[str, Any]] = [row for row in rows if int(row["step"]) <= target.steps]
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
    """What an earlier process of the run wrote; a last line that it did not finish is left out."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _step_of(line: str) -> int:
    return int(json.loads(line)["step"])
