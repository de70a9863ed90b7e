"""Python values that can be compared, between steps and between ranks."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any

import numpy as np
import torch

from shardwright.compiler.capture.tracing.outside import safe
from shardwright.compiler.capture.tracing.outside.safe import is_a, never_raising


class _Mark:
    """Prints alike on every rank."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


MISSING = _Mark("nothing")
"""The value of a place where nothing stands (any more)."""
NOT_PLAIN = _Mark("an object")
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, Enum)
_NUMBERS = (
    float,
    complex,
    np.generic,
)  # of which Python takes some for equal that are not the same, and some for unlike
_COMPARED = (FunctionType, BuiltinFunctionType, MethodDescriptorType, type)
FUNCTIONS = (*_COMPARED, MethodType)
_SMALL_BYTES = 4096  # of an array that is kept to be compared before each step; of larger ones a digest is
_LONGEST = 64  # entries of a list that is compared before each step
DEEPEST = 12  # collections inside of each other that are looked into
MOST_LEAVES = 20_000  # of what stands in one value, at any depth


@never_raising(NOT_PLAIN)
def plain(value: Any) -> Any:
    """A value that can be compared, where it is a number, a word, or a short collection of these; else `NOT_PLAIN`."""
    return _compared(value, _plain_alone, (list, tuple, dict))


@never_raising(NOT_PLAIN)
def comparable(value: Any) -> Any:
    """Return `comparable` of a value, or what stands for a function, a class, an array, or a set of these."""
    return _compared(value, _comparable_alone, (list, tuple, dict, set, frozenset, functools.partial))


def _compared(value: Any, alone: Callable[[Any], Any], collections: tuple[type, ...], depth: int = 0) -> Any:
    """Return what ``alone`` makes of a value, or of all that stands in a short collection; else `NOT_PLAIN`."""
    if (itself := alone(value)) is not NOT_PLAIN:
        return itself
    if not is_a(value, collections) or depth >= DEEPEST:
        return NOT_PLAIN
    given = _given(value)
    entries = [_compared(entry, alone, collections, depth + 1) for entry in given] if len(given) <= _LONGEST else []
    if len(entries) < len(given) or any(entry is NOT_PLAIN for entry in entries):
        return NOT_PLAIN
    ordered = sorted(entries, key=in_words) if is_a(value, (set, frozenset)) else entries
    # A class of a user's may keep beside the entries what its own methods read.
    beside = [_compared(entry, alone, collections, depth + 1) for entry in safe.variables(value).items()]
    return (type(value).__name__, *ordered, *(entry for entry in beside if entry is not NOT_PLAIN))


def _given(value: Any) -> list[Any]:
    """Return what stands in a collection."""
    if is_a(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return safe.items(value) if is_a(value, dict) else safe.entries(value)


def _plain_alone(value: Any) -> Any:
    return value if is_a(value, PLAIN) else NOT_PLAIN


def _comparable_alone(value: Any) -> Any:
    if is_a(value, np.ndarray) and not value.dtype.hasobject:
        numbers = value.tobytes()
        digest = numbers if len(numbers) <= _SMALL_BYTES else hashlib.blake2b(numbers).digest()
        return type(value).__name__, str(value.dtype), value.shape, digest
    return value if is_a(value, (*PLAIN, *_COMPARED)) else NOT_PLAIN


def in_words(value: Any) -> str:
    """Return what `comparable` gives, alike in every process."""
    if is_a(value, torch.device):
        return str(value.type)  # ranks of one host have one each
    if is_a(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if is_a(value, FUNCTIONS):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    if is_a(value, tuple):
        return f"({', '.join(map(in_words, value))})"
    return safe.words(value)


@never_raising(False)
def same(a: Any, b: Any) -> bool:
    """Return whether two values of `comparable` make the same graph.

    1, 1.0 and True do not, nor do 0.0 and -0.0, although Python takes them for equal, also within collections.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return exactly(a) == exactly(b) if isinstance(a, _NUMBERS) else bool(a == b)


def exactly(value: Any) -> str:
    """Return a text that no other plain value has, and that is the same in every process.

    Each tuple, list or dict of plain values has such a text, too.

    ``repr`` would not do: classes of the user's leave out in theirs what tells values apart.
    """
    kind = type(value)
    if isinstance(value, Enum):
        text = f"{value.name} {exactly(value.value) if isinstance(value.value, PLAIN) else ''}"
    elif isinstance(value, np.generic):
        text = f"{value.dtype.str} {value.tobytes().hex()}"
    elif isinstance(value, (tuple, list)):
        text = f"({', '.join(map(exactly, value))})"
    elif isinstance(value, dict):
        text = exactly([*value.items()])
    elif isinstance(value, FUNCTIONS):
        text = in_words(value)
    else:
        written_by: Any = next((of for of in (bool, int, float, complex, str, bytes) if isinstance(value, of)), kind)
        text = written_by.__repr__(value)
    return f"{kind.__module__}.{kind.__qualname__} {text}"


def long_and_plain(value: Any) -> bool:
    """Return whether a value is a long list of numbers or words, which is looked at as one."""
    numbered = is_a(value, (list, tuple)) and _LONGEST < safe.length(value) <= MOST_LEAVES
    return numbered and all(is_a(entry, PLAIN) for entry in safe.entries(value))
