"""Reads the small files in which the kernel says how things are; any of them may be missing."""

from __future__ import annotations

from pathlib import Path


def text_of(path: str | Path) -> str:
    """Return the text of a file without white space around it; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def number_of(path: str | Path) -> int:
    """Return the whole number in a file; 0 where there is none, or one below."""
    text = text_of(path)
    return int(text) if text.isdecimal() else 0
