"""All file operations of a save, behind one interface, so that tests can replace it by one that fails."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

from shardwright.common.system_errors import in_words
from shardwright.errors import CheckpointError

_BUFFER_BYTES = 1 << 16  # less than a block of checksums, which then is not copied


class Locked(Exception):
    """Another process holds the lock; the text is what it wrote about itself."""


class Files(Protocol):
    """The file system of checkpoints. Paths are strings, joined by ``/``; failures are OSError."""

    def make_directory(self, path: str) -> None: ...
    def list(self, path: str) -> list[str]: ...
    def is_directory(self, path: str) -> bool: ...
    def read(self, path: str) -> bytes: ...
    def create(self, path: str) -> Any: ...
    def finish(self, file: Any) -> None: ...
    def discard(self, file: Any) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def exchange(self, one: str, other: str) -> None: ...
    def sync_directory(self, path: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def remove_directory(self, path: str) -> None: ...
    def lock(self, path: str, owner: str) -> Any: ...
    def unlock(self, lock: Any) -> None: ...


class LocalFiles:
    """A file system of this host, or one that is mounted on it."""

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; none where there is no directory."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path) and not os.path.islink(path)

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def create(self, path: str) -> BinaryIO:
        """A new file to write to; what is there under this name is an error."""
        return io.BufferedWriter(io.FileIO(path, "x"), _BUFFER_BYTES)

    def finish(self, file: BinaryIO) -> None:
        """Wait until all that was written is on the disk, and close."""
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def discard(self, file: BinaryIO) -> None:
        """Close a file that is not finished, whatever of it is there."""
        with contextlib.suppress(OSError):  # closing writes what is left in the buffer, which may fail again
            file.close()

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def exchange(self, one: str, other: str) -> None:
        """Two directories swap their names at one instant; OSError where the file system cannot."""
        exchange = 2  # RENAME_EXCHANGE of renameat2(2), which Python does not offer
        current_directory = -100
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "renameat2"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), one)
        if libc.renameat2(current_directory, os.fsencode(one), current_directory, os.fsencode(other), exchange):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), one)

    def sync_directory(self, path: str) -> None:
        """Wait until the names in a directory are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def lock(self, path: str, owner: str) -> FileLock:
        """Hold a lock until `unlock` or the end of this process, however it ends.

        Raises `Locked` where another process, or another part of this one, holds it.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_nlink:  # whoever held it has removed it
                raise BlockingIOError
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode(), 0)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
            os.close(descriptor)
            raise Locked(holder) from None
        except BaseException:
            os.close(descriptor)
            raise
        return FileLock(descriptor)

    def unlock(self, lock: FileLock) -> None:
        lock.release()


class FileLock:
    """A lock that this process holds."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor: int | None = descriptor

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked children may hold copies: closing is not enough
            finally:
                os.close(descriptor)


@contextmanager
def written(files: Files, path: str, size_bytes: int = 0) -> Iterator[Any]:
    """Open a new file to write to, which is on the disk at the end; where that fails it may be incomplete.

    Raises `CheckpointError` where the file system refuses, with the file and the size.
    """
    try:
        file = files.create(path)
        try:
            yield file
            files.finish(file)
        except BaseException:
            files.discard(file)
            raise
    except OSError as error:
        raise CheckpointError(in_words(error, path, size_bytes)) from error
