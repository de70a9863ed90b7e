"""The page of a run: one file for a browser, which needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from shardwright.common.schema import SchemaError, from_json
from shardwright.compiler.report.pages.page import page_of, save_page
from shardwright.errors import UsageError
from shardwright.launch.joblog.job import JobFolder
from shardwright.launch.joblog.judge import signal_name
from shardwright.launch.joblog.logs import RANKS_FILE, STEPS_FILE
from shardwright.launch.progress.lines import (
    GrowingFile,
    ReportLine,
    StateLine,
    StepLine,
    ValidationReport,
    objects,
    together,
)
from shardwright.launch.progress.ranks import Snapshot

_POINTS = 500  # of a curve: more are not seen


@dataclass(frozen=True)
class RankHistory:
    """All that a rank told: its steps in order, fewer lines where they were many, and validations."""

    rank: int
    lines: Sequence[StepLine]
    validations: Sequence[tuple[int, Mapping[str, float]]]
    damage: str = ""

    def curve(self) -> list[dict[str, Any]]:
        """The points of the curves."""
        return [_point(line) for line in _thinned(self.lines)]

    def wire_bytes(self) -> dict[str, int] | None:
        """The bytes that its host moved between the first reading and the last, where this rank measured it."""
        read = [line.wire for line in self.lines if line.wire is not None]
        return {name: max(0, read[-1][name] - read[0].get(name, 0)) for name in read[-1]} if len(read) > 1 else None


class _Failure(TypedDict):
    """The part of ``failed.json`` that the page shows."""

    time_s: float
    cause: str


def history(folder: JobFolder, rank: int) -> RankHistory:
    """Read all that a rank told. Of an attempt that was restarted from a checkpoint, what was done again counts."""
    path, damaged = folder.rank(rank) / STEPS_FILE, list[str]()
    values = list(objects(GrowingFile(path, all=True).new(), ReportLine, damaged.append))
    lines = [line for value in values if (line := StepLine.of(value)) is not None]
    kept: list[StepLine] = []
    for line in lines:  # a run that goes on from a checkpoint counts on from there
        while kept and kept[-1].step >= line.step:
            kept.pop()
        kept.append(line)
    validations = {
        value["step"]: _numbers(validation)
        for value in values
        if (validation := value.get("validation")) is not None and "step" in value
    }
    return RankHistory(rank, kept, sorted(validations.items()), _damage(path, damaged))


def _damage(path: Path, why: Sequence[str]) -> str:
    """Return what a person is told of lines that cannot be read; nothing where there are none."""
    if not why:
        return ""
    lines = "line of it is" if len(why) == 1 else "lines of it are"
    return f"{path}: {len(why)} {lines} damaged and left out; the first: {why[0]}"


def _thinned(lines: Sequence[StepLine]) -> list[StepLine]:
    each = max(1, math.ceil(len(lines) / _POINTS))
    return [together(lines[at : at + each]) for at in range(0, len(lines), each)]


def document_of(folder: JobFolder, whole: Snapshot, histories: Sequence[RankHistory]) -> dict[str, Any]:
    """Return the JSON of the page; ``whole`` has the means over the run."""
    marks = whole.marks()
    told = {history.rank: history for history in histories}
    return {
        "job": whole.name,
        "command": list(whole.state.command),
        "end": whole.state.end if not whole.runs else whole.state.status,
        "started_s": whole.state.started_s,
        "seconds": (whole.state.ended_s or whole.now_s) - whole.state.started_s,
        "restarts": whole.state.restarts,
        "plan": dict(whole.plan) if whole.plan else None,
        "ranks": [
            {
                "rank": seen.rank,
                "host": seen.state.host,
                "end": seen.state.detail or seen.state.state,
                "mark": marks.get(seen.rank, ""),
                "mean": None if seen.line is None else _point(seen.line) | {"steps": seen.line.steps},
                "curve": told[seen.rank].curve() if seen.rank in told else [],
                "wire": told[seen.rank].wire_bytes() if seen.rank in told else None,
            }
            for seen in whole.ranks
        ],
        "validations": [[step, dict(values)] for step, values in told[0].validations] if 0 in told else [],
        "events": _events(folder),
    }


def _point(line: StepLine) -> dict[str, Any]:
    rate = line.samples / line.seconds if line.samples and line.seconds else None
    numbers = {
        "at": line.time_s, "step": line.step, "loss": line.loss, "seconds": line.step_s, "computing": line.computing_s,
        "communicating": line.waiting_s, "loading": line.loading_s, "rate": rate, "held": line.held_bytes,
    }  # fmt: skip
    return {name: _finite(number) for name, number in numbers.items() if number is not None}


def _finite(number: float) -> float | None:
    """A number as JSON has it, with as many digits as anybody sees."""
    return None if not math.isfinite(number) else number if isinstance(number, int) else float(f"{number:.7g}")


def _numbers(evaluation: ValidationReport) -> dict[str, float]:
    """The finite numbers of a validation."""
    values = {"loss": evaluation.get("loss"), **(evaluation.get("metrics") or {})}
    return {name: float(value) for name, value in values.items() if isinstance(value, float) and math.isfinite(value)}


def _events(folder: JobFolder) -> list[dict[str, Any]]:
    """Return when ranks were stopped and went on, and when attempts began."""
    found: list[dict[str, Any]] = []
    stopped: set[object] = set()
    for value in objects(GrowingFile(folder.path / RANKS_FILE, all=True).new(), StateLine):
        at, code = value.get("time_s"), value.get("code")
        if value.get("attempt"):
            found.append({"at": at, "text": f"restart {value['attempt']}, {value.get('ranks', '?')} ranks"})
            stopped.clear()
        rank, state = value.get("rank"), value.get("state")
        if state == "stopped":
            stopped.add(rank)
            found.append({"at": at, "text": f"rank {rank} stopped ({value.get('signal', '')})"})
        elif state == "running" and rank in stopped:
            stopped.discard(rank)
            found.append({"at": at, "text": f"rank {rank} went on"})
        elif state == "ended" and code:
            how = f"with code {code}" if code > 0 else f"by {signal_name(-code)}"
            found.append({"at": at, "text": f"rank {rank} ended {how}"})
    return [*found, *_cause(folder)]


def _cause(folder: JobFolder) -> list[dict[str, Any]]:
    try:
        failure = from_json(folder.failed_mark.read_bytes(), _Failure)
    except (OSError, SchemaError):
        return []
    return [{"at": failure["time_s"], "text": failure["cause"]}]


def whole_run(now: Snapshot, histories: Sequence[RankHistory]) -> Snapshot:
    """The snapshot with the means over the whole run in place of those of its last seconds."""
    lines = {history.rank: together(history.lines) for history in histories if history.lines}
    return replace(now, ranks=tuple(replace(seen, line=lines.get(seen.rank)) for seen in now.ranks))


def save_html(document: dict[str, Any], path: Path) -> None:
    """Write the page of what `document_of` gave, whole or not at all.

    Raises:
        UsageError: where it cannot be written.
    """
    text = page_of("shardwright.compiler.report.runs", str(document["job"]), document)
    save_page(text, path, UsageError)
