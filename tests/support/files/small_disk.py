"""A file system that is soon full."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(path: Path, size: int) -> Iterator[Path]:
    """A file system of its own of so many bytes."""
    path.mkdir()
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root and the program mount")
    tried = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    if tried.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {tried.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
