"""The page of a plan: one file for a browser, which needs nothing else."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path

from shardwright.errors import PlanError
from shardwright.report.plans.document import PlanDocument
from shardwright.whole_file import write_whole


def in_html(document: PlanDocument) -> str:
    """The page, with what it is told inside of it."""
    folder = files("shardwright.report.plans")
    page, style, script = ((folder / name).read_text() for name in ("page.html", "page.css", "page.js"))
    # A name of the user's that ends the script, or begins a comment in it, must not be read by the browser.
    told = json.dumps(document.to_json(), separators=(",", ":")).replace("<", "\\u003c")
    parts = {"TITLE": html.escape(document.title), "STYLE": style, "SCRIPT": script, "TOLD": told}
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part, 1)
    return page


def save_html(document: PlanDocument, path: str | Path) -> None:
    """Write the page to a file, whole or not at all.

    Raises:
        PlanError: where it cannot be written.
    """
    text = in_html(document)
    try:
        write_whole(Path(path), lambda draft: draft.write_text(text))
    except OSError as error:
        raise PlanError(f"cannot write the page {path}: {error.strerror}") from error
