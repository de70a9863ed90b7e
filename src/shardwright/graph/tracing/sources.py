"""Which line of the user's code an operator comes from."""

from __future__ import annotations

import linecache
import sys
import traceback
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from shardwright import package

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(package.FOLDER) + "/"
_MODELS = _OURS + "zoo/"
_HIDING = {
    (_TORCH + "utils/checkpoint.py", "checkpoint"): "checkpoint",
    (_TORCH + "autograd/function.py", "apply"): "Function.apply",
}


@cache
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor ours; the models of our zoo count as the user's."""
    return not filename.startswith((_TORCH, _OURS, "<eval_with_key>", "<string>")) or filename.startswith(_MODELS)


def path_in_torch(filename: str) -> str:
    """Where a file of torch's stands below its folder; nothing for other files."""
    return filename.removeprefix(_TORCH) if filename.startswith(_TORCH) else ""


def users_frame(frame: FrameType | None, until: CodeType | None = None) -> tuple[FrameType | None, str]:
    """The innermost of the user's frames from ``frame`` outwards, and what of torch's calls it that hides a backward.

    That is ``checkpoint``, ``Function.apply``, or nothing, and the frame is then the one that asked for it. With
    ``until``, frames beyond the one that runs that code are not looked at.
    """
    found: FrameType | None = None
    hidden = ""
    while frame is not None and frame.f_code is not until:
        code = frame.f_code
        name = _HIDING.get((code.co_filename, code.co_name))
        if name is not None:
            found, hidden = None, name
        elif found is None and is_users(code.co_filename):
            found = frame
        frame = frame.f_back
    return found, hidden


def describe(filename: str, line: int, function: str) -> str:
    """``model.py:41 in forward: x = self.up(x)``."""
    code = linecache.getline(filename, line).strip()
    return f"{Path(filename).name}:{line} in {function}" + (f": {code}" if code else "")


def describe_frame(frame: FrameType) -> str:
    """The place where ``frame`` stands now."""
    return describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def callers_source() -> str:
    """The innermost of the user's frames that led to this call."""
    frame, _ = users_frame(sys._getframe(1))
    return describe_frame(frame) if frame is not None else ""


def source_in_traceback(trace: TracebackType | None) -> str:
    """The innermost of the user's frames in which an exception passed, ``path:line in function: code``."""
    frames = [frame for frame in traceback.extract_tb(trace) if is_users(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line}"
