"""Files that are there whole, or as they were before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file under a temporary name, then give it its own: nobody ever sees half of it.

    Where it fails, its error is raised, and a file of that name stays what it was. Its folder must be there.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write the same file at once
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
