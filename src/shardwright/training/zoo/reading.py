"""Reads what a configuration file holds into the frozen dataclasses of its sections, and says all that is wrong."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shardwright.training.zoo.rows import ChoiceTable, Range

Problems = list[str]


class UnreadError(Exception):
    """Raised when a check needs a key that could not be read; that problem is reported already."""


class Partial:
    """The keys of a section that could be read, for the checks that need no others."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._values:
            raise UnreadError(name)
        return self._values[name]


def read(kind: Any, raw: Any, path: str, problems: Problems, range: Range | None = None) -> Any:
    """Return ``raw`` as ``kind`` (a type hint); of a section with problems, which are appended, a `Partial`."""
    if kind is Any:
        return raw
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _read_union(get_args(kind), raw, path, problems, range)
    if origin is Literal:
        return _read_choice(get_args(kind), raw, path, problems)
    if origin is tuple:
        if not isinstance(raw, list):
            return problems.append(f"{path}: expected a list, got {_shown(raw)}")
        return tuple(read(get_args(kind)[0], item, f"{path}[{i}]", problems, range) for i, item in enumerate(raw))
    if origin is dict:
        if not isinstance(raw, dict):
            return problems.append(f"{path}: expected keys with values, got {_shown(raw)}")
        return raw
    if is_dataclass(kind):
        return _read_section(kind, raw, path, problems)
    return _read_plain(kind, raw, path, problems, range)


def _read_union(kinds: tuple[Any, ...], raw: Any, path: str, problems: Problems, range: Range | None) -> Any:
    """``raw`` as the first type beside None that it is; sections that come in several kinds have a table instead."""
    if raw is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) == 1:
        return read(kinds[0], raw, path, problems, range)
    for kind in kinds:
        tried: Problems = []
        value = read(kind, raw, path, tried, range)
        if not tried:
            return value
    return problems.append(f"{path}: expected {' or '.join(map(_expected, kinds))}, got {_shown(raw)}")


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return _PLAIN[kind][0] if kind in _PLAIN else "a list"


def _read_chosen(table: ChoiceTable[Any], raw: Any, path: str, problems: Problems) -> Any:
    choices, key = tuple(table.rows), table.key
    if not isinstance(raw, dict) or key not in raw:
        return problems.append(f"{path}.{key} is missing; choose one of {', '.join(choices)}")
    if raw[key] not in choices:
        return _read_choice(choices, raw[key], f"{path}.{key}", problems)
    return _read_section(table.rows[raw[key]].options, raw, path, problems)


def _read_choice(choices: tuple[Any, ...], raw: Any, path: str, problems: Problems) -> Any:
    if raw in choices:
        return raw
    names = list(map(str, choices))
    return problems.append(f"{path}: {_shown(raw)} is unknown; choose one of {', '.join(names)}{near(raw, names)}")


def _read_section(kind: Any, raw: Any, path: str, problems: Problems) -> Any:
    if not isinstance(raw, Mapping):
        return problems.append(f"{path}: expected keys with values, got {_shown(raw)}")
    hints, known = get_type_hints(kind), {f.name: f for f in fields(kind)}
    prefix = f"{path}." if path else ""
    before = len(problems)
    for key in raw:
        if key not in known:
            hint = near(key, known, prefix) or f"; known: {', '.join(known)}"
            problems.append(f"{prefix}{key} is unknown{hint}")
    values = {}
    for name, declared in known.items():
        if name in raw:
            already = len(problems)
            value = _read_key(declared, hints[name], raw[name], f"{prefix}{name}", problems)
            if len(problems) == already or isinstance(value, Partial):
                values[name] = value
        elif declared.default is not MISSING:
            values[name] = declared.default
        elif declared.default_factory is not MISSING:
            values[name] = declared.default_factory()
        else:
            problems.append(f"the section {prefix}{name} is missing")
    return kind(**values) if len(problems) == before else Partial(values)


def _read_key(declared: Field[Any], hint: Any, raw: Any, path: str, problems: Problems) -> Any:
    table = declared.metadata.get("table")
    if table is not None:
        return _read_chosen(table, raw, path, problems)
    return read(hint, raw, path, problems, declared.metadata.get("range"))


_PLAIN: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
}


def _read_plain(kind: type, raw: Any, path: str, problems: Problems, range: Range | None) -> Any:
    expected, accepted = _PLAIN[kind]
    if not isinstance(raw, accepted) or (isinstance(raw, bool) and kind is not bool):
        return problems.append(f"{path}: expected {expected}, got {_shown(raw)}")
    if range is not None and isinstance(raw, (int, float)) and not range.holds(raw):
        return problems.append(f"{path}: expected {expected} of {range.text}, got {_shown(raw)}")
    return kind(raw)


def near(key: Any, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint at the known word that is most like a key, empty where none is."""
    near = difflib.get_close_matches(str(key), list(known), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _shown(raw: Any) -> str:
    return "nothing" if raw is None else repr(raw)
