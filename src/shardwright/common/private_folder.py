"""Folders and files that only this user, or root, can have written.

The owner and the mode decide, as for ssh's own files; a link is looked at where it leads.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
TOP = Path("/tmp")
"""Has the folder of each user, whatever TMPDIR is in the shell that looks for it."""


def own_folder() -> Path:
    """Return the folder of this user in ``/tmp``, which `make_private` makes."""
    return TOP / f"shardwright-{os.getuid()}"


def cache_folder(name: str) -> Path:
    """Return the folder ``name`` in the cache of this user, made; in `own_folder` where strangers may write to that.

    Raises:
        OSError: where it cannot be made.
        RuntimeError: where nobody knows the home of this user.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_private(folder):
        return folder
    folder = own_folder() / name
    make_private(folder)
    return folder


def make_private(folder: Path) -> None:
    """Create ``folder`` and its parent for this user alone. Raises `OSError` where another user created them."""
    for path in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{path} is not a folder of this user; somebody else has made it")
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)


def is_private(path: Path) -> bool:
    """Return whether this user owns the file or folder, and nobody else can write to it or put another in its place.

    Raises:
        OSError: where it is not there, or may not be looked at.
    """
    path = path.resolve(strict=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS_WRITE:
        return False
    return all(_keeps_names(folder.stat()) for folder in path.parents)


def _keeps_names(folder: os.stat_result) -> bool:
    """Return whether no stranger can rename what others have in a folder; in one as ``/tmp`` (sticky) its owner can."""
    return folder.st_uid in (0, os.getuid()) and (
        not folder.st_mode & _OTHERS_WRITE or bool(folder.st_mode & stat.S_ISVTX)
    )
