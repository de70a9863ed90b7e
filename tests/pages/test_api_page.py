"""The reference is that of the docstrings as they are."""

import runpy

from pages import DOCS

SCRIPT = DOCS.parent / "scripts" / "api.py"


def test_the_reference_is_up_to_date():
    page = runpy.run_path(str(SCRIPT))["page"]()
    assert page == (DOCS / "api.md").read_text(), "docstrings have changed; type .venv/bin/python scripts/api.py"
