"""The ``logs`` command: show what ranks of a job wrote, and go on showing until the job has ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from shardwright.errors import UsageError
from shardwright.launch.host.protocol import STREAMS
from shardwright.launch.joblog.job import RUNNING, JobFolder, find_job
from shardwright.launch.options.launch_options import read_tee

_POLL_S = 0.1


def show_logs(log_dir: Path, name: str | None, ranks: str, follow: bool) -> int:
    """Copy the logs of ``ranks`` (as ``--tee`` names them) to standard output and error.

    With ``follow`` until the job ends; then returns its exit code. Raises `UsageError` where there is no such job.
    """
    folder = find_job(log_dir, name)
    state = folder.read_state()
    if state is None:
        raise UsageError(f"the state of job {folder.name} in {folder.path} cannot be read")
    shown = sorted(read_tee(ranks, state.ranks))
    tails = [_Tail(folder, rank, stream, prefix=len(shown) > 1) for rank in shown for stream in STREAMS]
    while True:
        state = folder.read_state() or state  # before reading: what a job that has ended wrote is all there
        for tail in tails:
            tail.copy()
        if not follow or state.status != RUNNING:
            break
        time.sleep(_POLL_S)
    for tail in tails:
        tail.copy(to_the_end=True)
    if not follow:
        return 0
    os.write(2, f"shardwright: job {folder.name} {state.end}\n".encode())
    return state.code


class _Tail:
    """One log file and how far it was shown; with a prefix, whole lines."""

    def __init__(self, folder: JobFolder, rank: int, stream: str, prefix: bool) -> None:
        self.prefix = b"[rank %d] " % rank if prefix else b""
        self.target = 1 + STREAMS.index(stream)
        self.rest = b""
        try:
            self.file = (folder.rank(rank) / stream).open("rb")
        except OSError as error:
            raise UsageError(f"the log of rank {rank} cannot be read: {error}") from None

    def copy(self, to_the_end: bool = False) -> None:
        while data := self.file.read(1 << 16):
            self._show(data)
        if to_the_end and self.rest:
            self._show(b"\n")

    def _show(self, data: bytes) -> None:
        if self.prefix:
            *lines, self.rest = (self.rest + data).split(b"\n")
            if len(self.rest) >= 1 << 16:
                lines, self.rest = [*lines, self.rest], b""
            data = b"".join(self.prefix + line + b"\n" for line in lines)
        while data:
            data = data[os.write(self.target, data) :]
