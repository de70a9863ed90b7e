"""Converts JSON to dataclasses of declared types, so that files and messages are checked before they are used.

The types are those that the program goes on with: dataclasses, which have no other fields; ``TypedDict``, which may
have others beside those declared; and what fields may be. This needs the standard library alone, since the launcher and
its agents on other hosts read JSON too.

>>> from dataclasses import dataclass
>>> @dataclass
... class Part:
...     name: str
...     sizes: tuple[int, ...] = ()
>>> from_json('{"name": "weight", "sizes": [2, 3]}', Part)
Part(name='weight', sizes=(2, 3))
>>> from_json('{"name": "weight", "sizes": [2, "3"]}', Part)
Traceback (most recent call last):
shardwright.common.schema.SchemaError: sizes[1] is '3', expected a whole number
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

T = TypeVar("T")

_PLAIN: Mapping[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null",
}  # fmt: skip


_MOST = 1 << 63  # of whole numbers: nothing that is counted here is more


class SchemaError(ValueError):
    """Raised for text that is not JSON or not of the expected form; says where, what was got and what was expected."""


def from_json(text: str | bytes, kind: type[T]) -> T:
    """Parse JSON text to a value of ``kind``. Raises `SchemaError`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also what is no UTF-8, and numbers of thousands of digits
        raise SchemaError(f"it is no JSON: {error}") from None
    return checked(value, kind)


def checked(value: Any, kind: type[T], at: str = "") -> T:
    """Return what `json.loads` has returned, as a value of ``kind``; it stands at ``at``. Raises `SchemaError`."""
    try:
        return cast(T, _read(value, kind, at))
    except RecursionError:
        raise SchemaError("it has lists in lists, too deep to be read") from None


def _read(value: Any, kind: Any, at: str) -> Any:
    """Return ``value``, which stands at ``at``, as ``kind``: a class, or a type of `typing`."""
    if kind in _PLAIN:
        if type(value) is int and kind in (int, float) and abs(value) < _MOST:
            return kind(value)
        if type(value) is kind is not int:
            return value
        raise _wrong(value, kind, at)
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_union(value, kind, arguments, at)
    if origin is Literal:
        if any(value == one and type(value) is type(one) for one in arguments):
            return value
    elif origin in (dict, Mapping):
        if type(value) is dict:
            return {key: _read(item, arguments[1], _below(at, key)) for key, item in value.items()}
    elif origin in (list, tuple, frozenset):
        if type(value) is list:
            return _read_items(value, kind, origin, arguments, at)
    elif type(value) is dict:
        return _read_fields(value, kind, at)
    raise _wrong(value, kind, at)


def _read_union(value: Any, kind: Any, kinds: tuple[Any, ...], at: str) -> Any:
    """Return ``value`` as the first of ``kinds`` that it can be; of one beside None the error says what is wrong."""
    for one in kinds:
        try:
            return _read(value, one, at)
        except SchemaError:
            others = [other for other in kinds if other is not type(None)]
            if value is not None and len(others) == 1 and one is others[0]:
                raise
    raise _wrong(value, kind, at)


def _read_items(value: list[Any], kind: Any, origin: Any, arguments: tuple[Any, ...], at: str) -> Any:
    if origin is tuple and arguments[-1:] != (...,):
        if len(value) != len(arguments):
            raise _wrong(value, kind, at)
        return tuple(_read(item, one, f"{at}[{i}]") for i, (item, one) in enumerate(zip(value, arguments, strict=True)))
    one = arguments[0]
    if one is str and all(type(item) is str for item in value):  # of the longest lists, those of checksums
        return value if origin is list else origin(value)
    return origin([_read(item, one, f"{at}[{i}]") for i, item in enumerate(value)])


def _read_fields(value: dict[str, Any], kind: Any, at: str) -> Any:
    hints, needed = _declared(kind)
    if absent := sorted(needed - value.keys()):
        raise SchemaError(f"{at or 'it'} lacks {', '.join(absent)}")
    unknown = sorted(value.keys() - hints.keys())
    if unknown and not is_typeddict(kind):
        raise SchemaError(f"{at or 'it'} has {_shown(unknown[0])}, which is not known; expected {', '.join(hints)}")
    read = {name: _read(item, hints[name], _below(at, name)) for name, item in value.items() if name in hints}
    return kind(**({name: value[name] for name in unknown} | read))


@cache
def _declared(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the fields of a dataclass or a ``TypedDict`` with their types, and those that must be there.

    Cached by the class: what it declares is fixed when it is made.
    """
    hints = get_type_hints(kind)
    if is_typeddict(kind):
        return hints, frozenset(kind.__required_keys__)
    assert is_dataclass(kind), f"{kind} is no type of what stands in JSON"
    declared = [field for field in fields(kind) if field.init]
    needed = [field.name for field in declared if field.default is MISSING and field.default_factory is MISSING]
    return {field.name: hints[field.name] for field in declared}, frozenset(needed)


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _wrong(value: Any, kind: Any, at: str) -> SchemaError:
    return SchemaError(f"{at or 'it'} is {_shown(value)}, expected {_words(kind)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _words(kind: Any) -> str:
    """Return what ``kind`` is called in an error.

    >>> _words(tuple[int, ...] | None)
    'a list (each: a whole number) or null'
    """
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple and arguments[-1:] != (...,):
        return f"a list of {len(arguments)}: {', '.join(map(_words, arguments))}"
    if origin in (list, tuple, frozenset):
        return f"a list (each: {_words(arguments[0])})"
    if origin in (dict, Mapping):
        return f"an object (each value: {_words(arguments[1])})"
    return "anything" if kind is Any else f"an object with {', '.join(_declared(kind)[0])}"
