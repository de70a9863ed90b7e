"""Atomic writes: a file has its complete new contents, or is as it was before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[tuple[Path, ...]]:
    """Make a folder and those above it that lack; where the body fails, those that were made are removed if empty.

    They are given, the innermost first.
    """
    lacking = tuple(path for path in (folder, *folder.parents) if not path.exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield lacking
    except BaseException:
        remove_empty(lacking)
        raise


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first, as far as nothing is in them."""
    with contextlib.suppress(OSError):
        for path in folders:
            path.rmdir()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path, then rename the file to ``path``: no reader sees an incomplete file.

    Where it fails, its error is raised, and a file of that name stays what it was. Its folder must be there.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write the same file at once
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        if error.filename is None or error.filename == str(draft):  # a full disk does not say which file it was
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
