"""A line on the terminal of a person who waits."""

from __future__ import annotations

import time
from threading import Event, Thread
from types import TracebackType
from typing import TextIO

_EVERY_S = 0.5


class Progress:
    """Says on a terminal what is under way, once it has taken ``after_s`` seconds, and wipes it away at the end.

    Nothing is written to what is no terminal, where a line that changes would be rubbish in a log.
    """

    def __init__(self, stream: TextIO, after_s: float = 2.0) -> None:
        self._stream, self._after_s = stream, after_s
        self._stage = ""
        self._done = Event()
        self._thread = Thread(target=self._show, daemon=True)

    def stage(self, name: str) -> None:
        """What begins now: "planning"."""
        self._stage = name

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _show(self) -> None:
        start_s = time.monotonic()
        if self._done.wait(self._after_s):
            return
        while True:
            self._stream.write(f"\r\x1b[K{self._stage}: {time.monotonic() - start_s:.0f} s")
            self._stream.flush()
            if self._done.wait(_EVERY_S):
                break
        self._stream.write("\r\x1b[K")
        self._stream.flush()
