"""Checkpoints behind a URL that fsspec knows, where nothing is renamed: ``s3://``, ``gs://``, ``memory://``.

The objects of a checkpoint are written under their final names, its manifest last, then the pointer. A checkpoint
begins with an object ``.saving`` and loses it when it is complete, so that what a dead save left can be told from what
others keep beside the checkpoints. One is removed beginning with its manifest.

A lock that ends with its holder does not exist here; instead the holder writes the object ``.lock`` anew every few
seconds, and who finds one waits for as long as the lease to see whether it changes. Of several who saw it unchanged one
takes its place: who holds another lock, named by what was left. A holder that stood still for longer than the lease
finds that the lock is no longer its own before its checkpoint would count.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from shardwright.checkpoint.format.manifest import LATEST, MANIFEST, Manifest
from shardwright.checkpoint.storage.files import Locked
from shardwright.checkpoint.storage.folders import file_system
from shardwright.checkpoint.storage.store import KEEP_ALL, LOCK, Retention, Save, Store
from shardwright.common.threads import Thread
from shardwright.errors import CheckpointError

MARK = ".saving"
LEASE_S = 30.0
_LOOKS = 30  # at a lock, within a lease


def open_store(where: str | Path, retention: Retention = KEEP_ALL) -> Store:
    """The store at a path or URL; raises as `file_system`."""
    if "://" not in str(where):
        return Store(where, retention=retention)
    system, root = file_system(str(where))
    return ObjectStore(root, ObjectFiles(system), retention)


class ObjectStore(Store):
    """A store whose files are objects.

    Two objects cannot be exchanged at one instant: a checkpoint replaces one of the same name only where another
    complete one stays beside it.
    """

    def _make_room(self, name: str, nonce: str) -> str:
        directory = self.path(name)
        complete = self.complete()
        if list(complete) == [name]:
            raise CheckpointError(
                f"{directory} is there already, and is the only complete checkpoint here: objects cannot be replaced "
                "at one instant; save under another name, or remove it first"
            )
        self._remove_objects(directory)
        self.files.make_directory(directory)
        try:
            self._write(f"{directory}/{MARK}", f"{nonce}\n".encode())
        except Exception:
            with contextlib.suppress(Exception):
                self._remove_objects(directory)
            raise
        return directory

    def commit(self, save: Save, manifest: Manifest) -> None:
        if not save.lock.is_held() or not {*manifest.files} <= {*self.files.list(save.directory)}:
            raise CheckpointError(
                f"cannot complete {self.path(save.name)}: this process stood still for so long that another save took "
                f"over the lock of {self.directory}, and what was written here does not count; give each job a "
                "directory of its own, or save again when the other has ended"
            )
        super().commit(save, manifest)

    def _publish(self, save: Save) -> None:
        """Nothing to do: with its manifest it is there."""

    def _point(self, save: Save) -> None:
        self._write(self.path(LATEST), f"{save.name}\n".encode())
        self.files.remove(f"{save.directory}/{MARK}")

    def abort(self, save: Save) -> None:
        with contextlib.suppress(Exception):
            if save.lock.is_held():  # else who has it now may be writing there, or has removed it
                self._remove_objects(save.directory)
        self._unlock(save)

    def _remove_replaced(self, save: Save) -> None:
        """Nothing to do: it went first."""

    def _give_up(self, name: str, nonce: str) -> None:
        self._write(f"{self.path(name)}/{MARK}", f"{nonce}\n".encode())
        self._remove_objects(self.path(name))

    def _remove_leftovers(self) -> None:
        for name in self.files.list(self.directory):
            if name.startswith(f"{LOCK}-"):
                with contextlib.suppress(FileNotFoundError):  # who has made it may have seen that it came too late
                    self.files.remove(self.path(name))
            if MARK not in self.files.list(self.path(name)):
                continue
            try:
                self.manifest(name)
            except CheckpointError:
                self._remove_objects(self.path(name))
            else:
                self.files.remove(f"{self.path(name)}/{MARK}")

    def _remove_objects(self, path: str) -> None:
        """Remove a checkpoint: its manifest first, the mark last, so that what a crash leaves is seen to be one."""
        order = {MANIFEST: 0, MARK: 2}
        for name in sorted(self.files.list(path), key=lambda name: order.get(name, 1)):
            self.files.remove(f"{path}/{name}")
        self.files.remove_directory(path)


class ObjectFiles:
    """The objects of an fsspec file system."""

    def __init__(self, system: Any, lease_s: float = LEASE_S) -> None:
        self.system = system
        self.lease_s = lease_s

    def make_directory(self, path: str) -> None:
        self.system.makedirs(path, exist_ok=True)

    def list(self, path: str) -> Any:
        self.system.invalidate_cache(path)
        try:
            found = self.system.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != path.rstrip("/"))

    def is_directory(self, path: str) -> bool:
        return bool(self.system.isdir(path))

    def read(self, path: str) -> bytes:
        return bytes(self.system.cat_file(path))

    def read_if_there(self, path: str) -> bytes:
        """Nothing where there is no such object, or no more."""
        try:
            return self.read(path)
        except FileNotFoundError:
            return b""

    def create(self, path: str) -> Any:
        return self.system.open(path, "wb")

    def finish(self, file: Any) -> None:
        file.close()

    def discard(self, file: Any) -> None:
        """Let go of what is half written; if an object comes of it, the checkpoint has no manifest that names it."""
        with contextlib.suppress(Exception):
            file.close()

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("objects are not renamed")

    exchange = rename

    def sync_directory(self, path: str) -> None:
        """Nothing to do: an object is there when it is closed."""

    def remove(self, path: str) -> None:
        self.system.rm_file(path)

    def remove_directory(self, path: str) -> None:
        with contextlib.suppress(Exception):  # most know no directories; an empty one does no harm
            self.system.rmdir(path)

    def lock(self, path: str, owner: str) -> ObjectLock:
        """Hold a lock until `unlock`, or until the lease after the end of this process is over.

        Raises `Locked` where another holds it.
        """
        left = self._left(path)
        lock = ObjectLock(self, path, owner)
        if left is None:
            lock.begin()
        else:
            self._take_over(lock, left)
        if not lock.is_held():
            raise Locked(_owner(self.read_if_there(path)))
        lock.thread.start()
        return lock

    def unlock(self, lock: ObjectLock) -> None:
        lock.stop()
        if lock.is_held():
            with contextlib.suppress(FileNotFoundError):
                self.remove(lock.path)

    def _take_over(self, lock: ObjectLock, left: bytes) -> None:
        """Write a lock in the place of one whose holder is gone, unless another has done so since it was seen.

        Who may is decided by a lock of its own, which only those want who saw the same.
        """
        claim = self.lock(f"{lock.path}-{_nonce(left) or 'empty'}", lock.owner)
        try:
            if (found := self.read(lock.path)) != left:
                raise Locked(_owner(found))
            lock.beat()
        except FileNotFoundError:  # another took it, and has ended its save already
            raise Locked(_owner(left)) from None
        finally:
            self.unlock(claim)

    def _left(self, path: str) -> bytes | None:
        """Return what a holder that is gone has left of its lock; None where there is none.

        What counts is how often it was looked at, and not the clock: while this host stood still, so may have the
        holder. An object that is empty is one that a file system is just writing.

        Raises `Locked` where it has changed meanwhile.
        """
        seen = b""
        for look in range(_LOOKS + 1):
            if look:
                time.sleep(self.lease_s / _LOOKS)
            try:
                found = self.read(path)
            except FileNotFoundError:
                return None
            if seen and found and found != seen:
                raise Locked(_owner(found))
            seen = found or seen
        return seen


class ObjectLock:
    """The object ``.lock`` that this process holds, and the thread that keeps it fresh."""

    def __init__(self, files: ObjectFiles, path: str, owner: str) -> None:
        self.files, self.path, self.owner = files, path, owner
        self._nonce = secrets.token_hex(4)
        self._beats = itertools.count()
        self._ended = threading.Event()
        self._at_it = threading.Lock()  # a file is empty for an instant while it is written
        self.thread = Thread(self._keep, "checkpoint lock", daemon=True)

    def begin(self) -> None:
        """Write it for the first time, where there is none.

        Raises `Locked` where another was as fast: most stores refuse to create an object that is there.
        """
        try:
            self.files.system.pipe_file(self.path, self._said(), mode="create")
        except FileExistsError:
            raise Locked(_owner(self.files.read_if_there(self.path))) from None

    def beat(self) -> None:
        with self._at_it:
            self.files.system.pipe_file(self.path, self._said())

    def is_held(self) -> bool:
        return self._there() == self._nonce

    def stop(self) -> None:
        """Write it no more, as if the process had ended."""
        self._ended.set()
        if self.thread.is_alive():
            self.thread.join()

    def _said(self) -> bytes:
        return f"{self.owner}\n{self._nonce} {next(self._beats)}\n".encode()

    def _keep(self) -> None:
        while not self._ended.wait(self.files.lease_s / 6):
            with contextlib.suppress(Exception):  # one beat that fails is made up for by the next
                if self._there() not in ("", self._nonce):
                    return
                self.beat()

    def _there(self) -> str:
        """Return the lock that is there; nothing for none, or for an empty one, as a beat leaves that fails."""
        with self._at_it:
            return _nonce(self.files.read_if_there(self.path))


def _nonce(written: bytes) -> str:
    return written.decode(errors="replace").partition("\n")[2].partition(" ")[0]


def _owner(written: bytes) -> str:
    return written.decode(errors="replace").partition("\n")[0]
