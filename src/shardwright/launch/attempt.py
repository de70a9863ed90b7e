"""One attempt at a job: what it owns, how it ended, and ``run.json``, which reports it.

``run.json`` has the hosts of a job, their versions, its ranks, how each ended, and when. It is written when the job has
started and again when it has ended, whole each time. Nothing of an environment is in it.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardwright import __version__
from shardwright.launch.console import Console
from shardwright.launch.joblog.job import FAILED, JobFolder, JobState, replace_file
from shardwright.launch.joblog.jobs import moment
from shardwright.launch.joblog.judge import Judge, Outcome
from shardwright.launch.options.launch_options import LaunchOptions


@dataclass(frozen=True)
class EndedAttempt:
    """An attempt that has ended, from the start of its ranks to the end of all; ``cause`` is None for no failure."""

    started_s: float
    ended_s: float
    hosts: list[str]
    ranks: int
    exit_code: int
    cause: str | None


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


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job, whose processes ``run_id`` marks; ``past`` are those at the same job that have failed."""

    options: LaunchOptions
    folder: JobFolder
    console: Console
    state: JobState
    past: tuple[EndedAttempt, ...] = ()
    run_id: str = ""
    began_s: float = field(default_factory=time.time)

    @classmethod
    def first(cls, options: LaunchOptions, folder: JobFolder, console: Console) -> Attempt:
        command = [options.program.kind, *options.program.arguments]
        return cls(options, folder, console, JobState.of_this_process(command, options.ranks), run_id=_run_id(folder))

    def next(self, options: LaunchOptions, past: tuple[EndedAttempt, ...]) -> Attempt:
        """Return the attempt after this one, with the options as they are known then."""
        state = replace(self.state, restarts=len(past))
        return Attempt(options, self.folder, self.console, state, past, _run_id(self.folder))

    def write_report(self, hosts: list[dict[str, Any]], state: JobState, end: AttemptEnd | None = None) -> None:
        """Write ``run.json``, with the attempt's end if it has ended. Raises `OSError`.

        ``hosts`` is the carrier's description; hosts and ranks in the file are those of the last attempt.
        """
        judge = end.judge if end else None
        clocks = end.clocks_ahead_s if end else {}
        replace_file(
            self.folder.path / "run.json",
            {
                "job": self.folder.name,
                "command": state.command,
                "launcher": {"host": state.host, "python": sys.version.split()[0], "shardwright": __version__},
                "status": state.status,
                "exit_code": state.exit_code,
                "started_s": state.started_s,
                "ended_s": state.ended_s,
                "restarts": state.restarts,
                "attempts": [asdict(ended) for ended in (*self.past, *([end.kept] if end else []))],
                "hosts": [host | {"clock_ahead_s": clocks.get(host["name"], 0.0)} for host in hosts],
                "stalls": sorted(path.name for path in self.folder.path.glob("stall-*.txt")),
                "cause": judge.headline(judge.cause) if judge and judge.cause else None,
                "ranks": _ranks(judge) if judge else [],
            },
        )

    @property
    def first_line(self) -> str:
        """The line with which the logs of a restart begin, empty for the first attempt."""
        if not self.past:
            return ""
        number = f"{len(self.past)} of {self.options.restarts.limit}"
        return f"[shardwright: restart {number}, {moment(self.began_s)}]\n"


def _run_id(folder: JobFolder) -> str:
    return f"{folder.name}-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt, with the carrier's description of its ``hosts``.

    ``clocks_ahead_s`` is how far each host's clock was ahead of the launcher's. ``all_started_s`` and
    ``unsure_until_s`` are by the monotonic clock: until the latter ranks may still run on a host that is lost.
    ``told_to_end`` is the signal by which somebody has ended the job.
    """

    attempt: Attempt
    outcome: Outcome
    judge: Judge
    hosts: list[dict[str, Any]]
    clocks_ahead_s: Mapping[str, float]
    all_started_s: float | None
    unsure_until_s: float
    ended_s: float = field(default_factory=time.time)

    @property
    def told_to_end(self) -> int | None:
        return self.judge.told_to_end

    @property
    def may_restart(self) -> bool:
        return self.outcome.status == FAILED and self.attempt.options.restarts.left > 0 and self.told_to_end is None

    @property
    def kept(self) -> EndedAttempt:
        hosts = [str(host["name"]) for host in self.hosts]
        ranks, began_s = self.attempt.options.ranks, self.attempt.began_s
        return EndedAttempt(began_s, self.ended_s, hosts, ranks, self.outcome.exit_code, self.outcome.cause)

    def finish(self, status: str, exit_code: int) -> None:
        """Write the job's last state and its report, since no attempt comes after this one."""
        folder, console = self.attempt.folder, self.attempt.console
        state = self.attempt.state.ended(status, exit_code)
        try:
            folder.write_state(state)
        except OSError as error:
            console.say(f"the job's state cannot be written: {error}")
        try:
            self.attempt.write_report(self.hosts, state, self)
        except OSError as error:
            console.say(f"run.json cannot be written: {error}")
        folder.release()
