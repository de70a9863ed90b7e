"""The folder of a job, ``log_output/<job>``: its state, ``failed.json`` after a failure, and one folder per rank.

``job.json`` holds what runs, since when, by which launcher, and how it ended; ``failed.json``, if it is there, which
rank failed first and why. Neither holds anything of the environment. Both are replaced whole, so that a reader never
sees half a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwright.common.schema import SchemaError, from_json
from shardwright.common.system_errors import in_words
from shardwright.common.whole_file import made_folder, remove_empty
from shardwright.errors import UsageError
from shardwright.launch.host.processes import start_ticks
from shardwright.launch.hosts.job_name import check_job_name

_STATE_FILES = ("job.json", "failed.json")
FAILED_VARIABLE = "SHARDWRIGHT_FAILED_MARK"
"""Tells a rank where ``failed.json`` will be. It is there before the other ranks are told to end."""
_RESERVED_BYTES = 4096
RUNNING, SUCCEEDED, FAILED, INTERRUPTED, LOST = "running", "succeeded", "failed", "interrupted", "lost"


@dataclass(frozen=True)
class JobState:
    """The content of ``job.json``, with times since the epoch; ``start_ticks`` tells a pid from its reuse.

    A job that is about to begin again is still `RUNNING`. ``ranks`` is how many it had at first.
    """

    command: list[str]
    ranks: int
    host: str
    pid: int
    start_ticks: int | None
    started_s: float
    status: str = RUNNING
    exit_code: int | None = None
    ended_s: float | None = None
    restarts: int = 0

    @classmethod
    def of_this_process(cls, command: list[str], ranks: int) -> JobState:
        pid = os.getpid()
        return cls(command, ranks, socket.gethostname(), pid, start_ticks(pid), time.time())

    @property
    def end(self) -> str:
        """The end of the job, in words."""
        return f"{self.status} ({'its launcher is gone' if self.status == LOST else f'exit code {self.exit_code}'})"

    @property
    def code(self) -> int:
        """The exit code of a command that waited for the job's end."""
        return 1 if self.exit_code is None else self.exit_code

    def ended(self, status: str, exit_code: int) -> JobState:
        return replace(self, status=status, exit_code=exit_code, ended_s=time.time())


@dataclass(frozen=True)
class JobFolder:
    """``path`` exists and belongs to one job alone; of the folders above it ``made`` lacked, the innermost first."""

    path: Path
    made: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return self.path.name

    def rank(self, rank: int) -> Path:
        return self.path / f"rank.{rank}"

    def error_file(self, rank: int) -> Path:
        return (self.rank(rank) / "error.json").absolute()

    @property
    def failed_mark(self) -> Path:
        return (self.path / "failed.json").absolute()

    def make_ranks(self, ranks: int) -> None:
        """Make a folder for each rank, once it is known how many there are."""
        for rank in range(ranks):
            self.rank(rank).mkdir(exist_ok=True)

    def begin_again(self) -> None:
        """Remove what would tell the next attempt that it has failed."""
        self.failed_mark.unlink(missing_ok=True)
        for path in self.path.glob("rank.*/error.json"):
            path.unlink(missing_ok=True)

    def write_state(self, state: JobState) -> None:
        replace_file(self.path / "job.json", asdict(state))

    def write_failure(self, failure: Mapping[str, object]) -> None:
        """Write ``failed.json``: ``rank`` (None where a supervisor or a host failed), ``cause``, ``time_s``."""
        replace_file(self.failed_mark, failure)

    def read_state(self) -> JobState | None:
        """Return the state, None where it cannot be read; `LOST` where the launcher is gone without a word."""
        try:
            state = from_json((self.path / "job.json").read_bytes(), JobState)
        except (OSError, SchemaError):
            return None
        here = state.host == socket.gethostname()
        if state.status == RUNNING and here and start_ticks(state.pid) != state.start_ticks:
            return replace(state, status=LOST)
        return state

    def reserve(self) -> None:
        """Reserve room on the disk for the last state and the mark of a failure, since the logs may fill it."""
        for name in _STATE_FILES:
            _temporary(self.path / name).write_bytes(bytes(_RESERVED_BYTES))

    def release(self) -> None:
        for name in _STATE_FILES:
            _temporary(self.path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder of a job that never started."""
        shutil.rmtree(self.path, ignore_errors=True)
        remove_empty(self.made)


def is_marked_as_failed(environment: Mapping[str, str]) -> bool:
    """Return, in a rank, whether the launcher has marked its job as failed."""
    mark = environment.get(FAILED_VARIABLE)
    return mark is not None and os.path.exists(mark)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def replace_file(path: Path, value: object) -> None:
    """Write JSON into the reserved file, if there is one, and give it its name in one step."""
    temporary = _temporary(path)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")
        file.truncate()
    os.replace(temporary, path)


def create_job_folder(log_dir: Path, name: str | None) -> JobFolder:
    """Make a new folder for ``name``, or for the lowest number that no job has.

    Raises `UsageError` where the name cannot be one, is taken, or the folder cannot be written.
    """
    if name is not None:
        check_job_name(name)
    try:
        with made_folder(log_dir) as made:
            path = _claim(log_dir, name)
    except OSError as error:
        raise UsageError(
            f"the logs cannot be written to {in_words(error, log_dir)}; type --log-dir DIR with a folder that may be "
            "written"
        ) from None
    return JobFolder(path, made)


def _claim(log_dir: Path, name: str | None) -> Path:
    """Make the folder; mkdir fails where another job has it, which is what makes two jobs differ."""
    if name is not None:
        try:
            (log_dir / name).mkdir()
        except FileExistsError:
            raise UsageError(
                f"a job named {name} has its logs in {log_dir / name}; type another --job name, or remove that folder"
            ) from None
        return log_dir / name
    number = 1 + max((int(entry.name) for entry in log_dir.iterdir() if entry.name.isdecimal()), default=0)
    while True:
        with contextlib.suppress(FileExistsError):
            (log_dir / str(number)).mkdir()
            return log_dir / str(number)
        number += 1


def find_job(log_dir: Path, name: str | None) -> JobFolder:
    """Return the job of that name, or the one started last. Raises `UsageError` that lists the jobs there are."""
    folders = [JobFolder(path.parent) for path in log_dir.glob("*/job.json")]
    started = {folder.name: state.started_s for folder in folders if (state := folder.read_state())}
    if name is not None and name in started:
        return JobFolder(log_dir / name)
    if not started:
        raise UsageError(f"no job has logs in {log_dir.absolute()}; type --log-dir DIR, or `shardwright launch` first")
    newest = sorted(started, key=started.__getitem__)
    if name is None:
        return JobFolder(log_dir / newest[-1])
    raise UsageError(f"no job named {name} in {log_dir}; the latest are {', '.join(newest[-10:])}")
