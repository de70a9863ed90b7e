"""Removing what a job leaves on a host. The supervisor needs this alone of what `stage` and its modules do.

What `multiprocessing` makes in a folder of its own (``/tmp/pymp-...``) for sockets of loaders stays where a process is
killed. So the ranks of a host are given one folder for it, which their supervisor removes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

TEMPORARY_VARIABLE = "SHARDWRIGHT_TEMPORARY"
"""Tells a rank of the folder for temporary files of `multiprocessing`."""


def make_temporary(of_ranks: Iterable[dict[str, str]]) -> Path | None:
    """Return a new folder for ranks, of whose variables one names it; None where it cannot be made."""
    with contextlib.suppress(OSError):
        folder = Path(tempfile.mkdtemp(prefix="shardwright-"))  # short, since names of sockets have 107 bytes
        for variables in of_ranks:
            variables[TEMPORARY_VARIABLE] = os.fspath(folder)
        return folder
    return None


def use_temporary(environment: Mapping[str, str]) -> None:
    """Have `multiprocessing` use the folder that this rank was given, here and in processes that are started here."""
    folder = environment.get(TEMPORARY_VARIABLE)
    if folder is not None and os.path.isdir(folder):
        process = multiprocessing.current_process()
        process._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]  # there is no other way to say it


def remove_folder(path: Path) -> None:
    """Remove a folder, also where somebody has taken away the right to write to what is in it. Never raises."""
    for folder, names, _ in os.walk(path):
        for name in names:
            below = os.path.join(folder, name)
            if not os.path.islink(below) and not os.access(below, os.W_OK | os.X_OK):
                os.chmod(below, 0o700)
    shutil.rmtree(path, ignore_errors=True)
