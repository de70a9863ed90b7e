"""What in a step asks a tensor for its value, or brings one to a device and waits: on a GPU, all that it has to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwright.common.package import FOLDER

Waits = list[str]

_ASKS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__", "nonzero"}
_ASKS |= {"is_nonzero", "equal", "allclose", "masked_select", "unique", "synchronize"}
_MAKES = {"tensor", "as_tensor", "new_tensor"}  # from numbers in Python, which are copied from pageable memory
# Where a number is asked for when it has come, and where on a CPU alone.
_ALLOWED = {
    ("distributed/pending_numbers.py", "value"), ("distributed/pending_numbers.py", "values"),
    ("distributed/seed.py", "drawn"),
    ("compiler/lower/operators/kernels.py", "cross_entropy"),
}  # fmt: skip


class _Watching(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if _waits(name, args, kwargs or {}):
            where = _ours(sys._getframe(1))
            if where:
                self.waits.append(f"{name} at {where}")
        return func(*args, **(kwargs or {}))


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call would wait for a GPU, were the step's device one."""
    if name in ("to", "cuda"):
        moves = name == "cuda" or any(isinstance(arg, torch.device | str) for arg in (*args, *kwargs.values()))
        return moves and not kwargs.get("non_blocking", False)
    if name == "__getitem__":  # of as many entries as are true
        asked = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in asked)
    if name == "where":
        return len(args) + len(kwargs) == 1
    elsewhere = kwargs.get("device") not in (None, "cpu")  # a text means the host, whatever the step's device
    return name in _ASKS or (name in _MAKES and (name == "new_tensor" or elsewhere))


def _ours(frame: FrameType | None) -> str:
    """Where in the package a call stands, "" where another one makes it."""
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        if any(room in frame.f_code.co_filename for room in ("/optim/", "/nn/", "/amp/")):
            return ""  # torch's own choice: counters that stay on the CPU, and the scaler's look for overflows
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else ""
    if frame is None or not file.startswith((str(FOLDER), "<program of rank")):
        return ""
    place = file.removeprefix(f"{FOLDER}/")
    return "" if (place, frame.f_code.co_name) in _ALLOWED else f"{place}:{frame.f_lineno}"


@contextmanager
def waits_in_a_step() -> Iterator[Waits]:
    """The calls of the package within, on this thread, that would wait for a GPU."""
    waits: Waits = []
    with _Watching(waits):
        yield waits
