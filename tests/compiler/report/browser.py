"""A page in a real browser, without a screen: Chromium, driven by Playwright. Tests skip where one is missing."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
_LIMIT_MS = 60_000  # of whatever is waited for


@contextmanager
def opened(file: Path, **options: Any) -> Iterator[Any]:
    """The page of a file, which must not say anything on the console; ``options`` are those of a browser's context."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    said: list[str] = []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=list(QUIET), timeout=_LIMIT_MS)
        try:
            page = browser.new_context(offline=True, **options).new_page()
            page.set_default_timeout(_LIMIT_MS)
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.goto(file.as_uri())
            yield page
            assert said == []
        finally:
            browser.close()
