"""Snapshots of a running job, read from its folder; sent over ssh as JSON."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.errors import UsageError
from shardwright.launch.host.protocol import STREAMS
from shardwright.launch.joblog.job import RUNNING, JobFolder, JobState
from shardwright.launch.joblog.judge import signal_name
from shardwright.launch.joblog.logs import RANKS_FILE, STEPS_FILE
from shardwright.launch.progress.lines import (
    GrowingFile,
    PlanReport,
    ReportLine,
    StateLine,
    StepLine,
    objects,
    together,
)

STOPPED, ENDED = "stopped", "ended"
_RECENT_S = 10.0  # over which numbers are means
_LINES = 64
_MOST_RANKS = 1 << 20
_LOG_LINES, _LOG_BYTES = 40, 300


@dataclass(frozen=True)
class RankState:
    """The state of a rank as the launcher wrote it: ``detail`` is its signal, or its exit code, in words."""

    state: str = ""
    time_s: float = 0.0
    host: str = ""
    pid: int = 0
    detail: str = ""


@dataclass(frozen=True)
class RankSnapshot:
    """A rank: its state, its steps of the last seconds as one line, if any, and when they were written."""

    rank: int
    state: RankState
    line: StepLine | None
    changed_s: float
    wire: Mapping[str, float] | None = None  # bytes a second of its host, where this rank measures it
    doing: str = ""  # what people wait for, where it tells of that


class RankStates:
    """The states of the ranks in the last attempt, as the launcher has written them."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path, all=True)
        self.by_rank: dict[int, RankState] = {}

    def look(self) -> None:
        for line in objects(self._file.new(), StateLine):
            if "attempt" in line and 0 <= line.get("ranks", -1) < _MOST_RANKS:
                self.by_rank = {rank: RankState() for rank in range(line["ranks"])}
            elif (before := self.by_rank.get(line.get("rank", -1))) is not None:
                self.by_rank[line["rank"]] = _after(before, line)


def _after(before: RankState, line: StateLine) -> RankState:
    code = line.get("code")
    detail = line.get("signal", "") if code is None else f"exit code {code}" if code >= 0 else signal_name(-code)
    host, pid = line.get("host", before.host), line.get("pid", before.pid)
    return RankState(line.get("state", ""), line.get("time_s", 0.0), host, pid, detail)


class RankSteps:
    """The last steps of one rank, in its last attempt."""

    def __init__(self, folder: JobFolder, rank: int) -> None:
        self._rank, self._file = rank, GrowingFile(folder.rank(rank) / STEPS_FILE)
        self._lines: deque[StepLine] = deque(maxlen=_LINES)
        self._wires: deque[StepLine] = deque(maxlen=2)
        self.plan: PlanReport | None = None
        self._doing = ""

    def look(self) -> None:
        for value in objects(self._file.new(), ReportLine):
            if "attempt" in value:
                self._lines.clear()
                self._wires.clear()
                self._doing = ""
            self.plan = value.get("plan") or self.plan
            self._doing = value.get("doing", self._doing)
            if (line := StepLine.of(value)) is not None:
                self._lines.append(line)
                if line.wire is not None:
                    self._wires.append(line)

    def seen(self, state: RankState) -> RankSnapshot:
        doing = "" if state.state == ENDED else self._doing
        return RankSnapshot(self._rank, state, self._line(), self._file.changed_s, self._wire(), doing)

    def _line(self) -> StepLine | None:
        if not self._lines:
            return None
        since_s = self._lines[-1].time_s - _RECENT_S
        return together([line for line in self._lines if line.time_s > since_s] or [self._lines[-1]])

    def _wire(self) -> Mapping[str, float] | None:
        if len(self._wires) < 2:
            return None
        before, after = self._wires
        seconds = max(after.time_s - before.time_s, 1e-3)
        assert before.wire is not None
        assert after.wire is not None
        return {name: max(0, count - before.wire.get(name, count)) / seconds for name, count in after.wire.items()}


class LogTails:
    """The last lines that ranks have written."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._files: dict[tuple[int, str], GrowingFile] = {}
        self.lines: deque[tuple[int, str]] = deque(maxlen=_LOG_LINES)

    def look(self, ranks: int) -> None:
        for rank in reversed(range(ranks)):
            for stream in STREAMS:
                file = self._files.setdefault((rank, stream), GrowingFile(self._folder.rank(rank) / stream))
                for line in file.new()[-_LOG_LINES:]:
                    text = line[-_LOG_BYTES:].decode(errors="replace").rpartition("\r")[2].strip()
                    if text:
                        self.lines.append((rank, text))


_SLOW = 1.2  # times what the others take for the same
_LEAST_S = 0.001  # of a difference that counts
_QUIET_S, _QUIET_STEPS = 20.0, 4


@dataclass(frozen=True)
class Snapshot:
    """A job at a moment.

    ``plan`` is what the plan expects of a step, ``log`` the last lines of ranks; all times are by the clock of the
    launcher's host.
    """

    name: str
    state: JobState
    now_s: float
    ranks: tuple[RankSnapshot, ...]
    plan: Mapping[str, Any] | None
    log: tuple[tuple[int, str], ...]

    @property
    def runs(self) -> bool:
        return self.state.status == RUNNING

    @property
    def first(self) -> StepLine | None:
        """The line of the first rank that has reported any: the loss is the same on all."""
        return next((seen.line for seen in self.ranks if seen.line is not None), None)

    @property
    def doing(self) -> str:
        """The task that ranks are busy with, in words; empty where they do their steps."""
        return next((seen.doing for seen in self.ranks if seen.doing), "") if self.runs else ""

    def marks(self) -> dict[int, str]:
        """Return what is odd about ranks, in words: who is stopped, holds the others up, or is quiet for long."""
        found = {seen.rank: mark for seen in self.ranks if (mark := self._mark(seen))}
        return dict(sorted((self._slow() | found).items()))

    def _mark(self, seen: RankSnapshot) -> str:
        if seen.state.state == STOPPED:
            return f"stopped ({seen.state.detail})"
        if seen.state.state == ENDED:
            return "" if seen.state.detail == "exit code 0" else f"ended ({seen.state.detail})"
        if seen.line is None or not self.runs or self.doing:
            return ""
        quiet_s = self.now_s - seen.changed_s
        return f"quiet {quiet_s:.0f} s" if quiet_s > _QUIET_S + _QUIET_STEPS * (seen.line.step_s or 0.0) else ""

    def _slow(self) -> dict[int, str]:
        """Return the ranks for which others wait: they take longer for what each does alone."""
        own = {seen.rank: seen.line.own_s for seen in self.ranks if seen.line is not None}
        known = {rank: seconds for rank, seconds in own.items() if seconds is not None}
        found = {}
        for rank, seconds in known.items():
            others = [other for r, other in known.items() if r != rank]
            if others and seconds > _SLOW * median(others) and seconds > median(others) + _LEAST_S:
                found[rank] = f"slow: {seconds / max(median(others), 1e-9):.1f} × others"
        return found


class WatchedJob:
    """The folder of a job, read again and again. Raises `UsageError` where it is none, or cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = JobFolder(folder)
        self._states, self._logs = RankStates(folder / RANKS_FILE), LogTails(self._folder)
        self._steps: dict[int, RankSteps] = {}

    def snapshot(self) -> Snapshot:
        state = self._folder.read_state()  # before the ranks: what those of a job that has ended told is all there
        if state is None:
            raise UsageError(f"{self._folder.path} has no job.json that can be read: it is no folder of a job")
        self._states.look()
        by_rank = self._states.by_rank
        for rank in by_rank:
            self._steps.setdefault(rank, RankSteps(self._folder, rank)).look()
        self._logs.look(len(by_rank))
        ranks = tuple(self._steps[rank].seen(at) for rank, at in by_rank.items())
        plan = self._steps[0].plan if 0 in self._steps else None  # rank 0 reports it
        return Snapshot(self._folder.name, state, time.time(), ranks, plan, tuple(self._logs.lines))
