"""A directory to read from: on this host, or behind a URL that fsspec knows."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from shardwright.checkpoint.format.manifest import between
from shardwright.errors import CheckpointError, UsageError

# protocol -> the package that speaks it; fsspec has the others on board
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
# Stores that speak the protocol of S3, at endpoints of their own, and which fsspec does not know by their names.
_SPEAK_S3 = {
    "obs": "https://obs.REGION.myhuaweicloud.com",
    "cos": "https://cos.REGION.myqcloud.com",
    "tos": "https://tos-s3-REGION.volces.com",
    "bos": "https://s3.REGION.bcebos.com",
    "minio": "http://HOST:9000",
    "r2": "https://ACCOUNT.r2.cloudflarestorage.com",
    "b2": "https://s3.REGION.backblazeb2.com",
}


class LocalFile:
    """A file of this host."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers with bytes from ``start`` on; return how many there were, fewer only at the file's end."""
        file, wanted = self._descriptor, sum(map(len, buffers))
        came = count = os.preadv(file, buffers, start)
        while count and came < wanted:
            count = os.preadv(file, between(buffers, came, wanted), start + came)
            came += count
        return came


class RemoteFile:
    """A file behind a URL, of which ``get`` returns a range."""

    def __init__(self, get: Callable[..., bytes]) -> None:
        self._get = get

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> int:
        """As `LocalFile.read_into`."""
        data, came = memoryview(self._get(start=start, end=start + sum(map(len, buffers)))), 0
        for buffer in buffers:
            part = data[came : came + len(buffer)]
            buffer[: len(part)] = part
            came += len(part)
        return came


File = LocalFile | RemoteFile


class Folder:
    """A directory to read from.

    ``where`` is the name that its user gave it. It is best read by ``threads`` threads, in pieces of ``piece_bytes``.
    """

    where: str
    threads: int
    piece_bytes: int

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = os.fspath(where).rstrip("/") or "/"

    def sizes(self) -> dict[str, int]:
        """The files in it with their bytes, hidden ones too; empty where there is no such directory."""
        return {name: size for name, size in self._listed() if size is not None}

    def folders(self) -> list[str]:
        """The directories in it, sorted, without hidden ones."""
        return sorted(name for name, size in self._listed() if size is None and not name.startswith("."))

    def inner(self, name: str) -> Folder:
        return type(self)(f"{self.where.rstrip('/')}/{name}")

    def outer(self) -> Folder:
        raise NotImplementedError

    def open(self, name: str) -> File:
        """A file in it, which is closed when nobody has it any more."""
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        raise NotImplementedError

    def _listed(self) -> list[tuple[str, int | None]]:
        """Each name in it with the bytes of a file, or None for a directory.

        Raises `CheckpointError` where it is there, and cannot be read.
        """
        try:
            return self._entries()
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:  # each protocol has exceptions of its own
            said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self.where} cannot be read: {said}") from error

    def _entries(self) -> list[tuple[str, int | None]]:
        raise NotImplementedError


class LocalFolder(Folder):
    """A directory of this host."""

    threads = 2
    piece_bytes = 1 << 20  # which the cache of a core keeps until their checksums are taken

    def outer(self) -> LocalFolder:
        return LocalFolder(os.path.dirname(os.path.abspath(self.where)))

    def open(self, name: str) -> File:
        return LocalFile(os.path.join(self.where, name))

    def read(self, name: str) -> bytes:
        return Path(self.where, name).read_bytes()

    def _entries(self) -> list[tuple[str, int | None]]:
        with os.scandir(self.where) as found:
            return [(e.name, None if e.is_dir() else e.stat().st_size) for e in found if e.is_dir() or e.is_file()]


class RemoteFolder(Folder):
    """A directory behind a URL."""

    threads = 8
    piece_bytes = 8 << 20  # of one request

    def __init__(self, where: str | os.PathLike[str]) -> None:
        super().__init__(where)
        self.files, self.root = file_system(self.where)

    def outer(self) -> RemoteFolder:
        return RemoteFolder(self.where.rsplit("/", 1)[0])

    def open(self, name: str) -> File:
        return RemoteFile(partial(self._bytes, name))

    def read(self, name: str) -> bytes:
        return self._bytes(name)

    def _entries(self) -> list[tuple[str, int | None]]:
        self.files.invalidate_cache(self.root)
        found = self.files.ls(self.root, detail=True)
        return [(last_part(f["name"]), None if f["type"] == "directory" else int(f["size"])) for f in found]

    def _bytes(self, name: str, **where: int) -> bytes:
        try:
            return bytes(self.files.cat_file(f"{self.root.rstrip('/')}/{name}", **where))
        except OSError:
            raise
        except Exception as error:  # each protocol has exceptions of its own
            raise OSError(f"{type(error).__name__}: {error}") from error


def open_folder(where: str | os.PathLike[str]) -> Folder:
    """The folder at a path or URL; raises as `file_system`."""
    return RemoteFolder(os.fspath(where)) if "://" in os.fspath(where) else LocalFolder(where)


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises `UsageError` for a protocol that is unknown, or whose package is not installed, with what to type.
    """
    protocol, _, path = url.partition("://")
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        remedy = f"type: pip install {PACKAGES[protocol]}" if protocol in PACKAGES else str(error)
        raise UsageError(f"{url}: {protocol}:// needs a package that is not installed; {remedy}") from error
    except ValueError as error:
        if (endpoint := _SPEAK_S3.get(protocol)) is not None:
            raise UsageError(
                f"{url}: {protocol.upper()} speaks the protocol of S3: type s3://{path} with "
                f"FSSPEC_S3_ENDPOINT_URL={endpoint} in the environment, and the key in AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY (pip install s3fs)"
            ) from error
        raise UsageError(f"{url}: expected a path, or a URL such as s3://, gs:// or file://; got {error}") from error
    return files, root


def last_part(path: str) -> str:
    """Return the last part of a path or URL."""
    return path.rstrip("/").rsplit("/", 1)[-1]
