"""Python values that can be compared, between steps and between ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any

import numpy as np
import torch


class _Mark:
    """Prints alike on every rank."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


MISSING = _Mark("nothing")
"""What stands at a place that is not there (any more)."""
NOT_PLAIN = _Mark("an object")
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, Enum)
_COMPARED = (FunctionType, BuiltinFunctionType, MethodDescriptorType, type)
FUNCTIONS = (*_COMPARED, MethodType)
_SMALL_BYTES = 4096  # of an array that is compared before each step
_LONGEST = 64  # entries of a list that is compared before each step
DEEPEST = 12  # collections inside of each other that are looked into
MOST_LEAVES = 20_000  # of what stands in one value, at any depth


def plain(value: Any) -> Any:
    """A value that can be compared, where it is a number, a word, or a short collection of these; else `NOT_PLAIN`."""
    return _compared(value, _plain_alone, (list, tuple, dict))


def comparable(value: Any) -> Any:
    """The same for functions and classes too, which are what they are, for small arrays, and for sets of these."""
    return _compared(value, _comparable_alone, (list, tuple, dict, set, frozenset, functools.partial))


def _compared(value: Any, alone: Callable[[Any], Any], collections: tuple[type, ...], depth: int = 0) -> Any:
    """What ``alone`` makes of a value, or of all that stands in a short collection; else `NOT_PLAIN`."""
    if (itself := alone(value)) is not NOT_PLAIN:
        return itself
    if not isinstance(value, collections) or depth >= DEEPEST:
        return NOT_PLAIN
    given = _given(value)
    entries = [_compared(entry, alone, collections, depth + 1) for entry in given] if len(given) <= _LONGEST else []
    if len(entries) < len(given) or any(entry is NOT_PLAIN for entry in entries):
        return NOT_PLAIN
    ordered = sorted(entries, key=in_words) if isinstance(value, (set, frozenset)) else entries
    return (type(value).__name__, *ordered)


def _given(value: Any) -> Collection[Any]:
    """What stands in a collection."""
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return value.items() if isinstance(value, dict) else value


def _plain_alone(value: Any) -> Any:
    return value if isinstance(value, PLAIN) else NOT_PLAIN


def _comparable_alone(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.nbytes <= _SMALL_BYTES and not value.dtype.hasobject:
        return type(value).__name__, str(value.dtype), value.shape, value.tobytes()
    return value if isinstance(value, (*PLAIN, *_COMPARED)) else NOT_PLAIN


def in_words(value: Any) -> str:
    """What `comparable` gives, alike in every process."""
    if isinstance(value, torch.device):
        return value.type  # ranks of one host have one each
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, FUNCTIONS):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(in_words, value))})"
    return f"{value!r}"


def same(a: Any, b: Any) -> bool:
    """Equal and of one type: a whole number and a float make different graphs."""
    return a is b or (type(a) is type(b) and bool(a == b))


def long_and_plain(value: Any) -> bool:
    """Whether a value is a long list of numbers or words, which is looked at as one."""
    numbered = isinstance(value, (list, tuple)) and _LONGEST < len(value) <= MOST_LEAVES
    return numbered and all(isinstance(entry, PLAIN) for entry in value)
