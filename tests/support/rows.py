"""Rows of parametrized tests that are slow: left out where others of their table tell most of what they do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """Return rows that are slow; one with several values is a tuple."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow) for row in rows]


def brief(rows: Iterable[Any], *quick: Any) -> list[Any]:
    """Return all rows, of which those that are not named here are slow."""
    rows = list(rows)
    assert all(row in rows for row in quick), "a row that is named is none"
    return [row if row in quick else slow(row)[0] for row in rows]
