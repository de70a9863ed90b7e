"""The jobs of this user that were launched on this host: a file for each in ``/tmp/shardwright-<uid>/jobs``.

The launcher writes it and removes it at its end; `shardwright ps` lists the jobs, `shardwright stop` ends one. The
folder is the user's alone, and nothing of an environment is in it. The process id of a launcher that was killed may be
used again: with the moment of its start it names one process for ever. Such a job is shown as lost for a while, and
then removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from shardwright.common.private_folder import make_private, own_folder
from shardwright.common.schema import SchemaError, from_json
from shardwright.common.whole_file import write_whole
from shardwright.errors import UsageError
from shardwright.launch.host.processes import KILL_NOW, kill_all, marked, send_signal, start_ticks

RUNNING, RESTARTING, STOPPING, LOST = "running", "restarting", "stopping", "lost"
_SHOWN_LOST_S = 60.0


def _own_processes() -> str:
    """Return a name of the container or host whose processes this one may know by their numbers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@dataclass(frozen=True)
class JobRecord:
    """A job of this user; ``folder`` has the logs, and processes of the job carry ``marks``.

    Times are in seconds since the epoch; ``lease_s`` is None for a job on its launcher's host alone, ``lost_s`` when
    its launcher was first found gone; ``pid`` is a number among ``processes``.
    """

    name: str
    folder: str
    host: str
    pid: int
    start_ticks: int | None
    started_s: float
    state: str
    hosts: list[str]
    ranks: int
    restarts: int
    grace_s: float
    lease_s: float | None = None
    marks: list[str] = field(default_factory=list)
    lost_s: float | None = None
    processes: str = field(default_factory=_own_processes)

    @property
    def path(self) -> Path:
        return jobs_folder() / f"{self.pid}-{self.start_ticks}.json"

    @property
    def stop_path(self) -> Path:
        """The file that exists once somebody has requested the end of the job."""
        return self.path.with_suffix(".stop")

    @property
    def lives(self) -> bool:
        """Return whether the job's launcher lives."""
        return self.start_ticks is not None and start_ticks(self.pid) == self.start_ticks

    @property
    def may_live_s(self) -> float:
        """The seconds for which ranks on other hosts may outlive the launcher."""
        return 0.0 if self.lease_s is None else 1.25 * self.lease_s + 0.5

    def write(self) -> None:
        """Write the record. Raises `OSError`."""
        make_private(jobs_folder())
        write_whole(self.path, lambda draft: draft.write_text(json.dumps(asdict(self))))

    def remove(self) -> None:
        for path in (self.path, self.stop_path):
            with contextlib.suppress(OSError):
                path.unlink()


def jobs_folder() -> Path:
    """Return the folder in which the jobs of this user are recorded."""
    return own_folder() / "jobs"


def known_jobs() -> list[JobRecord]:
    """Return the jobs of this host, the oldest first. Those that were lost long ago are removed.

    Raises `UsageError` where the folder is not this user's alone.
    """
    folder = jobs_folder()
    if not folder.exists():
        return []
    try:
        make_private(folder)
        records = [record for path in folder.glob("*.json") if (record := _read(path)) is not None]
        for path in folder.glob("*.stop"):
            if not path.with_suffix(".json").exists():  # the job ended while it was told to
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"the jobs of this host cannot be listed: {error}") from None
    # A container may share /tmp, and the host's name as well, but not the processes.
    own = socket.gethostname(), _own_processes()
    here = [record for record in records if (record.host, record.processes) == own]
    return sorted((seen for record in here if (seen := _seen(record))), key=lambda record: record.started_s)


def _read(path: Path) -> JobRecord | None:
    try:
        record = from_json(path.read_bytes(), JobRecord)
    except (OSError, SchemaError):
        return None
    return record if record.path == path else None


def _seen(record: JobRecord) -> JobRecord | None:
    """Return the record as the job is now; None for one that was lost long ago, which is removed."""
    if record.lives:
        return replace(record, state=STOPPING) if record.stop_path.exists() else record
    now_s = time.time()
    if record.lost_s is None:
        if not record.path.exists():  # its launcher has removed it and ended, since it was read
            return None
        record = replace(record, state=LOST, lost_s=now_s)
        with contextlib.suppress(OSError):
            record.write()
    assert record.lost_s is not None
    if now_s > record.lost_s + max(_SHOWN_LOST_S, record.may_live_s):
        record.remove()
        return None
    return record


def find_job(word: str) -> JobRecord:
    """Return the job of that name, or with its logs in that folder. Raises `UsageError` that lists the others."""
    known = known_jobs()
    matching = [r for r in known if r.name == word or (os.sep in word and os.path.realpath(word) == r.folder)]
    living = [record for record in matching if record.lives] or matching
    if len(living) == 1:
        return living[0]
    if living:
        listed = "\n".join(f"  {record.folder}" for record in living)
        raise UsageError(f"{len(living)} jobs are named {word}; name one by the folder of its logs:\n{listed}")
    names = ", ".join(record.name for record in known)
    there = f"those there are: {names}" if known else "there is none"
    raise UsageError(f"no job {word} of this user was launched on this host and still runs; {there}")


def show_jobs() -> str:
    """Return a table, or a line where there is nothing to show."""
    known = known_jobs()
    if not known:
        return "no job of this user runs that was launched on this host"
    rows = [("JOB", "STATE", "HOSTS", "RANKS", "STARTED", "RESTARTS", "LOGS")]
    for record in known:
        hosts = ",".join(record.hosts)
        rows.append((
            record.name, record.state, hosts, str(record.ranks), moment(record.started_s), str(record.restarts),
            record.folder,
        ))  # fmt: skip
    lines = table_lines(rows)
    if any(record.state == LOST for record in known):
        lines.append("lost: its launcher was killed, and its ranks end without it; `shardwright stop JOB` makes sure")
    return "\n".join(lines)


def moment(time_s: float) -> str:
    """Return a time since the epoch as this host's clock shows it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of words as lines, with each column as wide as its longest word."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


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
    if now or job.stop_path.exists():
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
    job.stop_path.touch()
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
