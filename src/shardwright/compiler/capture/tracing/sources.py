"""The line of the user's code from which an operator comes."""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch
from torch import fx

from shardwright.common import package

SOURCE = "shardwright_source"  # the key of an annotation that every traced operator carries
_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(package.FOLDER) + "/"
_MODELS = _OURS + "zoo/"
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(\w+)")
_WRAPPERS = (contextlib.__file__, functools.__file__)  # of Python, in which decorated functions run


def is_users(filename: str) -> bool:
    """Return whether a file is neither torch's nor ours nor Python's; the models of our zoo count as the user's."""
    others = (_TORCH, _OURS, *_WRAPPERS, "<eval_with_key>", "<string>")
    return not filename.startswith(others) or filename.startswith(_MODELS)


def package_of(filename: str) -> str:
    """The name of the installed package that a file belongs to; nothing for a file of the user's own, or ours."""
    found = None if filename.startswith(_OURS) else _INSTALLED.search(filename)
    return found[1] if found else ""


def path_in_torch(filename: str) -> str:
    """Return where a file of torch's stands below its folder; nothing for other files."""
    return filename.removeprefix(_TORCH) if filename.startswith(_TORCH) else ""


def users_frame(frame: FrameType | None, until: CodeType | None = None) -> FrameType | None:
    """The innermost of the user's frames from ``frame`` outwards.

    With ``until``, frames from the one on that runs that code are not looked at.
    """
    while frame is not None and frame.f_code is not until:
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def describe(filename: str, line: int, function: str) -> str:
    """``model.py:41 in forward: x = self.up(x)``."""
    code = linecache.getline(filename, line).strip()
    return f"{Path(filename).name}:{line} in {function}" + (f": {code}" if code else "")


def describe_frame(frame: FrameType) -> str:
    """The place where ``frame`` stands now."""
    return describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def source_of(node: fx.Node) -> str:
    """Return where the user calls a traced operator."""
    return str((node.meta.get("custom") or {}).get(SOURCE, ""))


def callers_source() -> str:
    """The innermost of the user's frames that led to this call."""
    frame = users_frame(sys._getframe(1))
    return describe_frame(frame) if frame is not None else ""


def place_of(frame: FrameType | None, source: str = "") -> str:
    """Return where ``frame`` stands now, with the whole path, for messages; ``source`` is its description, if known."""
    if frame is None:
        return ""
    source = source or describe_frame(frame)
    return frame.f_code.co_filename + source[source.index(":") :]


def callers_place() -> str:
    """The place of the innermost of the user's frames that led to this call."""
    return place_of(users_frame(sys._getframe(1)))


def callers_line() -> str:
    """The innermost of the user's lines that led to this call, ", at path:line"; nothing where there is none."""
    frame = users_frame(sys._getframe(1))
    return f", at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def source_in_traceback(trace: TracebackType | None) -> str:
    """The innermost of the user's frames in which an exception passed, ``path:line in function: code``."""
    frames = [frame for frame in traceback.extract_tb(trace) if is_users(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line}"


def users_frames(trace: TracebackType | None) -> list[FrameType]:
    """The user's frames in which an exception passed, the innermost last."""
    frames = []
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames
