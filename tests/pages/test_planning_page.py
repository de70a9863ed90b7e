"""The page about plans is true: its blocks run in order, in one folder, and print what stands under them."""

import pytest

from pages import DOCS, run_blocks


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_blocks_of_the_page_run(tmp_path):
    assert run_blocks(DOCS / "planning.md", tmp_path).count("bash") == 8
