"""Compiles the C that comes with this package, once for each user, and keeps it by what stands in it."""

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

_FLAGS = ("-O3", "-fPIC", "-shared", "-std=gnu11")  # for every processor of this kind: hosts may share the folder
_TIMEOUT_S = 60.0


def compiled(source: Path, *flags: str, opens: Callable[[Path], object]) -> Path | None:
    """The library of ``source``, which is made where it is not there yet; None where that cannot be done here.

    ``flags`` are those that it takes besides the ones of all. What ``opens`` a new one raises `OSError` or
    `AttributeError` where it is none for this machine.
    """
    with contextlib.suppress(OSError, RuntimeError):  # the latter where nobody knows the home of this user
        path = _folder() / f"{_key(source, flags)}.so"
        if path.exists():
            return path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for compiler in _compilers():
            if _compile([*compiler, *_FLAGS, *flags, str(source)], path, opens):
                return path
    return None


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright" / "native"


def _key(source: Path, flags: tuple[str, ...]) -> str:
    told = f"{platform.machine()} {' '.join((*_FLAGS, *flags))}\n".encode() + source.read_bytes()
    return hashlib.sha256(told).hexdigest()[:16]


def _compilers() -> Iterator[tuple[str, ...]]:
    for name in (*os.environ.get("CC", "").split()[:1], "cc", "gcc", "clang"):
        if found := shutil.which(name):
            yield (found,)
    if find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "cc")


def _compile(command: list[str], path: Path, opens: Callable[[Path], object]) -> bool:
    """Whether ``path`` is there whole, by this process or another that did the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        try:
            done = subprocess.run([*command, "-o", str(draft)], capture_output=True, timeout=_TIMEOUT_S)
            if done.returncode == 0:
                opens(draft)
                draft.replace(path)
        except (OSError, AttributeError, subprocess.TimeoutExpired):  # a compiler for another machine, or none at all
            return False
        return path.exists()
