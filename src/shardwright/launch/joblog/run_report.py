"""``log_output/<job>/run.json``: the hosts of a job, their versions, its ranks, how each ended, and when.

Written when the job has started and again when it has ended, whole each time. Nothing of an environment is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwright import __version__
from shardwright.launch.joblog.job import JobFolder, JobState, replace_file
from shardwright.launch.joblog.judge import Judge


@dataclass(frozen=True)
class EndedAttempt:
    """What is kept of an attempt, from the start of its ranks to the end of all; ``cause`` is None for no failure."""

    started_s: float
    ended_s: float
    hosts: list[str]
    ranks: int
    exit_code: int
    cause: str | None


@dataclass(frozen=True)
class RunReport:
    """``hosts`` is what the carrier says of each, with its ``ranks``; ``past`` are the attempts that have failed."""

    folder: JobFolder
    started: JobState
    hosts: list[dict[str, Any]]
    past: tuple[EndedAttempt, ...] = ()

    def write(
        self,
        state: JobState | None = None,
        judge: Judge | None = None,
        clocks_ahead_s: Mapping[str, float] | None = None,
        attempt: EndedAttempt | None = None,
    ) -> None:
        """Raises `OSError`. ``clocks_ahead_s`` is how far each host's clock was ahead of the launcher's.

        ``attempt`` is the one that has ended. Hosts and ranks are those of the last one.
        """
        state = state or self.started
        clocks = clocks_ahead_s or {}
        replace_file(
            self.folder.path / "run.json",
            {
                "job": self.folder.name,
                "command": state.command,
                "launcher": {
                    "host": state.host,
                    "python": sys.version.split()[0],
                    "shardwright": __version__,
                },
                "status": state.status,
                "exit_code": state.exit_code,
                "started_s": state.started_s,
                "ended_s": state.ended_s,
                "restarts": state.restarts,
                "attempts": [asdict(ended) for ended in (*self.past, *([attempt] if attempt else []))],
                "hosts": [host | {"clock_ahead_s": clocks.get(host["name"], 0.0)} for host in self.hosts],
                "stalls": sorted(path.name for path in self.folder.path.glob("stall-*.txt")),
                "cause": judge.headline(judge.cause) if judge and judge.cause else None,
                "ranks": [] if judge is None else _ranks(judge),
            },
        )


def _ranks(judge: Judge) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "code": end.code,
            "ended_s": end.time_s,
            "how": "returned 0" if end.code == 0 else end.cause(),
            "told_to_end": end.signalled,
        }
        for rank, end in sorted(judge.ends.items())
    ]
