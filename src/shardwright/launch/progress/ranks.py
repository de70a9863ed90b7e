"""The ranks of a job as its folder shows them, from one look to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.launch.host.protocol import STREAMS
from shardwright.launch.joblog.failure import signal_name
from shardwright.launch.joblog.job import JobFolder
from shardwright.launch.joblog.live import RANKS_FILE, STEPS_FILE
from shardwright.launch.progress.lines import GrowingFile, StateLine, StepLine, ToldLine, ToldPlan, objects, together

RUNNING, STOPPED, ENDED = "running", "stopped", "ended"
_RECENT_S = 10.0  # over which numbers are means
_LINES = 64
_MOST_RANKS = 1 << 20
_LOG_LINES, _LOG_BYTES = 40, 300


@dataclass(frozen=True)
class RankState:
    """What the launcher says of a rank: ``detail`` is the signal that stopped it, or its exit code, in words."""

    state: str = ""
    time_s: float = 0.0
    host: str = ""
    pid: int = 0
    detail: str = ""


@dataclass(frozen=True)
class RankSeen:
    """A rank: its state, and its steps of the last seconds as one line, where it has told of any; when that changed."""

    rank: int
    state: RankState
    line: StepLine | None
    changed_s: float
    wire: Mapping[str, float] | None = None  # bytes a second of its host, where this rank measures it
    doing: str = ""  # what people wait for, where it tells of that


class States:
    """The states of the ranks, by what the launcher has written; those of the last attempt."""

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


class Steps:
    """The last steps of one rank, in its last attempt."""

    def __init__(self, folder: JobFolder, rank: int) -> None:
        self._rank, self._file = rank, GrowingFile(folder.rank(rank) / STEPS_FILE)
        self._lines: deque[StepLine] = deque(maxlen=_LINES)
        self._wires: deque[StepLine] = deque(maxlen=2)
        self.plan: ToldPlan | None = None
        self._doing = ""

    def look(self) -> None:
        for value in objects(self._file.new(), ToldLine):
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

    def seen(self, state: RankState) -> RankSeen:
        doing = "" if state.state == ENDED else self._doing
        return RankSeen(self._rank, state, self._line(), self._file.changed_s, self._wire(), doing)

    def _line(self) -> StepLine | None:
        if not self._lines:
            return None
        since_s = self._lines[-1].time_s - _RECENT_S
        return together([line for line in self._lines if line.time_s > since_s] or [self._lines[-1]])

    def _wire(self) -> Mapping[str, float] | None:
        """Bytes a second between the last two readings."""
        if len(self._wires) < 2:
            return None
        before, after = self._wires
        seconds = max(after.time_s - before.time_s, 1e-3)
        assert before.wire is not None
        assert after.wire is not None
        return {name: max(0, count - before.wire.get(name, count)) / seconds for name, count in after.wire.items()}


class Logs:
    """The last lines that ranks have written, whoever wrote them."""

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


class FolderRanks:
    """All ranks of the job in ``folder``, which keeps where it has read to."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._states, self._logs = States(folder.path / RANKS_FILE), Logs(folder)
        self._steps: dict[int, Steps] = {}

    def look(self) -> None:
        self._states.look()
        for rank in self._states.by_rank:
            self._steps.setdefault(rank, Steps(self._folder, rank)).look()
        self._logs.look(len(self._states.by_rank))

    def seen(self) -> tuple[RankSeen, ...]:
        return tuple(self._steps[rank].seen(state) for rank, state in self._states.by_rank.items())

    @property
    def plan(self) -> ToldPlan | None:
        """What the plan lets expect; rank 0 tells of it."""
        return self._steps[0].plan if 0 in self._steps else None

    @property
    def log(self) -> tuple[tuple[int, str], ...]:
        return tuple(self._logs.lines)
