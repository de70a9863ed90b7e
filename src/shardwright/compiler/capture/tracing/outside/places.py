"""The places of values that a step reads beside its batch, parameters and buffers, for each rank to find its own.

A captured graph holds what Python values were when it was made: attributes of modules, variables that the loss function
closes over, and variables of Python modules. Where each of them stands is a `Place`, which any rank can look up again.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal

from torch import nn

from shardwright.compiler.capture.tracing.outside import safe
from shardwright.compiler.capture.tracing.outside.closures import called_function, cells, closure
from shardwright.compiler.capture.tracing.outside.values import MISSING


@dataclass(frozen=True)
class Place:
    """A place where a step reads a Python value.

    It is a name in a module of the model (``owner`` is its path), among what the loss function closes over, or in a
    Python module (``owner`` is its name). ``path`` leads on from there as `follow` goes: "0.weight" of a module.
    """

    kind: Literal["attribute", "closure", "global"]
    owner: str
    name: str
    path: str = ""

    def __str__(self) -> str:
        tail = f".{self.path}" if self.path else ""
        if self.kind == "attribute":
            return ".".join(filter(None, ("model", self.owner, self.name))) + tail
        if self.kind == "closure":
            return f"{self.name}{tail}, which the loss function closes over"
        return f"{self.name}{tail}, a variable of {self.owner}"

    def now(self, model: nn.Module, loss_fn: Callable[..., Any]) -> Any:
        """Return what stands there on this rank now, or `MISSING`."""
        return follow(self._start(model, loss_fn), self.path)

    def variables(self, model: nn.Module) -> dict[str, Any]:
        """The dictionary in which the name stands, where it stands in one."""
        if self.kind == "attribute":
            module: nn.Module = follow(model, self.owner)
            return vars(module)
        return vars(sys.modules[self.owner]) if self.kind == "global" and self.owner in sys.modules else {}

    def put(self, loss_fn: Callable[..., Any], value: Any) -> None:
        """Let a variable stand for ``value``, a global one for nothing where that is `MISSING`."""
        if self.kind == "global" and value is MISSING:
            del vars(sys.modules[self.owner])[self.name]
        elif self.kind == "global":
            vars(sys.modules[self.owner])[self.name] = value
        if self.kind == "closure" and self.name in (closed := cells(loss_fn)):
            closed[self.name].cell_contents = value
        elif self.kind == "closure" and self.name in getattr(function := called_function(loss_fn), "__dict__", ()):
            setattr(function, self.name, value)

    def _start(self, model: nn.Module, loss_fn: Callable[..., Any]) -> Any:
        if self.kind == "attribute":
            return safe.attribute(follow(model, self.owner), self.name, MISSING)
        if self.kind == "global":
            return vars(sys.modules[self.owner]).get(self.name, MISSING) if self.owner in sys.modules else MISSING
        return closure(loss_fn).get(self.name, MISSING)


def follow(start: Any, path: str) -> Any:
    """The attribute of an attribute ... of ``start``; of collections, the entry; of functions, what they close over."""
    for name in path.split(".") if path else ():
        start = _entry(start, name)
    return start


@safe.never_raising(MISSING)
def _entry(value: Any, name: str) -> Any:
    number = int(name) if name.isdecimal() else None
    if safe.is_a(value, dict):
        return dict.get(value, name, dict.get(value, number, MISSING))
    if safe.is_a(value, (list, tuple, deque)):
        return safe.entries(value)[number] if number is not None and number < safe.length(value) else MISSING
    if safe.is_a(value, (FunctionType, MethodType, functools.partial)):
        return closure(value).get(name, MISSING)
    return getattr(value, name, MISSING)
