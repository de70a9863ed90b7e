"""One attempt at a job: what it is to be, and how it ended."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwright.launch.console import Console
from shardwright.launch.joblog.job import FAILED, JobFolder, JobState
from shardwright.launch.joblog.judge import Judge, Outcome
from shardwright.launch.joblog.run_report import EndedAttempt, RunReport
from shardwright.launch.options.launch_options import LaunchOptions


@dataclass(frozen=True)
class Attempt:
    """What one attempt at a job owns.

    ``options`` tell how many ranks there are; ``past`` are the attempts at the same job that have failed.

    ``run_id`` marks its processes; ``began_s`` is in seconds since the epoch.
    """

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
        """The attempt after this one, with the options as they are known then."""
        state = replace(self.state, restarts=len(past))
        return Attempt(options, self.folder, self.console, state, past, _run_id(self.folder))

    @property
    def first_line(self) -> str:
        """The line with which the logs of a restart begin, empty for the first attempt."""
        if not self.past:
            return ""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began_s))
        return f"[shardwright: restart {len(self.past)} of {self.options.restarts.limit}, {moment}]\n"


def _run_id(folder: JobFolder) -> str:
    return f"{folder.name}-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended. ``all_started_s``, ``unsure_until_s`` are by the monotonic clock: until when ranks may
    still run on a host that is lost; ``told_to_end`` is the signal by which somebody has ended the job.
    """

    attempt: Attempt
    outcome: Outcome
    judge: Judge
    report: RunReport
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
        hosts = [str(host["name"]) for host in self.report.hosts]
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
            self.report.write(state, self.judge, self.clocks_ahead_s, self.kept)
        except OSError as error:
            console.say(f"run.json cannot be written: {error}")
        folder.release()
