"""The ``stop`` command: end a job on all its hosts, and tell what was ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from shardwright.launch.host.processes import kill_all, marked, send_signal
from shardwright.launch.host.signals import KILL_NOW
from shardwright.launch.joblog.jobs import JobRecord, find_job

_POLL_S = 0.05
_BEYOND_S = 40.0  # after the grace: the kernel may need long to end a large process
_NOW_S = 40.0
_LEFT_S = 10.0


def stop_job(word: str, now: bool, say: Callable[[str], None]) -> int:
    """End the job: its ranks have the grace that it was launched with, none with ``now`` or if it was told before.

    Returns 0 where it has ended, 1 where something of it still lives. Raises `UsageError` where there is no such job.
    """
    job = find_job(word)
    if not job.lives:
        return _end_what_is_left(job, say)
    what = f"the {job.ranks} rank{'s' * (job.ranks != 1)} of job {job.name} on {', '.join(job.hosts)}"
    if now or job.told_path.exists():
        say(f"killing {what}")
        tell_launcher(job, now=True)
        ended = _wait(job, _NOW_S)
    else:
        say(
            f"{what} are told to end, and have {job.grace_s:g} s; `shardwright stop {word}` again, or --now, kills them"
        )
        tell_launcher(job, now=False)
        ended = _wait(job, job.grace_s + _BEYOND_S)
    if ended:
        say(f"job {job.name} has ended; its logs: {job.folder}")
        return 0
    say(f"the launcher of job {job.name} (pid {job.pid}) does not end, and is killed")
    send_signal(job.pid, signal.SIGKILL)
    _wait(job, _LEFT_S)
    return _end_what_is_left(job, say)


def tell_launcher(job: JobRecord, now: bool) -> None:
    """Have the launcher of a job end it: at once, or with the grace that the job was launched with."""
    job.told_path.touch()
    if job.lives:
        send_signal(job.pid, KILL_NOW if now else signal.SIGTERM)
        send_signal(job.pid, signal.SIGCONT)  # a stopped launcher hears it, too


def _wait(job: JobRecord, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while job.lives:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _end_what_is_left(job: JobRecord, say: Callable[[str], None]) -> int:
    """End a job whose launcher is gone. Supervisors and agents end without it, by the end of its stream or by lease."""
    killed: set[int] = set()

    def left() -> set[int]:
        pids = {pid for mark in job.marks for pid in marked(mark)}
        killed.update(pids)
        return pids

    living = kill_all(left, _LEFT_S)
    say(f"the launcher of job {job.name} is gone; {len(killed)} processes of it were left on this host and are killed")
    others = [host for host in job.hosts if host != job.host]
    if job.lease_s is not None and others:
        say(
            f"on {', '.join(others)} the job's agents kill its ranks when the connection ends, or, where it is cut, "
            f"at the latest {job.may_live_s:g} s after the launcher's end (--lease {job.lease_s:g})"
        )
    if living:
        say(f"processes that do not end even when killed: {', '.join(map(str, sorted(living)))}")
        return 1
    job.remove()
    return 0
