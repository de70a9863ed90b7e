"""Files that go with a job: copied into a fresh folder on each host, which is the ranks' working directory.

The launcher lists them once (`Stage.read`) and sends them over the line to each agent (`orders`), a piece at a time and
only as fast as the line takes them; the agent makes them again (`StagedFiles`).

A relative path keeps its place below the working directory, ``.`` is all that is in it; any other path goes by its last
name. Modes and times are kept, and links are, but for those that the command line names, which are followed.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwright.common.words import in_bytes
from shardwright.errors import UsageError
from shardwright.launch.host.agent_protocol import StageBegin, StageEntry, StageMore
from shardwright.launch.host.stream import encode

_PIECE_BYTES = 1 << 18
_ROOM_BYTES = 1 << 24  # that the job itself needs beside what is staged


@dataclass(frozen=True)
class StagedEntry:
    """A file, folder or link that is staged: it lies at ``source`` here, and is to be at ``path`` on the hosts."""

    path: str
    source: str
    kind: Literal["folder", "file", "link"]
    mode: int
    time_s: float
    size_bytes: int = 0


@dataclass(frozen=True)
class Stage:
    """All staged entries, folders before their content; with ``keep`` the folder stays when the job has ended."""

    entries: tuple[StagedEntry, ...]
    keep: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    @classmethod
    def read(cls, paths: Sequence[str], keep: bool, without: Path) -> Stage | None:
        """Return what ``paths`` name, None for no paths; ``without``, where the logs are, is left out.

        Raises `UsageError` for what is not there, cannot be read, cannot be copied, or has the place of another.
        """
        if not paths:
            if keep:
                raise UsageError("--keep-stage is for what --stage copies; type --stage PATH too")
            return None
        by_path: dict[str, StagedEntry] = {}
        for path in paths:
            place = _place(path)
            for entry in _walk(os.path.realpath(path), place, os.path.realpath(without), f"--stage {path}"):
                other = by_path.setdefault(entry.path, entry)
                if other.source != entry.source and not other.kind == entry.kind == "folder":
                    raise UsageError(f"--stage {path}: {entry.source} and {other.source} would both be {entry.path}")
        entries = [*by_path.values(), *_parents(by_path)]
        return cls(tuple(sorted(entries, key=lambda entry: Path(entry.path).parts)), keep)

    def orders(self) -> Iterator[bytes]:
        """Yield the orders for an agent, in pieces.

        Files are read as the pieces are taken; one that has vanished raises `OSError`.
        """
        yield encode(StageBegin(self.size_bytes, len(self.entries), self.keep))
        for entry in self.entries:
            order = StageEntry(entry.path, entry.kind, entry.mode, entry.time_s)
            if entry.kind == "link":
                yield encode(order._replace(target=os.readlink(entry.source)))
            elif entry.kind == "folder":
                yield encode(order)
            else:
                with open(entry.source, "rb") as file:
                    yield encode(order._replace(data=file.read(_PIECE_BYTES)))
                    while piece := file.read(_PIECE_BYTES):
                        yield encode(StageMore(piece))


def _place(path: str) -> str:
    """Return where a path of the command line goes, in the folder on the hosts."""
    normal = os.path.normpath(path)
    if os.path.isabs(normal) or normal.startswith(os.pardir):
        return os.path.basename(os.path.realpath(path) if normal.endswith(os.pardir) else normal)
    return "" if normal == os.curdir else normal


def _walk(source: str, place: str, without: str, words: str) -> Iterator[StagedEntry]:
    try:
        status = os.lstat(source)
        if stat.S_ISDIR(status.st_mode):
            if place:
                yield StagedEntry(place, source, "folder", stat.S_IMODE(status.st_mode) & 0o777, status.st_mtime)
            for name in sorted(os.listdir(source)):
                below = os.path.join(source, name)
                if below != without:
                    yield from _walk(below, os.path.join(place, name), without, words)
        elif stat.S_ISREG(status.st_mode):
            if not os.access(source, os.R_OK):
                raise PermissionError(13, "Permission denied", source)
            mode = stat.S_IMODE(status.st_mode) & 0o777
            yield StagedEntry(place, source, "file", mode, status.st_mtime, status.st_size)
        elif stat.S_ISLNK(status.st_mode):
            yield StagedEntry(place, source, "link", 0o777, status.st_mtime)
        else:
            raise UsageError(f"{words}: {source} is no file, folder or link; name what is to be copied more closely")
    except OSError as error:
        raise UsageError(f"{words}: {error.filename or source} cannot be read: {error.strerror}") from None


def _parents(staged: Mapping[str, StagedEntry]) -> Iterator[StagedEntry]:
    """Yield the folders that are not staged themselves, but have in them what is, as they are here."""
    above = {str(parent) for path in staged for parent in Path(path).parents} - {os.curdir} - staged.keys()
    for path in above:
        status = os.stat(path)
        yield StagedEntry(path, os.path.realpath(path), "folder", stat.S_IMODE(status.st_mode) & 0o777, status.st_mtime)


class StagedFiles:
    """The staged files that have come to a host; ``problems`` says why they cannot be used. Raises nothing."""

    def __init__(self, order: StageBegin, scratch: Path) -> None:
        self.keep = order.keep
        self.problems: list[str] = []
        self.folder = scratch / "staged"
        self._file: int | None = None
        self._folders: list[tuple[Path, int]] = []
        usage = os.statvfs(scratch)
        room_bytes = usage.f_bavail * usage.f_frsize
        if room_bytes < order.size_bytes + _ROOM_BYTES or (usage.f_files and usage.f_favail < order.entries):
            self.problems.append(
                f"{in_bytes(order.size_bytes)} in {order.entries} files and folders are to be staged to "
                f"{scratch.parent} there, which has room for {in_bytes(max(0, room_bytes - _ROOM_BYTES))} and "
                f"{usage.f_favail} files; make room, or set TMPDIR in the shell's start file"
            )
            return
        try:
            if self.keep:
                self.folder = Path(tempfile.mkdtemp(prefix="shardwright-staged-"))
            else:
                self.folder.mkdir()
        except OSError as error:
            self._give_up(error)

    def take(self, order: StageEntry | StageMore) -> None:
        """Write a file, a folder, a link or a piece."""
        if self.problems:
            return
        try:
            if isinstance(order, StageEntry):
                self._close_file()
                self._make(order)
            if self._file is not None:
                left = memoryview(order.data)
                while left:
                    left = left[os.write(self._file, left) :]
        except OSError as error:
            self._give_up(error)

    def _make(self, order: StageEntry) -> None:
        path = self.folder / order.path
        if order.kind == "folder":
            path.mkdir()
            self._folders.append((path, order.mode))
        elif order.kind == "link":
            path.symlink_to(order.target)
        else:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.fchmod(self._file, order.mode)
            self._time_s = order.time_s

    def finish(self) -> None:
        """Give the folders their modes, once everything has come: they may be such that nobody may write to them."""
        try:
            self._close_file()
            for path, mode in reversed(self._folders):
                path.chmod(mode)
        except OSError as error:
            self._give_up(error)

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.utime(file, (self._time_s, self._time_s))
            finally:
                os.close(file)

    def _give_up(self, error: OSError) -> None:
        what = error.filename or self.folder
        self.problems.append(f"what is staged cannot be written to {what} there: {error.strerror}; make room for it")
