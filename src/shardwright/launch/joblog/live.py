"""What becomes of the ranks of a job while it runs, in files that only grow: for those who watch it, and for reports.

``log_output/<job>/ranks.jsonl`` says when each rank began, was stopped, went on and ended; ``rank.<N>/steps.jsonl``
has what the rank has told of its steps (`common.step_lines`). A restart goes on in the same files. `launch.progress`
reads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.launch.joblog.job import JobFolder
from shardwright.launch.joblog.logs import LogFile

RANKS_FILE, STEPS_FILE = "ranks.jsonl", "steps.jsonl"


class LiveFiles:
    """The files of one attempt, the ``attempt``-th, counted from 0. A disk that is full stops nobody."""

    def __init__(self, folder: JobFolder, attempt: int, ranks: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._first = {"attempt": attempt, "ranks": ranks}
        self._begun: set[Path] = set()
        self._write(folder.path / RANKS_FILE, self._first, b"")

    def told(self, rank: int, data: bytes) -> None:
        """A rank has told of its steps."""
        self._write(self._folder.rank(rank) / STEPS_FILE, {"attempt": self._attempt}, data)

    def became(self, rank: int, state: str, **facts: Any) -> None:
        """A rank is from now on ``state``: "running", "stopped" or "ended"."""
        self._write(self._folder.path / RANKS_FILE, self._first, _line({"rank": rank, "state": state, **facts}))

    def _write(self, path: Path, first: Mapping[str, Any], data: bytes) -> None:
        """Append to a file that begins with ``first``; where it cannot be written the job goes on unwatched.

        It is open for no longer: of many ranks' files not all may be open at once.
        """
        with contextlib.suppress(OSError):
            if path not in self._begun:
                LogFile(os.fspath(path), _line(first)).close()
                self._begun.add(path)
            with path.open("ab") as file:
                file.write(data)


def _line(facts: Mapping[str, Any]) -> bytes:
    return json.dumps({"time_s": round(time.time(), 3), **facts}).encode() + b"\n"
