"""The process that has imported torch, and the ranks that are forked from it.

The zygote never runs an operator: after one parallel matrix product its threads exist, and a forked child that needs
them would wait for ever. A rank runs its script as ``python script.py`` would: as ``__main__``, with its own
``sys.argv`` and ``sys.path[0]``, and the interpreter's usual end, with handlers of atexit and threads waited for.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import json
import os
import re
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from types import CodeType, TracebackType
from typing import Any

from shardwright.launch.host.folders import use_temporary
from shardwright.launch.host.program import Program
from shardwright.launch.hosts.gpus import count_gpus

_TRAINS = re.compile(rb"\bimport shardwright\b(?!\.)|\bfrom shardwright import\b|\bDistributedDataParallel\b|\boptim\b")
# What the compiler's modules read at their import, which a script may set before its own.
_SETS = re.compile(rb"TORCH_?DYNAMO|TORCH_?INDUCTOR|TORCH_COMPILE|TORCH_LOGS")


def preload(program: Program, *, packed: bool) -> None:
    """Import what every rank will need; ``packed`` says that this package is not the one that ranks import.

    A collection in between would find nothing and takes a sixth of the time.
    """
    gc.disable()
    import torch
    import torch.distributed  # noqa: F401

    # Of the many modules that follow, one of a release to come may ask for GPUs, which breaks them in forked processes.
    if trains(program) and not count_gpus(os.environ):
        with contextlib.suppress(Exception):  # a rank comes to it, and says what is wrong
            _preload_training(packed)
    gc.freeze()  # ranks share these pages for as long as no collection writes to them
    gc.enable()


def _preload_training(packed: bool) -> None:
    """Import what takes a rank that trains as long as torch itself: torch's compiler, and this package."""
    import torch

    torch.compiler.disable(trains)  # type: ignore[no-untyped-call]  # imports what the first optimizer would
    if not packed:
        import shardwright

        for name in ("init", "parallelize"):
            getattr(shardwright, name)  # which imports what defines it


def trains(program: Program) -> bool:
    """Return whether a program trains, as far as its own source tells. To find that of a module may be to import it."""
    if program.kind == "module":
        return program.arguments[0].partition(".")[0] == "shardwright"
    try:
        with open(program.arguments[0], "rb") as file:
            source = file.read()
    except OSError:
        return False  # the rank says what is wrong with it
    return _TRAINS.search(source) is not None and _SETS.search(source) is None


def can_preload(program: Program) -> bool:
    """Return whether ranks can be forked: not of folders or archives with a ``__main__``, or what is not Python."""
    if program.kind == "script":
        return os.path.isfile(program.arguments[0]) and not _is_archive(program.arguments[0])
    return program.kind == "module"


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def run(program: Program) -> None:
    """In a forked rank: run the script or module as ``__main__``; the caller then returns to the interpreter."""
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # forks would share what it drew from the system; Python's own generator reseeds itself
    use_temporary(os.environ)
    sys.argv[:] = program.arguments
    sys.orig_argv[:] = program.command_line()  # what libraries read that start this script again
    namespace = vars(sys.modules["__main__"])
    for name in [name for name in namespace if name not in ("__name__", "__builtins__")]:
        del namespace[name]
    try:
        code = (_script if program.kind == "script" else _module)(program.arguments[0], namespace)
        exec(code, namespace)
    except SystemExit:
        raise
    except BaseException as error:
        if isinstance(error, Exception):
            _write_error_file(error, time.time())
        _hide_our_frames(error)
        raise


def _script(name: str, namespace: dict[str, Any]) -> CodeType:
    path = os.path.abspath(name)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
    namespace.update(
        __file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None,
        __spec__=None, __package__=None, __doc__=None,
    )  # fmt: skip
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _module(name: str, namespace: dict[str, Any]) -> CodeType:
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    code = spec.loader.get_code(name) if spec and hasattr(spec.loader, "get_code") else None  # type: ignore[union-attr]
    if spec is None or code is None:
        sys.exit(f"{sys.executable}: No module named {name}, or none that can be run")
    sys.argv[0] = str(spec.origin)
    namespace.update(
        __file__=spec.origin, __loader__=spec.loader, __cached__=spec.cached,
        __spec__=spec, __package__=spec.parent, __doc__=None,
    )  # fmt: skip
    return code  # type: ignore[no-any-return]


def _hide_our_frames(error: BaseException) -> None:
    """Have the traceback begin with the script; the interpreter reports the exception and ends as it always does."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen importlib.util>"):
        frames = frames.tb_next
    report = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        error.__traceback__ = frames
        report(kind, error, frames)

    sys.excepthook = hook


def _write_error_file(error: Exception, happened_s: float) -> None:
    """Write the error in torchelastic's format, unless the script did: the launcher orders failures by its time.

    The file is there whole or not at all, since others may fail meanwhile, and the launcher then reads it.
    """
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(happened_s)),
            "timestamp_s": happened_s,
        },
    }
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or os.path.exists(path):
        return
    draft = f"{path}.{os.getpid()}"
    try:
        with open(draft, "w") as file:
            json.dump({"message": message}, file)
        os.rename(draft, path)
    except OSError:  # a full disk; the traceback reaches the log through the pipe
        with contextlib.suppress(OSError):
            os.unlink(draft)
