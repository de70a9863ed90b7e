"""The pages about the trainers of others are true: their blocks run."""

import importlib.util

import pytest

from pages import DOCS, run_blocks


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("page", "needs", "blocks"), [("transformers", "accelerate", 1), ("lightning", "lightning", 1)]
)
def test_the_blocks_of_a_page_run(page, needs, blocks, tmp_path):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    text = (DOCS / "training" / f"{page}.md").read_text()
    text = text.replace("```python\nfrom", "```\nfrom")  # a piece that is told, and does not stand alone
    text = text.replace("python -m pip install 'shardwright[lightning]'", "true")
    (tmp_path / "page.md").write_text(text)
    assert run_blocks(tmp_path / "page.md", tmp_path).count("bash") >= blocks
