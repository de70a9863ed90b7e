"""The files that grow while a job runs: the output of its ranks, their states, and the steps that they report.

``rank.<N>/stdout`` and ``stderr`` are written by the launcher or, with ``--no-collect-logs``, by the agent on the host
of the rank. ``ranks.jsonl`` says when each rank began, was stopped, went on and ended; ``rank.<N>/steps.jsonl`` has the
lines of `common.step_lines`. A restart appends to the same files. `launch.progress` and `follow` read them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwright.launch.host.protocol import STREAMS, LogLost, LogRetention
from shardwright.launch.joblog.job import JobFolder

TAIL_BYTES = 1 << 15


class LogFile:
    """One file. What the disk does not take is counted, and a line in the file says so where it is missing."""

    def __init__(self, path: str, begin: bytes) -> None:
        """Make a new file; with ``begin``, a line, append to the one that an earlier attempt may have left."""
        self.path = path
        self.lost_bytes = 0
        self._gap_bytes = 0
        self._gap_reason = ""
        new = 0 if begin else os.O_EXCL
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | new | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if begin:
            size = os.fstat(self._fd).st_size
            inside_line = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
            self.write(b"\n" * inside_line + begin)

    def write(self, data: bytes) -> str | None:
        """Write the data. Returns why not all of it could be written, None if it was."""
        rest = memoryview(data)
        try:
            self._note_gap()
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.lose(len(rest), "the disk was full")
            return error.strerror
        return None

    def _note_gap(self) -> None:
        """Write a note where bytes are missing, as soon as there is room for it."""
        if self._gap_bytes:
            note = f"\n[shardwright: {self._gap_bytes} bytes are missing here: {self._gap_reason}]\n".encode()
            if os.write(self._fd, note) == len(note):
                self._gap_bytes = 0

    def lose(self, count: int, reason: str) -> None:
        """Count bytes that were lost on the way or cannot be written."""
        self._gap_bytes += count
        self._gap_reason = reason
        self.lost_bytes += count

    def close(self) -> str | None:
        """Close the file; some file systems tell only now that the data could not be kept."""
        with contextlib.suppress(OSError):  # the disk is still full
            self._note_gap()
        try:
            os.close(self._fd)
        except OSError as error:
            return error.strerror
        return None


class RankLogs:
    """stdout and stderr of every rank of a job. A disk that is full is reported once, and stops nobody.

    ``begin`` is the line with which the output of a restart begins. With ``kept`` the files are on the hosts of the
    ranks (`RetainedLogs`), and here are the ends of what they wrote alone; ``host`` names the host of a rank.
    """

    def __init__(
        self, folder: JobFolder, ranks: int, say: Callable[[str], None], begin: str = "", kept: bool = False,
        host: Callable[[int], str] = lambda rank: "",
    ) -> None:  # fmt: skip
        self._folder, self._host = folder, host
        self._say = say
        self._told = False
        self._tails = {(rank, stream): bytearray() for rank in range(ranks) for stream in STREAMS}
        self._files: dict[tuple[int, str], LogFile] = {}
        try:
            for rank, stream in itertools.product(range(0 if kept else ranks), STREAMS):
                self._files[rank, stream] = LogFile(os.fspath(folder.rank(rank) / stream), begin.encode())
        except OSError:
            self.close()  # of too many open files none is left to remove the folder with
            raise

    def write(self, rank: int, stream: str, data: bytes) -> None:
        tail = self._tails[rank, stream]
        tail += data
        del tail[:-TAIL_BYTES]
        file = self._files.get((rank, stream))
        if file is None:
            return
        if (reason := file.write(data)) and not self._told:
            self._told = True
            self._say(f"{file.path} cannot be written: {reason}. The ranks go on; what is lost is counted")

    def lose(self, rank: int, stream: str, count: int, reason: str) -> None:
        """Count bytes of a rank that did not reach this host."""
        file = self._files.get((rank, stream))
        if file is not None:
            file.lose(count, reason)
        else:
            self._say(f"the console lacks {count} bytes of rank {rank}, which its log has: {reason}")

    def stderr_tail(self, rank: int) -> bytes:
        """The end of what the rank wrote to stderr, kept in memory."""
        return bytes(self._tails[rank, "stderr"])

    def stdout_tail(self, rank: int) -> bytes:
        return bytes(self._tails[rank, "stdout"])

    def path(self, rank: int, stream: str) -> str:
        file = self._files.get((rank, stream))
        if file is not None:
            return file.path
        return ":".join(filter(None, [self._host(rank), os.fspath((self._folder.rank(rank) / stream).absolute())]))

    def close(self) -> None:
        for file in self._files.values():
            reason = file.close()
            if file.lost_bytes or reason:
                self._say(f"{file.path} lacks {file.lost_bytes} bytes{f' ({reason})' if reason else ''}")


class RetainedLogs:
    """The log files of the ``ranks`` of this host, written by its agent. Raises `OSError` where they cannot be made.

    The launcher hears only what it shows on the console, the end of what a rank wrote, from which the verdict is made,
    and what the disk did not take.
    """

    def __init__(self, kept: LogRetention, ranks: Iterable[int]) -> None:
        self.shown = frozenset(kept.shown)
        folder, begin = Path(kept.folder), kept.begin.encode()
        self._tails: dict[int, dict[str, bytearray]] = {}
        self._files: dict[tuple[int, str], LogFile] = {}
        for rank in ranks:
            if rank not in self.shown:
                self._tails[rank] = {stream: bytearray() for stream in STREAMS}
            (folder / f"rank.{rank}").mkdir(parents=True, exist_ok=True)
            for stream in STREAMS:
                self._files[rank, stream] = LogFile(str(folder / f"rank.{rank}" / stream), begin)

    def write(self, rank: int, stream: str, data: bytes) -> bool:
        """Write the output of a rank. Returns whether the launcher is to see it, too."""
        self._files[rank, stream].write(data)
        if (tails := self._tails.get(rank)) is not None:
            tails[stream] += data
            del tails[stream][:-TAIL_BYTES]
        return rank in self.shown

    def take_tails(self, rank: int) -> dict[str, bytes]:
        """Return the end of a rank's output, as far as the launcher has not seen it."""
        return {stream: bytes(tail) for stream, tail in self._tails.pop(rank, {}).items() if tail}

    def close(self) -> list[LogLost]:
        """Close the files. Returns the losses, for the launcher."""
        losses = []
        for (rank, stream), file in self._files.items():
            reason = file.close()
            if file.lost_bytes or reason:
                losses.append(LogLost(rank, stream, file.lost_bytes, reason))
        self._files.clear()
        return losses


RANKS_FILE, STEPS_FILE = "ranks.jsonl", "steps.jsonl"


class LiveFiles:
    """The files ``ranks.jsonl`` and ``steps.jsonl`` of one attempt, counted from 0. A full disk stops nobody."""

    def __init__(self, folder: JobFolder, attempt: int, ranks: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._first = {"attempt": attempt, "ranks": ranks}
        self._begun: set[Path] = set()
        self._write(folder.path / RANKS_FILE, self._first, b"")

    def write_steps(self, rank: int, data: bytes) -> None:
        """Write the lines in which a rank reports its steps."""
        self._write(self._folder.rank(rank) / STEPS_FILE, {"attempt": self._attempt}, data)

    def write_state(self, rank: int, state: str, **facts: Any) -> None:
        """Write that a rank is from now on ``state``: "running", "stopped" or "ended"."""
        self._write(self._folder.path / RANKS_FILE, self._first, _line({"rank": rank, "state": state, **facts}))

    def _write(self, path: Path, first: Mapping[str, Any], data: bytes) -> None:
        """Append to a file that begins with ``first``; where it cannot be written the job goes on unwatched.

        It is open for no longer: of many ranks' files not all may be open at once.
        """
        with contextlib.suppress(OSError):
            if path not in self._begun:
                LogFile(os.fspath(path), _line(first)).close()
                self._begun.add(path)
            with path.open("ab") as file:
                file.write(data)


def _line(facts: Mapping[str, Any]) -> bytes:
    return json.dumps({"time_s": round(time.time(), 3), **facts}).encode() + b"\n"
