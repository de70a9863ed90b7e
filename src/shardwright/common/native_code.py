"""Compiles the C sources of this package once per user, and caches the libraries by a hash of the source."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from shardwright.common.private_folder import cache_folder, is_private

_FLAGS = ("-O3", "-fPIC", "-shared", "-std=gnu11")  # for every processor of this kind: hosts may share the folder
_TIMEOUT_S = 60.0


def compiled(source: Path, *flags: str, opens: Callable[[Path], object]) -> Path | None:
    """Return the library of ``source``, which is made where it is not there yet; None where that cannot be done here.

    A library is known by a hash of its source, and of itself: one that was altered or cut is compiled again. One that
    somebody else may have written is not loaded, and a folder where others may write is not used.

    ``flags`` are those that it takes besides the ones of all. What ``opens`` a new one raises `OSError` or
    `AttributeError` where it is none for this machine.
    """
    key = _key(source, flags)
    with contextlib.suppress(OSError, RuntimeError):  # the latter where nobody knows the home of this user
        folder = _folder()
        for path in sorted(folder.glob(f"{key}-*.so")):
            if _is_as_compiled(path):
                return path
        for compiler in _compilers():
            if made := _compile([*compiler, *_FLAGS, *flags, str(source)], folder, key, opens):
                return made
    return None


def _folder() -> Path:
    return cache_folder("native")


def _is_as_compiled(path: Path) -> bool:
    """Return whether a library is private to this user and matches the hash in its name; otherwise remove it."""
    with contextlib.suppress(OSError):
        if is_private(path) and path.name.rpartition("-")[2] == f"{_hash(path.read_bytes())}.so":
            return True
    with contextlib.suppress(OSError):
        path.unlink()
    return False


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _key(source: Path, flags: tuple[str, ...]) -> str:
    told = f"{platform.machine()} {' '.join((*_FLAGS, *flags))}\n".encode() + source.read_bytes()
    return _hash(told)


def _compilers() -> Iterator[tuple[str, ...]]:
    for name in (*os.environ.get("CC", "").split()[:1], "cc", "gcc", "clang"):
        if found := shutil.which(name):
            yield (found,)
    if find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "cc")


def _compile(command: list[str], folder: Path, key: str, opens: Callable[[Path], object]) -> Path | None:
    """Return the library that a compiler has made, in ``folder``; None where it has made none that can be opened."""
    with tempfile.TemporaryDirectory(dir=folder) as drafts:
        draft = Path(drafts) / f"{key}.so"
        try:
            done = subprocess.run([*command, "-o", str(draft)], capture_output=True, timeout=_TIMEOUT_S)
            if done.returncode != 0:
                return None
            draft.chmod(0o700)
            opens(draft)
            path = folder / f"{key}-{_hash(draft.read_bytes())}.so"
            draft.replace(path)
        except (OSError, AttributeError, subprocess.TimeoutExpired):  # a compiler for another machine, or none at all
            return None
        return path
