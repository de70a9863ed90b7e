"""A directory of checkpoints.

::

    DIR/latest                              one line: the name of the checkpoint saved last
    DIR/step-00000100/checkpoint.json       the manifest; a directory without a valid one is no checkpoint
    DIR/step-00000100/.metadata, __R_0.distcp ...
    DIR/.saving-step-00000200-NONCE/        a save under way, or what is left of one that died
    DIR/.removing-step-00000050-NONCE/      an old one on its way out
    DIR/.lock                               held while a save is under way

The order of a save is: write under the hidden name, fsync every file, fsync the directory, rename, fsync ``DIR``, move
``latest`` (written anew and renamed, too), remove what the retention gives up. So at every instant what ``latest``
names is complete; where ``latest`` itself is lost, the checkpoint with the highest ``sequence`` in its manifest is it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwright.checkpoint.format.manifest import LATEST, MANIFEST, Manifest
from shardwright.checkpoint.storage.files import Files, LocalFiles, Locked, written
from shardwright.common.system_errors import in_words
from shardwright.errors import CheckpointError

LOCK = ".lock"
SAVING = ".saving-"
REMOVING = ".removing-"


@dataclass(frozen=True)
class Retention:
    """Keep the ``latest_k`` newest checkpoints, and beside them the ``top_k`` best by ``metric``.

    ``mode`` says whether ``"min"`` or ``"max"`` is best. The metric is looked up in ``info["metrics"]`` of each
    manifest; a checkpoint without it, or with nan, is none of the best. With neither number all are kept.
    """

    latest_k: int | None = None
    top_k: int | None = None
    metric: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        for name, number in (("latest_k", self.latest_k), ("top_k", self.top_k)):
            if number is not None and number < 1:
                raise CheckpointError(f"{name}={number}: keep at least 1, or give None to keep all")
        if (self.top_k is None) != (self.metric is None):
            raise CheckpointError(
                f"top_k={self.top_k} with metric={self.metric!r}: a metric tells the best, so give both or neither"
            )
        if self.mode not in ("min", "max"):
            raise CheckpointError(f"mode={self.mode!r}: say whether 'min' or 'max' is best")

    @property
    def keeps_all(self) -> bool:
        return self.latest_k is None and self.top_k is None

    def given_up(self, complete: Mapping[str, Manifest], newest: str) -> Sequence[str]:
        """Return which of the complete checkpoints, oldest first, go now that ``newest`` stands."""
        if self.keeps_all:
            return []
        kept = {newest, *list(complete)[-(self.latest_k or 1) :], *self.best(complete)}
        return [name for name in complete if name not in kept]

    def best(self, complete: Mapping[str, Manifest]) -> Sequence[str]:
        """The best by the metric, the best one first; of equals the newer one is better."""
        scores = {
            name: float(manifest.info.get("metrics", {}).get(self.metric, "nan")) for name, manifest in complete.items()
        }
        sign = 1 if self.mode == "min" else -1
        newest_first = [name for name in reversed(list(complete)) if not math.isnan(scores[name])]
        return sorted(newest_first, key=lambda name: sign * scores[name])[: self.top_k or 0]


KEEP_ALL = Retention()


@dataclass(frozen=True)
class Save:
    """A save under way, as rank 0 knows it; ``directory`` is where the ranks write their files."""

    name: str
    directory: str
    nonce: str
    sequence: int
    lock: Any = field(repr=False)


class Store:
    """The checkpoints in one directory. Only rank 0 changes it; every rank may read.

    ``retention`` says which old checkpoints a new one displaces.
    """

    def __init__(self, directory: str | Path, files: Files | None = None, retention: Retention = KEEP_ALL) -> None:
        self._made: list[str] = []
        self.directory = str(directory).rstrip("/") or "/"
        self.files: Files = LocalFiles() if files is None else files
        self.retention = retention

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def manifest(self, name: str) -> Manifest:
        """The manifest of a checkpoint; raises `CheckpointError` where there is none, or it is damaged."""
        path = f"{self.path(name)}/{MANIFEST}"
        try:
            return Manifest.from_text(self.files.read(path), path)
        except OSError as error:
            raise CheckpointError(f"{self.path(name)} is no complete checkpoint: {in_words(error)}") from error

    def complete(self) -> dict[str, Manifest]:
        """Every checkpoint with a valid manifest, the one saved first at the beginning."""
        found = {}
        for name in self.files.list(self.directory):
            if not name.startswith(".") and self.files.is_directory(self.path(name)):
                with contextlib.suppress(CheckpointError):
                    found[name] = self.manifest(name)
        return dict(sorted(found.items(), key=lambda item: (_sequence(item[1]), _saved(item[1]), item[0])))

    def latest(self) -> str | None:
        """The name of the newest complete checkpoint, None where there is none.

        That is what the pointer says; where the pointer is missing, damaged or names what is not complete, all
        manifests are read.
        """
        return next(reversed(self._newest()), None)

    def _newest(self) -> dict[str, Manifest]:
        """The newest complete checkpoint with its manifest, the last entry; nothing where there is none."""
        with contextlib.suppress(OSError, CheckpointError, UnicodeDecodeError):
            name = self.files.read(self.path(LATEST)).decode().removesuffix("\n")
            if _is_name(name):
                return {name: self.manifest(name)}
        return self.complete()

    def begin(self, name: str) -> Save:
        """Make room for a checkpoint: take the lock, remove what dead saves left, make the directory to write into.

        Raises `CheckpointError` where the name cannot be one, another save is under way, or the file system refuses.
        """
        if not _is_name(name):
            raise CheckpointError(
                f"{name!r} cannot be the name of a checkpoint: it would be a directory in {self.directory}, not hidden "
                f"and not called {LATEST}; for example step-00000100"
            )
        with self._refusing(f"cannot begin to save {self.path(name)}"):
            self._made = []
            try:
                self._make_directories(self.directory)
                lock = self._lock()
            except BaseException:
                self._remove_made()
                raise
            try:
                self._remove_leftovers()
                nonce = secrets.token_hex(4)
                sequence = 1 + max(map(_sequence, self._newest().values()), default=0)
                directory = self._make_room(name, nonce)
            except BaseException:
                self._remove_made()
                self.files.unlock(lock)
                raise
        return Save(name, directory, nonce, sequence, lock)

    def write(self, save: Save, name: str, data: bytes) -> None:
        """Write a small file of the checkpoint, to the disk."""
        self._write(f"{save.directory}/{name}", data)

    def commit(self, save: Save, manifest: Manifest) -> None:
        """Make the save a checkpoint, the latest; then remove those that the retention gives up.

        Raises `CheckpointError` where the file system refuses; what ``latest`` named before is still there.
        """
        with self._refusing(f"cannot complete {self.path(save.name)}"):
            self.write(save, MANIFEST, manifest.to_text().encode())
            self._publish(save)
            self._point(save)
        self._retire(save)
        self._unlock(save)

    def abort(self, save: Save) -> None:
        """Take back what was written; what cannot be removed now, the next save removes."""
        with contextlib.suppress(Exception):
            self._remove_tree(save.directory)
        self._remove_made()
        self._unlock(save)

    def _unlock(self, save: Save) -> None:
        with contextlib.suppress(Exception):  # the lock ends with the process at the latest
            self.files.unlock(save.lock)

    def _make_room(self, name: str, nonce: str) -> str:
        directory = self.path(f"{SAVING}{name}-{nonce}")
        self.files.make_directory(directory)
        return directory

    def _publish(self, save: Save) -> None:
        """Give what was written its name; what had that name before has now the hidden one."""
        final = self.path(save.name)
        self.files.sync_directory(save.directory)
        if self.files.is_directory(final):
            self._exchange(save.directory, final)
        else:
            self.files.rename(save.directory, final)
        self.files.sync_directory(self.directory)

    def _exchange(self, new: str, final: str) -> None:
        try:
            self.files.exchange(new, final)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                raise
            raise CheckpointError(
                f"{final} is there already, and its file system cannot exchange two directories at one instant; "
                "remove it, or save under another name"
            ) from error

    def _point(self, save: Save) -> None:
        pointer = self.path(f".{LATEST}-{save.nonce}")
        self._write(pointer, f"{save.name}\n".encode())
        self.files.rename(pointer, self.path(LATEST))
        self.files.sync_directory(self.directory)

    def _write(self, path: str, data: bytes) -> None:
        with written(self.files, path) as file:
            file.write(data)

    def _retire(self, save: Save) -> None:
        """Remove what is no longer wanted. The new checkpoint stands already: a failure here is a warning."""
        try:
            self._remove_replaced(save)
            everything = {} if self.retention.keeps_all else self.complete()
            for name in self.retention.given_up(everything, save.name):
                self._give_up(name, save.nonce)
        except OSError as error:
            warnings.warn(
                f"{self.path(save.name)} is saved, but an older checkpoint could not be removed: {in_words(error)}",
                stacklevel=2,
            )

    def _remove_replaced(self, save: Save) -> None:
        """Remove what an exchange has put under the hidden name."""
        if self.files.is_directory(save.directory):
            self._remove_tree(save.directory)

    def _give_up(self, name: str, nonce: str) -> None:
        """Remove a checkpoint, which from the first instant on is none."""
        going = self.path(f"{REMOVING}{name}-{nonce}")
        self.files.rename(self.path(name), going)
        self.files.sync_directory(self.directory)
        self._remove_tree(going)

    def _make_directories(self, path: str) -> None:
        """Make the directory and those above it, as far as they lack, and see to it that a crash leaves them."""
        if not path or self.files.is_directory(path):
            return
        parent = path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
        self._make_directories(parent)
        with contextlib.suppress(FileExistsError):  # another process was as fast
            self.files.make_directory(path)
            self._made.append(path)
        self.files.sync_directory(parent)

    def _remove_made(self) -> None:
        """Remove the directories that this save has made, and its lock, which it holds, where nothing else is there."""
        with contextlib.suppress(Exception):
            if self._made and self.files.list(self._made[-1]) in ([], [LOCK]):
                with contextlib.suppress(FileNotFoundError):
                    self.files.remove(self.path(LOCK))
                for path in reversed(self._made):
                    self.files.remove_directory(path)

    def _remove_leftovers(self) -> None:
        """Remove what saves that died have left. The lock is held, so that none of it belongs to one that lives."""
        for name in self.files.list(self.directory):
            if name.startswith((SAVING, REMOVING)):
                self._remove_tree(self.path(name))
            elif name.startswith(f".{LATEST}-"):
                self.files.remove(self.path(name))

    def _remove_tree(self, path: str) -> None:
        for name in self.files.list(path):
            inner = f"{path}/{name}"
            if self.files.is_directory(inner):
                self._remove_tree(inner)
            else:
                self.files.remove(inner)
        self.files.remove_directory(path)

    def _lock(self) -> Any:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            return self.files.lock(
                self.path(LOCK), f"process {os.getpid()} on host {socket.gethostname()}, since {now}"
            )
        except Locked as locked:
            raise CheckpointError(
                f"another save into {self.directory} is under way, by {locked or 'a process that left no name'}. "
                "Two jobs must not save into one directory: give this one another, or wait until the other has ended"
            ) from None

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{what}: {in_words(error)}") from error


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and not name.startswith(".") and name != LATEST and name.isprintable()


def _sequence(manifest: Manifest) -> int:
    return int(manifest.info.get("sequence", 0))


def _saved(manifest: Manifest) -> str:
    return str(manifest.info.get("saved", ""))
