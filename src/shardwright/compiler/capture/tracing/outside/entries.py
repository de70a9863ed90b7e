"""The entries of collections, modules, functions and objects."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing.outside import safe
from shardwright.compiler.capture.tracing.outside.closures import CachedFunction, closure, tensors_kept
from shardwright.compiler.capture.tracing.outside.safe import is_a, never_raising
from shardwright.compiler.capture.tracing.outside.values import (
    DEEPEST,
    FUNCTIONS,
    MOST_LEAVES,
    NOT_PLAIN,
    PLAIN,
    long_and_plain,
    plain,
)

# Torch's own bookkeeping in every module; only the flag of training decides what a forward does.
OF_TORCH = frozenset({*vars(nn.Module()), *vars(nn.Module)}) - {"training"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MOST_INSIDE = 1000  # entries of a collection that are looked at
_CLOSED = (torch.Tensor, type, ModuleType, BuiltinFunctionType)
Entries = list[tuple[Any, Any]]
Opened = MutableMapping[int, tuple[Any, Entries]]
_OPENED = ("argparse", "types")  # of Python itself, whose other objects are taken as they are


def inside(value: Any, seen: Opened, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what collections, modules, functions and users' objects hold, by its path; else the value itself.

    Args:
        seen: collections and objects that were looked into, each once, and what stood in them.
    """
    yield from islice(_all_inside(value, seen, path), MOST_LEAVES)


def _all_inside(value: Any, seen: Opened, path: str) -> Iterator[tuple[str, Any]]:
    entries = entries_of(value) if path.count(".") < DEEPEST else None
    if entries is None:
        yield path, value
    elif id(value) not in seen:
        seen[id(value)] = value, entries
        for number, (name, entry) in enumerate(entries):
            shown = _shown(name, number)
            yield from _all_inside(entry, seen, f"{path}.{shown}" if path else shown)


def _shown(name: Any, number: int) -> str:
    """A key as a part of a path: tensors and objects would print long, and have another address in each copy."""
    short = plain(name) is not NOT_PLAIN or is_a(name, str)
    otherwise = f"{type(name).__name__}@{number}"
    return never_raising(otherwise)(format)(name) if short else otherwise


@never_raising(None)
def entries_of(value: Any) -> Entries | None:
    """Return what stands in a collection or an object by which names; None for what is not looked into."""
    if is_a(value, (*PLAIN, *_CLOSED)) or long_and_plain(value):
        return None
    if is_a(value, dict):
        return safe.items(value) if safe.length(value) <= _MOST_INSIDE else None
    if is_a(value, (list, tuple, deque)):
        return list(enumerate(safe.entries(value))) if safe.length(value) <= _MOST_INSIDE else None
    if is_a(value, nn.Module):
        registered = (*torch_private.members(value), torch_private.buffers_in(value))
        return [*attributes(value), *(entry for names in registered for entry in names.items())]
    if is_a(value, (FunctionType, MethodType, functools.partial)):
        return list(closure(value).items())
    if is_a(value, CachedFunction):
        return list(enumerate(tensors_kept(value)))
    room = type(value).__module__.partition(".")[0]
    if room in ("torch", "numpy", "shardwright") or (room in sys.stdlib_module_names and room not in _OPENED):
        return None
    slotted = any(vars(base).get("__slots__") for base in type(value).__mro__)
    if not slotted and safe.of_class(type(value), "__dict__") is None:
        return None
    return [*safe.variables(value).items(), *in_slots(value)]


def is_object(value: Any) -> bool:
    """Return whether a value is an object of a user's class, which is neither a collection nor a function."""
    known = (torch.Tensor, nn.Module, dict, list, tuple, deque, set, frozenset, *FUNCTIONS, functools.partial)
    return not is_a(value, known) and entries_of(value) is not None


def in_slots(value: Any) -> Entries:
    """Return what stands in the ``__slots__`` of an object."""
    found: Entries = []
    for base in type(value).__mro__:
        for name, slot in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(slot, MemberDescriptorType) and not name.startswith("__"):
                with suppress(AttributeError):  # not set
                    found.append((name, slot.__get__(value)))
    return found


def attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return what users have set on a module, and its flag of training: no parameters, buffers and modules."""
    return [(name, value) for name, value in vars(module).items() if name not in OF_TORCH]


def of_classes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return what the user's own classes of a module hold for all of its kind, and the module does not hide."""
    classes = [base for base in type(module).__mro__ if not base.__module__.startswith("torch.") and base is not object]
    found = {name: value for base in reversed(classes) for name, value in vars(base).items()}
    return [(name, value) for name, value in found.items() if name not in vars(module) and not name.startswith("__")]


def opened_modules(model: nn.Module) -> dict[int, tuple[Any, Entries]]:
    """The modules of a model, as what `inside` has seen."""
    return {id(module): (module, []) for module in model.modules()}
