"""The page of a plan: one file for a browser, which needs nothing else."""

from __future__ import annotations

from pathlib import Path

from shardwright.compiler.report.pages.page import page_of, save_page
from shardwright.compiler.report.plans.document import PlanDocument
from shardwright.errors import PlanError


def in_html(document: PlanDocument) -> str:
    """The page, with what it is told inside of it."""
    return page_of("shardwright.compiler.report.plans", document.title, document.to_json())


def save_html(document: PlanDocument, path: str | Path) -> None:
    """Write the page to a file, whole or not at all.

    Raises:
        PlanError: where it cannot be written.
    """
    save_page(in_html(document), Path(path), PlanError)
