"""Large files written past the page cache.

A file that nobody reads soon gains nothing from the page cache; through it, writing costs a copy by the kernel and its
search for free pages, on the same cores that train. So the bytes are collected in one of two aligned buffers, and a
thread hands the other to the disk meanwhile (open(2), ``O_DIRECT``). What is large and lies at the beginning of a page
already is handed over from there.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future
from typing import Any

import numpy as np

from shardwright.common.threads import thread_pool

BUFFER_BYTES = 8 << 20
ALIGNMENT_BYTES = 4096
LEAST_BYTES = 32 << 20
"""Smaller files go through the page cache: two buffers are not worth their while."""


class DirectFile:
    """A new file to write to; where the file system cannot do so past the page cache, through it."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._set_direct(True)
        self._buffers = [mmap.mmap(-1, BUFFER_BYTES), mmap.mmap(-1, BUFFER_BYTES)]
        self._arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in self._buffers]
        self._thread = thread_pool(1, "checkpoint file")
        self._writing: Future[None] | None = None
        self._start = 0  # of the buffer in the file
        self._filled = 0
        self.closed = False

    def write(self, data: Any) -> int:
        source = np.frombuffer(data, dtype=np.uint8)  # numpy copies without the interpreter's lock
        done = 0
        if not self._filled and len(source) >= BUFFER_BYTES and source.ctypes.data % ALIGNMENT_BYTES == 0:
            done = len(source) // ALIGNMENT_BYTES * ALIGNMENT_BYTES  # the disk can take it from where it lies
            self._wait()
            self._write(source[:done].data, self._start)
            self._start += done
        while done < len(source):
            count = min(len(source) - done, BUFFER_BYTES - self._filled)
            self._arrays[0][self._filled : self._filled + count] = source[done : done + count]
            self._filled += count
            done += count
            if self._filled == BUFFER_BYTES:
                self._hand_over(BUFFER_BYTES)
        return len(source)

    def finish(self) -> None:
        """Wait until all of it is on the disk, and close."""
        size = self._start + self._filled
        padded = -(-self._filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._hand_over(padded)
        self._wait()
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Let go of the file, whatever of it is there."""
        if not self.closed:
            self.closed = True
            self._thread.shutdown()
            os.close(self._descriptor)

    def _hand_over(self, count: int) -> None:
        """Have the first ``count`` bytes of the buffer written, and go on with the other, when it is free."""
        self._wait()
        self._writing = self._thread.submit(self._write, memoryview(self._buffers[0])[:count], self._start)
        self._buffers.reverse()
        self._arrays.reverse()
        self._start += count
        self._filled = 0

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, view: memoryview, start: int) -> None:
        while view:
            try:
                count = os.pwrite(self._descriptor, view, start)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct():
                    raise
                self._set_direct(False)  # other alignments than ours, or none that would do
                continue
            view, start = view[count:], start + count
            if view and count % ALIGNMENT_BYTES:
                self._set_direct(False)  # the rest, if there is room for it, does not begin at a block

    def _direct(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what a file system without it says
                raise
