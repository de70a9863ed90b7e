"""The log files of the ranks, written here; read again in `follow`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable

from shardwright.launch.host.protocol import STREAMS
from shardwright.launch.joblog.job import JobFolder

TAIL_BYTES = 1 << 15


class LogFile:
    """One file. What the disk does not take is counted, and a line in the file says so where it is missing."""

    def __init__(self, path: str, begin: bytes) -> None:
        """A new file; with ``begin``, a line, the one that an earlier attempt may have left goes on with it."""
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
        """Returns why not all of it could be written, None if it was."""
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
        """Where bytes are missing, as soon as there is room for saying so."""
        if self._gap_bytes:
            note = f"\n[shardwright: {self._gap_bytes} bytes are missing here: {self._gap_reason}]\n".encode()
            if os.write(self._fd, note) == len(note):
                self._gap_bytes = 0

    def lose(self, count: int, reason: str) -> None:
        """Bytes that never came, or cannot be kept."""
        self._gap_bytes += count
        self._gap_reason = reason
        self.lost_bytes += count

    def close(self) -> str | None:
        """Some file systems tell only now that the data could not be kept."""
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
    ranks (`kept_logs`), and here are the ends of what they wrote alone; ``host`` names the host of a rank.
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
