"""The errors of the operating system in words for a person: of which file, how large, and what to type."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from shardwright.common.words import in_bytes

_FULL = "free some, or name a folder of another disk"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "files of this process may not be larger: type `ulimit -f unlimited` in the shell that starts it",
    errno.EMFILE: "type `ulimit -n 65536` in the shell that starts it (or what `ulimit -Hn` allows)",
    errno.ENFILE: "this host has too many open files; end what holds them, or raise the sysctl fs.file-max",
    errno.ENAMETOOLONG: "a name has 255 bytes at most; type a shorter one",
    errno.ENOTDIR: "a part of that path is a file and no folder; name another",
    errno.EEXIST: "a file of that name is there; name another",
    errno.EISDIR: "that is a folder; name a file",
    errno.EACCES: "this user may not; name another path, or change its owner or mode",
    errno.EPERM: "this user may not; name another path, or change its owner or mode",
    errno.EROFS: "nothing can be written there; name a folder of another file system",
}


def in_words(error: OSError, path: str | os.PathLike[str] | None = None, size_bytes: int = 0) -> str:
    """Return what was refused: the file, or ``path`` where the system does not name it, and what to type.

    Where a disk is full it says how much is free, and with ``size_bytes`` how much was to be written.
    """
    name = error.filename if path is None or isinstance(error.filename, str | bytes) else path
    where = _short(os.fsdecode(name)) if isinstance(name, str | bytes | os.PathLike) else ""
    said = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        said += _room(where, size_bytes)
    if error.errno == errno.EMFILE:
        said += f" (this process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where + ': ' if where else ''}{said}{f'; {remedy}' if remedy else ''}"


def is_explained(error: OSError) -> bool:
    """Return whether the error has a remedy that can be typed."""
    return error.errno in _REMEDIES


def _short(name: str) -> str:
    return name if len(name) <= 300 else f"{name[:100]}...{name[-20:]}"


def _room(where: str, size_bytes: int) -> str:
    folder = os.path.abspath(where or ".")
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    known = []
    if size_bytes:
        known.append(f"{in_bytes(size_bytes)} were to be written")
    with contextlib.suppress(OSError):
        usage = os.statvfs(folder)
        known.append(f"{in_bytes(usage.f_bavail * usage.f_frsize)} are free")
        if usage.f_files and not usage.f_favail:
            known.append("no more files")
    return f" ({', '.join(known)})" if known else ""
