"""The output of a job on the console: the ranks that are shown, and the launcher's own lines.

Nothing here ever waits for the reader: a thread for each of the two streams writes what is queued, and where a reader
stands still the queue is full and later output is counted instead. All of it is in the log files.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque

from shardwright.common.words import drawn

_QUEUE_BYTES = 64 << 20
_PIECE_BYTES = 100  # what a queued piece costs beyond its length
_LONGEST_LINE_BYTES = 1 << 16
_FRAGMENT_AGE_S = 0.5
_MOST_STILL_S = 60.0  # without a byte, in the end; a hung file system never takes one


class _WriterThread:
    """One file descriptor and the thread that writes to it.

    A thread waits, since the descriptor is shared with other programs, for which it must go on blocking.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.dropped_bytes = 0
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._written_bytes = 0
        self._closed = False
        self._gone = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name=f"console-{fd}", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        with self._changed:
            if self._gone:
                return
            if self._queued_bytes + len(data) + _PIECE_BYTES > _QUEUE_BYTES:
                self.dropped_bytes += len(data)
                return
            self._queue.append(data)
            self._queued_bytes += len(data) + _PIECE_BYTES
            self._changed.notify()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                data = memoryview(self._queue.popleft())
                self._queued_bytes -= len(data) + _PIECE_BYTES
            while data:
                try:
                    written = os.write(self.fd, data[:65536])
                except OSError:
                    self._gone = True  # the terminal or the reader; the logs go on
                    return
                data = data[written:]
                self._written_bytes += written

    def close(self, patience_s: float) -> None:
        """Wait until all is written, or until for ``patience_s`` nobody takes it; a minute at most without a byte."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        still_s = 0.0
        while self._thread.is_alive() and still_s < _MOST_STILL_S:
            before = self._written_bytes
            self._thread.join(patience_s)
            still_s = still_s + patience_s if self._written_bytes == before else 0.0
            if still_s and self._thread.is_alive() and not self._is_taken():
                return

    def _is_taken(self) -> bool:
        """Return whether more could be written at once: then the thread only lacked a processor."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return bool(poll.poll(0))


class _UnfinishedLine:
    """The unfinished line of one stream of one rank, where lines of several ranks share the console."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.since_s = 0.0


class Console:
    """The console of a job, on which the ranks in ``shown`` write, with a prefix where there are several."""

    def __init__(self, shown: frozenset[int]) -> None:
        self.shown = shown
        errors = _WriterThread(2)
        # On one terminal one writes, so that a line that is to be wiped away is gone before what comes next.
        one = os.isatty(2) and os.path.sameopenfile(1, 2)
        self._writers = {"stdout": errors if one else _WriterThread(1), "stderr": errors}
        self._can_draw = os.isatty(2) and (one or not os.isatty(1))
        self._is_drawn = False
        self._one_screen = os.path.sameopenfile(1, 2) or (os.isatty(1) and os.isatty(2))
        self._inside_line = {"stdout": False, "stderr": False}
        self._lines: dict[tuple[int, str], _UnfinishedLine] = {}

    def output(self, rank: int, stream: str, data: bytes) -> None:
        if rank not in self.shown:
            return
        if len(self.shown) == 1:
            self._put(stream, data)
            return
        line = self._lines.setdefault((rank, stream), _UnfinishedLine())
        if not line.text:
            line.since_s = time.monotonic()
        line.text += data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")  # a progress bar becomes lines
        *whole, rest = line.text.split(b"\n")
        for text in whole:
            self._put_line(rank, stream, text)
        while len(rest) >= _LONGEST_LINE_BYTES:
            self._put_line(rank, stream, rest[:_LONGEST_LINE_BYTES])
            del rest[:_LONGEST_LINE_BYTES]
        line.text = rest

    def show_fragments(self, older_than_s: float = _FRAGMENT_AGE_S) -> float | None:
        """Show unfinished lines that have waited. Returns the seconds until the next one has, None without any."""
        waiting = []
        for (rank, stream), line in self._lines.items():
            if not line.text:
                continue
            left_s = line.since_s + older_than_s - time.monotonic()
            if left_s > 0:
                waiting.append(left_s)
            else:
                self._put_line(rank, stream, line.text)
                line.text = bytearray()
        return min(waiting, default=None)

    def say(self, text: str) -> None:
        """Show a message of the launcher's own; its first line is marked, the others are indented."""
        start = b"\n" if self._inside_line["stderr"] or (self._one_screen and self._inside_line["stdout"]) else b""
        lines = "\n  ".join(text.splitlines())
        self._put("stderr", start + f"shardwright: {lines}\n".encode(errors="surrogateescape"))
        if start:
            self._inside_line["stdout"] = self._inside_line["stdout"] and not self._one_screen

    def draw(self, text: str) -> None:
        """Show on a terminal, until something else comes, the task that a rank is busy with; an empty text removes it.

        It stands nowhere where a rank has begun a line, and not in a log.
        """
        begun = self._inside_line["stderr"] or (self._one_screen and self._inside_line["stdout"])
        if self._can_draw and not begun and (text or self._is_drawn):
            with contextlib.suppress(OSError):  # the terminal is gone
                self._writers["stderr"].put(drawn(text, os.get_terminal_size(2).columns).encode())
                self._is_drawn = bool(text)

    def _put_line(self, rank: int, stream: str, text: bytes | bytearray) -> None:
        if text:
            self._put(stream, b"[rank %d] " % rank + text + b"\n")

    def _put(self, stream: str, data: bytes) -> None:
        if self._is_drawn and self._writers[stream] is self._writers["stderr"]:
            data, self._is_drawn = drawn("", 1).encode() + data, False
        self._writers[stream].put(data)
        self._inside_line[stream] = not data.endswith((b"\n", b"\r"))

    def close(self, patience_s: float = 2.0) -> None:
        """Write what is queued, as long as somebody reads it, and count what nobody did."""
        self.draw("")
        self.show_fragments(older_than_s=0.0)
        writers = dict.fromkeys(self._writers.values())
        if len(writers) > 1:
            self._writers["stdout"].close(patience_s)
        if dropped := sum(writer.dropped_bytes for writer in writers):
            self.say(f"{dropped} bytes were not shown, since the console did not take them; the logs hold them")
        self._writers["stderr"].close(patience_s)
