"""Fields of configuration sections that know their range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Range:
    """``holds`` for the numbers within, of which ``text`` says what they are ("at least 1")."""

    text: str
    holds: Callable[[float], bool]


def at_least(least: float, default: Any) -> Any:
    """A field of numbers from ``least`` on, each of them where there are several."""
    return _field(Range(f"at least {least}", lambda number: number >= least), default)


def more_than(bound: float, default: Any) -> Any:
    """A field of numbers above ``bound``."""
    return _field(Range(f"more than {bound}", lambda number: number > bound), default)


def between(least: float, bound: float, default: Any) -> Any:
    """A field of numbers from ``least`` to below ``bound``."""
    return _field(Range(f"from {least} to below {bound}", lambda number: least <= number < bound), default)


def _field(range: Range, default: Any) -> Any:
    return field(default=default, metadata={"range": range})
