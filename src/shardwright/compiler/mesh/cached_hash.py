"""Frozen values that searches look up by the million, each of which is hashed once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)


def kept_hash(kind: Kind) -> Kind:
    """Let the instances of a frozen dataclass keep their hash, which is not pickled: other processes have others."""
    of: Any = kind
    compute, names = of.__hash__, [field.name for field in fields(of)]

    def hashed(self: Any) -> int:
        try:
            known: int = self._hash
        except AttributeError:
            known = compute(self)
            object.__setattr__(self, "_hash", known)
        return known

    def without_hash(self: object) -> dict[str, object]:
        return {name: self.__dict__[name] for name in names}

    of.__hash__, of.__getstate__ = hashed, without_hash
    return kind
