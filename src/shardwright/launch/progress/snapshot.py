"""A job at one moment, as its folder shows it; over ssh it travels as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.errors import UsageError
from shardwright.launch.joblog.job import RUNNING, JobFolder, JobState
from shardwright.launch.progress.lines import StepLine
from shardwright.launch.progress.ranks import ENDED, STOPPED, FolderRanks, RankSeen, RankState

_SLOW = 1.2  # times what the others take for the same
_LEAST_S = 0.001  # of a difference that counts
_QUIET_S, _QUIET_STEPS = 20.0, 4


@dataclass(frozen=True)
class Snapshot:
    """``plan`` is what the plan lets expect of a step, ``log`` the last lines of ranks; ``now_s`` is by the clock of
    the launcher's host, as all times are.
    """

    name: str
    state: JobState
    now_s: float
    ranks: tuple[RankSeen, ...]
    plan: Mapping[str, Any] | None
    log: tuple[tuple[int, str], ...]

    def to_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Snapshot:
        """Raises `KeyError` or `TypeError` where the message has another form."""
        ranks = tuple(_rank(entry) for entry in message["ranks"])
        log = tuple((int(rank), str(text)) for rank, text in message["log"])
        return cls(**{**message, "state": JobState(**message["state"]), "ranks": ranks, "log": log})

    @property
    def runs(self) -> bool:
        return self.state.status == RUNNING

    @property
    def first(self) -> StepLine | None:
        """What the first rank tells that tells of anything: the loss is the same on all."""
        return next((seen.line for seen in self.ranks if seen.line is not None), None)

    @property
    def doing(self) -> str:
        """What people wait for, in words; empty where the ranks do their steps."""
        return next((seen.doing for seen in self.ranks if seen.doing), "") if self.runs else ""

    def marks(self) -> dict[int, str]:
        """What is odd about ranks, in words: who is stopped, holds the others up, or is quiet for long."""
        found = {seen.rank: mark for seen in self.ranks if (mark := self._mark(seen))}
        return dict(sorted((self._slow() | found).items()))

    def _mark(self, seen: RankSeen) -> str:
        if seen.state.state == STOPPED:
            return f"stopped ({seen.state.detail})"
        if seen.state.state == ENDED:
            return "" if seen.state.detail == "exit code 0" else f"ended ({seen.state.detail})"
        if seen.line is None or not self.runs or self.doing:
            return ""
        quiet_s = self.now_s - seen.changed_s
        return f"quiet {quiet_s:.0f} s" if quiet_s > _QUIET_S + _QUIET_STEPS * (seen.line.step_s or 0.0) else ""

    def _slow(self) -> dict[int, str]:
        """The ranks for which others wait: they take longer for what each does alone."""
        own = {seen.rank: seen.line.own_s for seen in self.ranks if seen.line is not None}
        known = {rank: seconds for rank, seconds in own.items() if seconds is not None}
        found = {}
        for rank, seconds in known.items():
            others = [other for r, other in known.items() if r != rank]
            if others and seconds > _SLOW * median(others) and seconds > median(others) + _LEAST_S:
                found[rank] = f"slow: {seconds / max(median(others), 1e-9):.1f} × others"
        return found


class Watched:
    """The folder of a job, looked at again and again. Raises `UsageError` where it is none, or cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = JobFolder(folder)
        self._ranks = FolderRanks(self._folder)

    def snapshot(self) -> Snapshot:
        state = self._folder.read_state()  # before the ranks: what those of a job that has ended told is all there
        if state is None:
            raise UsageError(f"{self._folder.path} has no job.json that can be read: it is no folder of a job")
        self._ranks.look()
        return Snapshot(self._folder.name, state, time.time(), self._ranks.seen(), self._ranks.plan, self._ranks.log)


def _rank(entry: Mapping[str, Any]) -> RankSeen:
    line = None if entry["line"] is None else StepLine(**entry["line"])
    return RankSeen(**{**entry, "state": RankState(**entry["state"]), "line": line})
