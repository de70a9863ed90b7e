"""A directory to read from: on this host, or behind a URL that fsspec knows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec

from shardwright.errors import CheckpointError, UsageError
from shardwright.pulse import own_pulse

PIECE_BYTES = 1 << 20
"""So much of a local file is read at once, which the cache of a core keeps until its checksums are taken."""

# protocol -> the package that speaks it; fsspec has the others on board
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


class Folder(Protocol):
    """A directory to read from. ``where`` is how its user calls it."""

    where: str
    threads: int

    def sizes(self) -> dict[str, int]:
        """The files in it with their bytes, hidden ones too; empty where there is no such directory."""

    def folders(self) -> list[str]:
        """The directories in it, sorted, without hidden ones."""

    def inner(self, name: str) -> Folder: ...

    def outer(self) -> Folder: ...

    def read_into(self, name: str, start: int, *buffers: memoryview) -> Iterator[int]:
        """Fill one buffer after the other with what stands in a file from byte ``start`` on; how many bytes have come,
        after each piece of them.
        """

    def read(self, name: str) -> bytes: ...


class LocalFolder:
    """A directory of this host."""

    threads = 2

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = os.fspath(where).rstrip("/") or "/"

    def sizes(self) -> dict[str, int]:
        try:
            with os.scandir(self.where) as found:
                return {entry.name: entry.stat().st_size for entry in found if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise CheckpointError(f"{self.where} cannot be read: {error.strerror}") from error

    def folders(self) -> list[str]:
        try:
            with os.scandir(self.where) as found:
                return sorted(entry.name for entry in found if entry.is_dir() and not entry.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{self.where} cannot be read: {error.strerror}") from error

    def inner(self, name: str) -> LocalFolder:
        return LocalFolder(os.path.join(self.where, name))

    def outer(self) -> LocalFolder:
        return LocalFolder(os.path.dirname(os.path.abspath(self.where)))

    def read_into(self, name: str, start: int, *buffers: memoryview) -> Iterator[int]:
        descriptor = os.open(os.path.join(self.where, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            done, pulse = 0, own_pulse()
            for buffer in buffers:
                while buffer:
                    count = os.preadv(descriptor, [buffer[:PIECE_BYTES]], start + done)
                    if not count:
                        return
                    pulse.beat()
                    buffer, done = buffer[count:], done + count
                    yield done
        finally:
            os.close(descriptor)

    def read(self, name: str) -> bytes:
        return Path(self.where, name).read_bytes()


class RemoteFolder:
    """A directory behind a URL."""

    threads = 8

    def __init__(self, where: str) -> None:
        self.where = where.rstrip("/")
        self.files, self.root = file_system(self.where)

    def _listing(self) -> list[dict[str, Any]]:
        self.files.invalidate_cache(self.root)
        try:
            return list(self.files.ls(self.root, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:  # each protocol has exceptions of its own
            raise CheckpointError(f"{self.where} cannot be read: {type(error).__name__}: {error}") from error

    def sizes(self) -> dict[str, int]:
        return {last_part(f["name"]): int(f["size"]) for f in self._listing() if f["type"] == "file"}

    def folders(self) -> list[str]:
        names = (last_part(f["name"]) for f in self._listing() if f["type"] == "directory")
        return sorted(name for name in names if not name.startswith("."))

    def inner(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.where}/{name}")

    def outer(self) -> RemoteFolder:
        return RemoteFolder(self.where.rsplit("/", 1)[0])

    def read_into(self, name: str, start: int, *buffers: memoryview) -> Iterator[int]:
        size = sum(map(len, buffers))
        data = memoryview(self._bytes(name, start=start, end=start + size))
        own_pulse().beat()
        rest = data
        for buffer in buffers:
            part, rest = rest[: len(buffer)], rest[len(buffer) :]
            buffer[: len(part)] = part
        yield len(data)

    def read(self, name: str) -> bytes:
        return self._bytes(name)

    def _bytes(self, name: str, **where: int) -> bytes:
        try:
            return bytes(self.files.cat_file(f"{self.root.rstrip('/')}/{name}", **where))
        except OSError:
            raise
        except Exception as error:  # each protocol has exceptions of its own
            raise OSError(f"{type(error).__name__}: {error}") from error


def open_folder(where: str | os.PathLike[str]) -> Folder:
    """The folder at a path or URL.

    Raises:
        UsageError: for a protocol that is unknown or whose package is not installed.
    """
    return RemoteFolder(os.fspath(where)) if "://" in os.fspath(where) else LocalFolder(where)


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    protocol = url.split("://")[0]
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        remedy = f"type: pip install {_PACKAGES[protocol]}" if protocol in _PACKAGES else str(error)
        raise UsageError(f"{url}: {protocol}:// needs a package that is not installed; {remedy}") from error
    except ValueError as error:
        raise UsageError(f"{url}: expected a path, or a URL such as s3://, gs:// or file://; got {error}") from error
    return files, root


def last_part(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
