"""Checks what compiling needs on a host, and says what to type where it is missing."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def compile_problem(compile: bool, device: str) -> str | None:
    """Return what is in the way of ``compile=`` on a device of this host, None where nothing is."""
    if not isinstance(compile, bool):
        return f"compile={compile!r} is unknown; choose one of True, False"
    if not compile:
        return None
    if device == "cuda":
        missing = find_spec("triton") is None
        return "compile=True needs triton on GPUs; type `pip install triton`" if missing else None
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
