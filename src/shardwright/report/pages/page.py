"""Pages for a browser: one file each, which needs nothing else."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any


def page_of(package: str, title: str, told: Any) -> str:
    """The ``page.html`` of ``package`` with its script, the style of all pages, and what it is told inside of it."""
    folder = files(package)
    page, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    style = (files("shardwright.report.pages") / "style.css").read_text(encoding="utf-8")
    # A name of the user's that ends the script, or begins a comment in it, must not be read by the browser.
    text = json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"TITLE": html.escape(title), "STYLE": style, "SCRIPT": script, "TOLD": text}
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part, 1)
    return page
