"""Documents of JSON that are wrong in one place: of another type, without a field, or with one more."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

OTHERS = (None, True, "x", "", -1, 0, 1.5, 10**40, float("nan"), [], [[]], ["x"], {}, {"x": 1})
_ITEMS = 2  # of a list or an object with many alike


def mutations(document: Any, others: tuple[Any, ...] = OTHERS) -> Iterator[tuple[str, Any]]:
    """Yield where a document was changed and how, with the document; it itself is left as it is."""
    for path in _places(document, ()):
        for other in others:
            if not _is(_at(document, path), other):
                yield f"{_name(path)} = {other!r}", _changed(document, path, other)
        value = _at(document, path)
        if isinstance(value, dict):
            yield f"{_name(path)} with one more", _changed(document, path, value | {"one more": 1})
        if isinstance(value, list):
            yield f"{_name(path)} with one more", _changed(document, path, [*value, *(value[:1] or [1])])
        if path:
            yield f"{_name(path)} removed", _changed(document, path, _GONE)


_GONE = object()


def _is(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        alike = len(value) > 4 and len({repr(type(item)) for item in value.values()}) == 1
        for key in list(value)[: _ITEMS if alike else None]:
            yield from _places(value[key], (*path, key))
    if isinstance(value, list):
        for index in range(min(len(value), _ITEMS)):
            yield from _places(value[index], (*path, index))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _changed(document: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    document = copy.deepcopy(document)
    inside = _at(document, path[:-1])
    if other is _GONE:
        del inside[path[-1]]
    else:
        inside[path[-1]] = other
    return document


def _name(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path) or "the document"
