"""The page about compiling is true: its blocks run in order, in one folder, and print what stands under them."""

import pytest

from pages import DOCS, run_blocks


@pytest.mark.slow
def test_the_blocks_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    assert run_blocks(DOCS / "training/compiling.md", tmp_path) == ["python", "bash", "text"]
    assert any((tmp_path / "code").rglob("*.so")), "the code is kept where the variable says"
