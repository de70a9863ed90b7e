"""Plain Python values as Python source, exactly: a tuple stays a tuple."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def literal(value: Any) -> str | None:
    """The source of a plain value in a program, in which ``device`` is the one that it runs on; None for others."""
    write = _WRITERS.get(type(value))
    return write(value) if write is not None else None


def _number(value: float) -> str:
    return repr(value) if value - value == 0 else f"float('{value}')"


def _within(opening: str, closing: str) -> Callable[[Any], str | None]:
    def write(values: Any) -> str | None:
        entries = [literal(value) for value in values]
        if None in entries:
            return None
        return opening + "".join(f"{entry}, " for entry in entries).rstrip() + closing

    return write


def _mapping(values: Mapping[Any, Any]) -> str | None:
    pairs = [(literal(key), literal(value)) for key, value in values.items()]
    if any(None in pair for pair in pairs):
        return None
    return "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"


_WRITERS: Mapping[type, Callable[[Any], str | None]] = {
    **dict.fromkeys((type(None), bool, int, str, bytes, torch.dtype, torch.layout, torch.memory_format), repr),
    float: _number,
    complex: lambda value: f"complex({_number(value.real)}, {_number(value.imag)})",
    torch.device: lambda value: "device",
    torch.Size: _within("torch.Size([", "])"),
    slice: lambda value: _within("slice(", ")")((value.start, value.stop, value.step)),
    tuple: _within("(", ")"),
    list: _within("[", "]"),
    dict: _mapping,
}
