"""Looks at users' objects without running code of theirs, or without failing where that raises.

A class of a user's may have a length that raises, a property that does, or an ``==`` that gives no truth. Plain PyTorch
never asks for these, so that looking at a model must not fail for them. Collections are read by the methods of Python's
own classes, attributes where they stand. What cannot be looked at counts as an object of which nothing is known.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
Kinds = type | tuple[type, ...]
_COLLECTIONS: tuple[type, ...] = (list, tuple, deque, set, frozenset)


def is_a(value: Any, kinds: Kinds) -> bool:
    """Return whether a value is an instance of a class: `isinstance` also asks the value for its ``__class__``."""
    return issubclass(type(value), kinds)


def is_parameter(value: Any) -> bool:
    """Return whether a value is a parameter: there are tensors that torch takes for such."""
    return is_a(value, torch.Tensor) and isinstance(value, torch.nn.Parameter)


def never_raising(instead: Any) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return ``instead`` where a function that looks at objects of users fails by their code."""

    def decorate(look: Callable[P, T]) -> Callable[P, T]:
        @wraps(look)
        def looked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return look(*args, **kwargs)
            except Exception:
                return instead  # type: ignore[no-any-return]

        return looked

    return decorate


def length(collection: Any) -> int:
    """Return how much stands in a list, a tuple, a deque, a set or a dictionary, whatever its class says."""
    kind: Any = next(kind for kind in (*_COLLECTIONS, dict) if is_a(collection, kind))
    return int(kind.__len__(collection))


def entries(collection: Any) -> list[Any]:
    """Return what stands in a list, a tuple, a deque or a set, whatever its class says."""
    kind: Any = next(kind for kind in _COLLECTIONS if is_a(collection, kind))
    return list(kind.__iter__(collection))


def items(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return keys and values of a dictionary, whatever its class says."""
    kind: Any = OrderedDict if is_a(mapping, OrderedDict) else dict
    return list(kind.items(mapping))


@never_raising({})
def variables(value: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of an object, an empty one where it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def of_class(kind: type, name: str, default: Any = None) -> Any:
    """Return what stands in a class under a name, without asking it for its value there."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), default)


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, ``default`` where the object has none or does not give it."""
    return never_raising(default)(getattr)(value, name, default)


def words(value: Any) -> str:
    """Return what an object prints as; where it cannot, its class."""
    return str(never_raising(f"<{type(value).__qualname__} that cannot be printed>")(repr)(value))
