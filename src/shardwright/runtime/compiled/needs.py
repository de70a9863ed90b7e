"""Checks what compiling needs on a host, and says what to type where it is missing."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Compile = bool | Literal["auto"]
"""The values of ``compile=``."""


def is_to_compile(compile: Compile, device: str) -> bool:
    """Return whether programs are compiled on a device: with "auto" on GPUs, where it pays most, and not on CPUs."""
    return device == "cuda" if compile == "auto" else bool(compile)


def compile_problem(compile: Compile, device: str) -> str | None:
    """Return what is in the way of ``compile=`` on a device of this host, None where nothing is."""
    if not isinstance(compile, bool) and compile != "auto":
        return f"compile={compile!r} is unknown; choose one of True, False, 'auto'"
    if not is_to_compile(compile, device):
        return None
    if device == "cuda":
        missing = find_spec("triton") is None
        return f"compile={compile!r} needs triton on GPUs; type `pip install triton`" if missing else None
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return (
            f"compile=True needs a compiler of C++, and there is no {compiler} here; type `apt-get install g++` (or "
            "`dnf install gcc-c++`), or name another one by CXX"
        )
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        name = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return f"compile=True needs the headers of Python, and there is no {headers}; type `apt-get install {name}`"
    return None
