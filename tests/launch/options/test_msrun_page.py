"""The page about msrun is true: its blocks run in order, in one folder, and print what stands under them."""

import pytest

from pages import DOCS, run_blocks


@pytest.mark.slow
def test_the_blocks_of_the_page_run(tmp_path):
    assert run_blocks(DOCS / "launching" / "msrun.md", tmp_path) == ["python", "bash", "text"]
