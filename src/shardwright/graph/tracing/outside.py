"""Where values stand that a step reads beside its batch, parameters and buffers, so that each rank finds its own.

A captured graph holds what Python values were when it was made: attributes of modules, variables that the loss function
closes over, and variables of Python modules. Where each of them stands is a `Place`, which any rank can look up again.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import CodeType
from typing import Any, Literal

import torch
from torch import nn

from shardwright.graph.tracing import sources

MISSING = object()
"""What stands at a place that is not there (any more)."""
NOT_PLAIN = object()
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_LONGEST = 64  # entries of a list that is compared before each step


@dataclass(frozen=True)
class Place:
    """A name in a module of the model (``owner`` is its path), among what the loss function closes over, or in a Python
    module (``owner`` is its name). ``path`` leads on from there by attributes: "0.weight" of a closed-over module."""

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
        """What stands there on this rank now, or `MISSING`."""
        return follow(self._start(model, loss_fn), self.path)

    def variables(self, model: nn.Module) -> dict[str, Any]:
        """The dictionary in which the name stands, where it stands in one."""
        if self.kind == "attribute":
            module: nn.Module = follow(model, self.owner)
            return vars(module)
        return vars(sys.modules[self.owner]) if self.kind == "global" and self.owner in sys.modules else {}

    def _start(self, model: nn.Module, loss_fn: Callable[..., Any]) -> Any:
        if self.kind == "attribute":
            return getattr(follow(model, self.owner), self.name, MISSING)
        if self.kind == "global":
            return vars(sys.modules[self.owner]).get(self.name, MISSING) if self.owner in sys.modules else MISSING
        return _closure(loss_fn).get(self.name, MISSING)


def follow(start: Any, path: str) -> Any:
    """The attribute of an attribute ... of ``start``."""
    for name in path.split(".") if path else ():
        start = getattr(start, name, MISSING)
    return start


def plain(value: Any) -> Any:
    """A value that can be compared, where it is a number, a word, or a short collection of these; else `NOT_PLAIN`."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple, dict)) and len(value) <= _LONGEST:
        entries = [plain(entry) for entry in (value.items() if isinstance(value, dict) else value)]
        if all(entry is not NOT_PLAIN for entry in entries):
            return (type(value).__name__, *entries)
    return NOT_PLAIN


def same(a: Any, b: Any) -> bool:
    """Equal and of one type: a whole number and a float make different graphs."""
    return a is b or (type(a) is type(b) and bool(a == b))


def variables(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[tuple[Place, Any]]:
    """What the loss function closes over, and the variables of Python modules that it or a module's forward names."""
    loss = called_function(loss_fn)
    for name, value in _closure(loss_fn).items():
        yield Place("closure", "", name), value
    forwards = {type(module).forward for module in model.modules()}
    for function in dict.fromkeys([loss, *map(called_function, forwards)]):
        if function is None or not sources.is_users(function.__code__.co_filename):
            continue
        owner = function.__globals__.get("__name__", "")
        if owner in sys.modules and vars(sys.modules[owner]) is function.__globals__:
            for name in function.__code__.co_names:
                if name in function.__globals__ and not name.startswith("__"):
                    yield Place("global", owner, name), function.__globals__[name]


def tensors(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[tuple[Place, torch.Tensor]]:
    """Tensors at such places: attributes of the model's modules that are no buffers, variables, and what modules among
    the variables hold."""
    for owner, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield Place("attribute", owner, name), value
    for place, value in variables(model, loss_fn):
        if isinstance(value, torch.Tensor):
            yield place, value
        elif isinstance(value, nn.Module) and value is not model:
            for path, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield Place(place.kind, place.owner, place.name, path), tensor


def called_function(callable_: Any) -> Any:
    """The Python function that runs when an object is called, None where there is none."""
    callable_ = inspect.unwrap(callable_)
    while isinstance(callable_, functools.partial):
        callable_ = callable_.func
    if isinstance(callable_, nn.Module):
        callable_ = type(callable_).forward
    elif not inspect.isroutine(callable_):
        callable_ = type(callable_).__call__
    function = inspect.unwrap(getattr(callable_, "__func__", callable_))
    return function if inspect.isfunction(function) else None


def code_digest(code: CodeType) -> str:
    """A hash of what a function does, without the names of files and the numbers of lines."""
    consts = [code_digest(c) if isinstance(c, CodeType) else repr(_ordered(c)) for c in code.co_consts]
    text = f"{code.co_code.hex()} {code.co_names} {code.co_freevars} {consts}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _ordered(const: Any) -> Any:
    """Sets print in an order that differs between processes."""
    return sorted(map(repr, const)) if isinstance(const, frozenset) else const


def _closure(loss_fn: Any) -> dict[str, Any]:
    """The variables that a function closes over, by their names."""
    function = called_function(loss_fn)
    if function is None or function.__closure__ is None:
        return {}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found
