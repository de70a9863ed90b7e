"""A job from its first attempt to its last: where it fails it begins again, as often as it may.

Each attempt has a carrier, supervisors, a port and a job id of its own, so that no rank can meet anything of an attempt
before: a store that is kept over a restart goes on telling new ranks the addresses of dead ones. What resumes is the
program itself, from its last checkpoint.

Between two attempts there is a short pause, doubled for each attempt in a row that failed as soon as it had started.
Where a host was lost, what may still run there is waited for first: by its lease it has then ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

from shardwright.errors import LaunchError, UsageError
from shardwright.launch.attempt import Attempt, AttemptEnd, EndedAttempt
from shardwright.launch.carriers.connection import Carrier
from shardwright.launch.console import Console
from shardwright.launch.host.processes import ENDING_SIGNALS, KILL_NOW, PASSED_SIGNALS, woken_by
from shardwright.launch.joblog.job import FAILED, INTERRUPTED, JobFolder
from shardwright.launch.joblog.jobs import RESTARTING, RUNNING, JobRecord, known_jobs
from shardwright.launch.joblog.judge import signal_name
from shardwright.launch.launcher import Launcher
from shardwright.launch.options.launch_options import LaunchOptions
from shardwright.launch.options.request import RestartOptions

PAUSE_S = 1.0
LONGEST_PAUSE_S = 8.0
_AT_ONCE_S = 2.0  # after all ranks had started

Notify = Callable[[str], None]
"""Shows a message of the launcher's own to the person at the console."""
Wait = Callable[[float], None]
Prepare = Callable[[RestartOptions, Notify], tuple[LaunchOptions, Carrier]]
"""Makes the carrier of an attempt, and tells the options as it is known then what ranks there are.

What it says is about a restart. Raises `UsageError` or `LaunchError` where the attempt cannot be made.
"""


def run_job(restarts: RestartOptions, folder: JobFolder, prepare: Prepare, started: Callable[[], None]) -> int:
    """Run the job and return the exit code of its last attempt.

    ``started`` is called once all ranks of the first one have started. Raises `UsageError` or `LaunchError` where no
    rank ever ran; then the folder is removed.
    """
    with ended_by_signals() as wait:
        return _Attempts(restarts, folder, prepare, started, wait).run()


class _Attempts:
    def __init__(
        self, restarts: RestartOptions, folder: JobFolder, prepare: Prepare, started: Callable[[], None], wait: Wait
    ) -> None:
        self.wait = wait
        self.restarts, self.folder, self.prepare, self.started = restarts, folder, prepare, started
        self.past: tuple[EndedAttempt, ...] = ()
        self.last: AttemptEnd | None = None  # that failed, and after which there is to be another
        self.at_once = 0  # attempts in a row that failed as soon as they had started
        self.console: Console | None = None
        self.record: JobRecord | None = None

    def run(self) -> int:
        try:
            while True:
                code = self._attempt()
                if self.last is None:
                    return code
                self._pause(self.last)
        except SystemExit as ended:  # by a signal, between two attempts
            if self.last is None or not isinstance(ended.code, int):
                raise
            self._say(f"{signal_name(ended.code - 128)}: the job is not restarted")
            self.last.finish(INTERRUPTED, ended.code)
            return ended.code
        finally:
            if self.record is not None:
                self.record.remove()
            if self.console is not None:
                self.console.close()

    def _say(self, text: str) -> None:
        assert self.console is not None
        self.console.say(text)

    def _attempt(self) -> int:
        """Make one attempt and return its exit code; `last` is set if there is to be another."""
        before = self.last
        try:
            options, carrier = self.prepare(self.restarts, self._say)
        except BaseException as error:
            if before is None:
                self.folder.remove()
            elif isinstance(error, LaunchError | UsageError):
                return self._give_up(before, error)
            raise
        try:
            attempt = self._next(options, before)
            self._record(attempt, carrier)
            started = self.started if before is None else lambda: None
            end = Launcher(attempt, carrier, started).run()
            self.last = end if end.may_restart else None
        except LaunchError as error:
            if before is not None:
                return self._give_up(before, error)
            self.folder.remove()
            raise
        finally:
            carrier.close()
        if end.may_restart:
            self.past += (end.kept,)
        else:
            self._conclude(end)
        return end.outcome.exit_code

    def _next(self, options: LaunchOptions, before: AttemptEnd | None) -> Attempt:
        if before is not None:
            return before.attempt.next(options, self.past)
        self.console = Console(options.shown)
        return Attempt.first(options, self.folder, self.console)

    def _record(self, attempt: Attempt, carrier: Carrier) -> None:
        """Write what `shardwright ps` shows, and clear away what killed launchers have left there."""
        with contextlib.suppress(UsageError):
            known_jobs()
        state, options = attempt.state, attempt.options
        hosts = [str(host["name"]) for host in carrier.describe_hosts()]
        marks = [attempt.run_id, *(f"{attempt.run_id}/{index}" for index in range(len(hosts)))]
        lease_s = options.remote.lease_s if options.remote is not None else None
        self._write(JobRecord(
            self.folder.name, str(self.folder.path.resolve()), state.host, state.pid, state.start_ticks,
            state.started_s, RUNNING, hosts, options.ranks, len(self.past), options.grace_s, lease_s, marks,
        ))  # fmt: skip

    def _write(self, record: JobRecord) -> None:
        try:
            record.write()
        except OSError as error:
            if self.record is None:
                self._say(f"`shardwright ps` will not show this job: {error}")
        self.record = record

    def _give_up(self, before: AttemptEnd, error: Exception) -> int:
        self._say(f"the job cannot be restarted: {error}")
        self.last = None
        before.finish(FAILED, before.outcome.exit_code)
        return before.outcome.exit_code

    def _conclude(self, end: AttemptEnd) -> None:
        if end.outcome.cause is None or end.attempt.options.restarts.limit == 0:
            return
        if end.told_to_end is not None:
            self._say(f"{signal_name(end.told_to_end)}: the job is not restarted")
        else:
            self._say(f"the job has failed {len(self.past) + 1} times; --max-restarts {len(self.past)} is used up")

    def _pause(self, failed: AttemptEnd) -> None:
        now_s = time.monotonic()
        soon = failed.all_started_s is None or now_s - failed.all_started_s < _AT_ONCE_S
        self.at_once = self.at_once + 1 if soon else 0
        pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** max(0, self.at_once - 1))
        unsure_s = failed.unsure_until_s - now_s
        self.restarts = replace(self.restarts, count=self.restarts.count + 1)
        hosts = ", ".join(failed.kept.hosts)
        cause = (failed.outcome.cause or "").splitlines()[0]
        wait = f"in {max(pause_s, unsure_s):.0f} s"
        if unsure_s > pause_s:
            wait += ", when the lease of the lost host has ended what may still run there"
        if self.record is not None:
            self._write(replace(self.record, state=RESTARTING))
        number = f"restart {self.restarts.count} of {self.restarts.limit}"
        self._say(f"{number} on {hosts} {wait}, since {cause} (Ctrl-C ends the job)")
        self.wait(max(pause_s, unsure_s))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[Wait]:
    """Yield a function that waits so many seconds; a signal that ends jobs raises `SystemExit` meanwhile."""

    def end(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + (signal.SIGTERM if signum == KILL_NOW else signum))

    passed: dict[int, Callable[[int, FrameType | None], object]] = dict.fromkeys(PASSED_SIGNALS, lambda *_: None)
    with woken_by(passed | dict.fromkeys((*ENDING_SIGNALS, KILL_NOW), end)) as read:

        def wait(seconds: float) -> None:
            # time.sleep would sleep on after a signal that comes just before the system call.
            deadline = time.monotonic() + seconds
            while (left_s := deadline - time.monotonic()) > 0:
                if select.select([read], [], [], left_s)[0]:
                    os.read(read, 512)

        yield wait
