"""The page about concepts is true: its blocks run in order, in one folder, and print what stands under them."""

from pages import DOCS, run_blocks


def test_the_blocks_of_the_page_run(tmp_path):
    assert run_blocks(DOCS / "concepts.md", tmp_path).count("bash") == 3
