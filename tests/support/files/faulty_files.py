"""A layer over the file operations that fails or dies at the k-th, and a disk in memory that forgets as disks do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

OPERATIONS = {
    "make_directory", "list", "is_directory", "read", "create", "finish", "rename", "exchange", "sync_directory",
    "remove", "remove_directory", "lock", "unlock", "discard", "write",
}  # fmt: skip


class Killed(BaseException):
    """The process ends here; nothing it would do afterwards happens."""


class Faulty:
    """``files``, of which the ``at``-th operation (counted from 0) calls ``fault`` first, and with ``stays`` all later.

    ``at`` may be a name, for every operation of that name. A write that is the ``at``-th leaves half of its bytes.
    ``done`` lists what was called.
    """

    def __init__(
        self, files: Any, at: int | str | None = None, fault: Callable[[], Any] | None = None, stays: bool = False
    ):
        self.files, self.at, self.fault, self.stays = files, at, fault, stays
        self.done: list[str] = []
        self.locks: list[Any] = []
        self.created: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.step(name)
            arguments = tuple(a.file if isinstance(a, _File) else a for a in arguments)
            result = getattr(self.files, name)(*arguments)
            if name == "lock":
                self.locks.append(result)
            if name == "create":
                self.created.append(result)
                return _File(self, result)
            return result

        return call

    def step(self, name: str) -> None:
        count = len(self.done)
        self.done.append(name)
        if name == self.at or (isinstance(self.at, int) and (count == self.at or (self.stays and count > self.at))):
            self.fault()

    def release(self) -> None:
        """What the end of the process does: files are closed, and locks are free."""
        for file in self.created:
            self.files.discard(file)
        for lock in self.locks:
            self.files.unlock(lock)


class _File:
    def __init__(self, layer: Faulty, file: Any) -> None:
        self.layer, self.file = layer, file

    def write(self, data: Any) -> int:
        if len(self.layer.done) == self.layer.at:
            self.file.write(bytes(data)[: len(data) // 2])
        self.layer.step("write")
        return self.file.write(data)


class _Content:
    def __init__(self) -> None:
        self.now, self.durable = bytearray(), b""

    def write(self, data: Any) -> int:
        self.now += data
        return len(data)


class _Names(dict):
    """A directory; ``durable`` is what of it a crash leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.durable: dict[str, Any] = {}


class Disk:
    """Directories and files in memory. What is not synced may be lost in a crash: see `after_crash`."""

    def __init__(self) -> None:
        self.root = _Names()
        self.locked = False

    def _at(self, path: str) -> Any:
        node = self.root
        for part in filter(None, path.split("/")):
            if not isinstance(node, _Names) or part not in node:
                raise FileNotFoundError(2, "No such file or directory", path)
            node = node[part]
        return node

    def _parent(self, path: str) -> tuple[_Names, str]:
        above, _, name = path.rpartition("/")
        return self._at(above), name

    def make_directory(self, path: str) -> None:
        names, name = self._parent(path)
        if name in names:
            raise FileExistsError(17, "File exists", path)
        names[name] = _Names()

    def list(self, path: str) -> Any:
        try:
            return sorted(self._at(path))
        except FileNotFoundError:
            return []

    def is_directory(self, path: str) -> bool:
        try:
            return isinstance(self._at(path), _Names)
        except FileNotFoundError:
            return False

    def read(self, path: str) -> bytes:
        return bytes(self._at(path).now)

    def create(self, path: str) -> _Content:
        names, name = self._parent(path)
        if name in names:
            raise FileExistsError(17, "File exists", path)
        names[name] = _Content()
        return names[name]

    def finish(self, file: _Content) -> None:
        file.durable = bytes(file.now)

    def discard(self, file: _Content) -> None:
        pass

    def rename(self, old: str, new: str) -> None:
        (source, name), (target, other) = self._parent(old), self._parent(new)
        if isinstance(target.get(other), _Names):
            raise OSError(39, "Directory not empty", new)
        target[other] = source.pop(name)

    def exchange(self, one: str, other: str) -> None:
        (a, x), (b, y) = self._parent(one), self._parent(other)
        a[x], b[y] = b[y], a[x]

    def sync_directory(self, path: str) -> None:
        names = self._at(path)
        names.durable = dict(names)

    def remove(self, path: str) -> None:
        names, name = self._parent(path)
        del names[name]

    def remove_directory(self, path: str) -> None:
        names, name = self._parent(path)
        if names[name]:
            raise OSError(39, "Directory not empty", path)
        del names[name]

    def lock(self, path: str, owner: str) -> object:
        assert not self.locked
        self.locked = True
        return object()

    def unlock(self, lock: object) -> None:
        self.locked = False

    def after_crash(self, keeps: Callable[[], bool]) -> Disk:
        """What is there after the machine failed: of each change that was not synced ``keeps`` says whether it is."""
        left = Disk()
        left.root = _survivor(self.root, keeps)
        return left


def _survivor(node: Any, keeps: Callable[[], bool]) -> Any:
    if isinstance(node, _Content):
        content = _Content()
        content.durable = bytes(node.now) if keeps() else node.durable
        content.now = bytearray(content.durable)
        return content
    names = _Names()
    for name in sorted({*node, *node.durable}):
        now, durable = node.get(name), node.durable.get(name)
        child = now if now is durable or keeps() else durable
        if child is not None:
            names[name] = _survivor(child, keeps)
    names.durable = dict(names)
    return names


def crashes(seeds: int) -> Iterator[Callable[[], bool]]:
    """All unsynced changes kept, none, and random choices."""
    yield lambda: True
    yield lambda: False
    for seed in range(seeds):
        chance = random.Random(seed)
        yield lambda chance=chance: chance.random() < 0.5
