"""Pages for a browser: one file each, which needs nothing else."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardwright.common.system_errors import in_words
from shardwright.common.whole_file import write_whole
from shardwright.errors import ShardwrightError


def page_of(package: str, title: str, told: Any) -> str:
    """The ``page.html`` of ``package`` with its script, what all pages share, and what it is told inside of it."""
    page, script = _read(package, "page.html"), _read(package, "page.js")
    shared, style = (_read("shardwright.compiler.report.pages", name) for name in ("shared.js", "style.css"))
    # A name of the user's that ends the script, or begins a comment in it, must not be read by the browser.
    text = json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"TITLE": html.escape(title), "STYLE": style, "SCRIPT": shared + script, "TOLD": text}
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part, 1)
    return page


def save_page(text: str, path: Path, refusal: type[ShardwrightError]) -> None:
    """Write a page to a file, whole or not at all. Raises ``refusal`` where it cannot be written."""
    try:
        write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8", errors="replace"))
    except OSError as error:
        raise refusal(f"cannot write the page {in_words(error, path)}") from error


def _read(package: str, name: str) -> str:
    return (files(package) / name).read_text(encoding="utf-8")
