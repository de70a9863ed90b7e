"""The rows of numbers that a run records, and the targets that take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Record:
    """Numbers of one moment: after so many optimizer steps, in an epoch counted from 1."""

    steps: int
    epoch: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Target:
    """The place of the records of a run, and the moment from which they go on.

    Of a run that goes on from a checkpoint, what an earlier process recorded after ``steps`` did not happen.
    """

    folder: Path
    steps: int
    config: Mapping[str, Any]


class Writer(Protocol):
    """Takes records in order; nothing else writes there at the same time."""

    def write(self, record: Record) -> None:
        """Keep a record, readable at once by others."""

    def close(self) -> None:
        """Give back what is held."""
