"""Writing that never waits: to supervisors, to agents, and from them to the launcher."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

_CHUNK_BYTES = 1 << 18


class Writer:
    """Bytes for a descriptor whose other end may stand still: as much is written as it takes, the rest later.

    They are written from the loop of a selector, of which the keys carry what is to be called. ``gone`` is called where
    the other end is no more; what waits for it is then forgotten. ``more`` gives what follows once nothing waits.
    """

    def __init__(self, fd: int, gone: Callable[[], object], more: Callable[[], bytes] = bytes) -> None:
        self._fd, self._gone, self._more = fd, gone, more
        self._backlog = bytearray()
        self._selector: selectors.BaseSelector | None = None
        self._registered = False
        os.set_blocking(fd, False)

    @property
    def waiting_bytes(self) -> int:
        return len(self._backlog)

    def attach(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._watch()

    def detach(self) -> None:
        """Leave the selector; what waits goes on waiting."""
        if self._selector is not None and self._registered:
            self._selector.unregister(self._fd)
        self._selector, self._registered = None, False

    def put(self, data: bytes) -> None:
        """Write it when the loop comes to it."""
        self._backlog += data
        self._watch()

    def put_now(self, data: bytes) -> None:
        """Write it at once, unless something waits before it."""
        waiting = bool(self._backlog)
        self._backlog += data
        if not waiting:
            self._flush()

    def _flush(self) -> None:
        try:
            del self._backlog[: os.write(self._fd, self._backlog[:_CHUNK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self._backlog.clear()
            self._gone()
        else:
            if not self._backlog:
                self._backlog += self._more()
        self._watch()

    def _watch(self) -> None:
        """Stay in the selector as long as something waits, and no longer."""
        if self._selector is None or self._registered == bool(self._backlog):
            return
        if self._backlog:
            self._selector.register(self._fd, selectors.EVENT_WRITE, self._flush)
        else:
            self._selector.unregister(self._fd)
        self._registered = bool(self._backlog)
