"""What becomes of the ranks of a job while it runs, in files that only grow: for those who watch it, and for reports.

``log_output/<job>/ranks.jsonl`` says when each rank began, was stopped, went on and ended; ``rank.<N>/steps.jsonl``
has what the rank has told of its steps (`shardwright.steps`). A restart goes on in the same files. `launch.told` reads
them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.launch.kept.job import JobFolder
from shardwright.launch.kept.logs import LogFile

RANKS_FILE, STEPS_FILE = "ranks.jsonl", "steps.jsonl"


class LiveFiles:
    """The files of one attempt, the ``attempt``-th, counted from 0. A disk that is full stops nobody."""

    def __init__(self, folder: JobFolder, attempt: int, ranks: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._steps: dict[int, LogFile | None] = {}
        self._ranks = self._opened(folder.path / RANKS_FILE, {"attempt": attempt, "ranks": ranks})

    def told(self, rank: int, data: bytes) -> None:
        """A rank has told of its steps."""
        if rank not in self._steps:
            self._steps[rank] = self._opened(self._folder.rank(rank) / STEPS_FILE, {"attempt": self._attempt})
        _write(self._steps[rank], data)

    def became(self, rank: int, state: str, **facts: Any) -> None:
        """A rank is from now on ``state``: "running", "stopped" or "ended"."""
        _write(self._ranks, _line({"rank": rank, "state": state, **facts}))

    def close(self) -> None:
        for file in (self._ranks, *self._steps.values()):
            if file is not None:
                file.close()

    @staticmethod
    def _opened(path: Path, first: Mapping[str, Any]) -> LogFile | None:
        """None where it cannot be written: the job goes on unwatched."""
        try:
            return LogFile(os.fspath(path), _line(first))
        except OSError:
            return None


def _write(file: LogFile | None, data: bytes) -> None:
    if file is not None:
        file.write(data)


def _line(facts: Mapping[str, Any]) -> bytes:
    return json.dumps({"time_s": round(time.time(), 3), **facts}).encode() + b"\n"
