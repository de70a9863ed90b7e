"""The page of a run: one file for a browser, which needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwright.compiler.report.pages.page import page_of, save_page
from shardwright.errors import UsageError


def save_html(document: dict[str, Any], path: Path) -> None:
    """Write the page of what `document_of` gave, whole or not at all.

    Raises:
        UsageError: where it cannot be written.
    """
    text = page_of("shardwright.compiler.report.runs", str(document["job"]), document)
    save_page(text, path, UsageError)
