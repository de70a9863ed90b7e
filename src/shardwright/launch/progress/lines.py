"""Parses the step reports of ranks, and summarises those of several ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from shardwright.common.schema import SchemaError, checked, from_json

T = TypeVar("T")

_HEAD_BYTES, _TAIL_BYTES = 1 << 16, 1 << 16  # what is read of a long file that nobody has looked at for long
_PIECE_BYTES = 1 << 16  # what is read at once, and how long a line may be before it is cut


class PlanReport(TypedDict, total=False):
    """The step that a plan expects."""

    mode: str
    mesh: str
    seconds: float | None
    computing_s: float | None
    communicating_s: float | None
    sent_bytes: float | None
    held_bytes: float | None


class ValidationReport(TypedDict, total=False):
    """The result of a validation."""

    loss: float | None
    metrics: dict[str, Any] | None


class ReportLine(TypedDict, total=False):
    """A line of a rank: of an attempt, a plan, a validation, a task that takes long, or steps (`StepLine`)."""

    time_s: float
    attempt: int
    plan: PlanReport | None
    validation: ValidationReport | None
    doing: str
    step: int
    steps: int
    seconds: float
    data_s: float
    samples: int
    communicating_s: float | None
    loss: float | None
    held_bytes: int | None
    wire: dict[str, int] | None


class StateLine(TypedDict, total=False):
    """A line of the launcher: the beginning of an attempt, or the new state of a rank."""

    time_s: float
    attempt: int
    ranks: int
    rank: int
    state: str
    code: int | None
    signal: str
    host: str
    pid: int


@dataclass(frozen=True)
class StepLine:
    """Some steps of one rank: the last of them is ``step``; ``seconds`` are those of ``steps`` steps.

    ``communicating_s`` and ``data_s`` are parts of them. None where a rank does not know.
    """

    time_s: float
    step: int
    steps: int
    seconds: float
    data_s: float
    samples: int
    communicating_s: float | None = None
    loss: float | None = None
    held_bytes: int | None = None
    wire: Mapping[str, int] | None = None

    @classmethod
    def of(cls, line: ReportLine) -> StepLine | None:
        """Return None for a line that is about something else, or of another version."""
        known = {name: value for name, value in line.items() if name in cls.__dataclass_fields__}
        with contextlib.suppress(SchemaError):
            return checked(known, cls)
        return None

    @property
    def step_s(self) -> float | None:
        """The seconds of one step."""
        return self.seconds / self.steps if self.steps else None

    @property
    def own_s(self) -> float | None:
        """The seconds of one step in which the rank does not wait for others: it computes, or loads data."""
        if self.step_s is None or self.communicating_s is None:
            return None
        return max(0.0, self.step_s - self.communicating_s / self.steps)

    @property
    def loading_s(self) -> float | None:
        """The seconds of one step in which the rank loads data."""
        return self.data_s / self.steps if self.steps else None

    @property
    def waiting_s(self) -> float | None:
        """The seconds of one step in which the rank communicates, or waits for that."""
        return None if self.communicating_s is None or not self.steps else self.communicating_s / self.steps

    @property
    def computing_s(self) -> float | None:
        """The seconds of one step that are neither."""
        if self.step_s is None or self.loading_s is None:
            return None
        return max(0.0, self.step_s - self.loading_s - (self.waiting_s or 0.0))


def together(lines: Sequence[StepLine]) -> StepLine:
    """Return one line for several, in order, at least one."""
    last, known = lines[-1], [line.communicating_s for line in lines if line.communicating_s is not None]
    return StepLine(
        last.time_s,
        last.step,
        sum(line.steps for line in lines),
        sum(line.seconds for line in lines),
        sum(line.data_s for line in lines),
        sum(line.samples for line in lines),
        sum(known) if len(known) == len(lines) else None,
        next((line.loss for line in reversed(lines) if line.loss is not None), None),
        max((line.held_bytes for line in lines if line.held_bytes is not None), default=None),
    )


class GrowingFile:
    """A file of lines that somebody else goes on writing; ``all`` reads also between its beginning and its end."""

    def __init__(self, path: Path, all: bool = False) -> None:
        self.path = path
        self._all = all
        self._at: int | None = None
        self.changed_s = 0.0  # since the epoch
        self._rest = b""

    def new(self) -> list[bytes]:
        """Return the whole lines that have come since the last time; none where the file cannot be read."""
        found: list[bytes] = []
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                size, self.changed_s = status.st_size, status.st_mtime
                is_new = self._at is None or size < self._at  # another file of that name
                if self._at is None or is_new:
                    self._at, self._rest = 0, b""
                if not self._all and size - self._at > _HEAD_BYTES + _TAIL_BYTES:
                    found += file.read(_HEAD_BYTES).split(b"\n")[:-1] if is_new else []
                    self._at, self._rest = size - _TAIL_BYTES, b""
                file.seek(self._at)
                while data := file.read(min(_PIECE_BYTES, size - self._at)):
                    self._at += len(data)
                    found += self._lines(data)
        except OSError:
            pass  # what was read of it is no less true
        return found

    def _lines(self, data: bytes) -> list[bytes]:
        """Return the lines that end in ``data``; one without an end is cut, so that memory is bounded."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= _PIECE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        return lines


def objects(lines: Sequence[bytes], kind: type[T], damaged: Callable[[str], object] = lambda why: None) -> Iterator[T]:
    """Yield the values of lines of JSON; ``damaged`` is called with the reason for each line that is left out."""
    for line in lines:
        try:
            value = from_json(line, kind)
        except SchemaError as error:
            damaged(str(error))
        else:
            yield value


def current_task(lines: bytes) -> str | None:
    """Return the task that a rank is busy with, the last in these lines; None where they are about something else."""
    if b'"doing"' not in lines:
        return None
    said = [value["doing"] for value in objects(lines.splitlines(), ReportLine) if "doing" in value]
    return said[-1] if said else None
