"""Imports the libraries of the optional extra ``ocr`` at their first use."""

from __future__ import annotations

import importlib
from typing import Any

from shardwright.errors import UsageError


def library(name: str) -> Any:
    """The module ``name`` of a library of the extra.

    Raises:
        UsageError: where it is not installed; says what to type.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"text detection and recognition need {name}, which cannot be imported ({error}); "
            "type: pip install 'shardwright[ocr]'"
        ) from error
