"""Blocks in bash or python are those that tests run: each page that has such blocks is run here, or by its own test.

What only shows something is marked as console, as text or not at all.
"""

import importlib.util
import re

import pytest

from pages import DOCS, run_blocks

# By page what it needs beside what is always installed.
RUN_HERE = {
    "concepts.md": None,
    "launching/msrun.md": None,
    "launching/rank_tables.md": None,
    "launching/starting.md": None,
    "launching/watching.md": None,
    "planning.md": None,
    "training/coming_from/accelerate.md": None,
    "training/coming_from/mindspore.md": None,
    "training/coming_from/torchrun.md": None,
    "training/experts.md": "transformers",
    "training/lightning.md": "lightning",
    "training/starting.md": None,
    "training/transformers.md": "accelerate",
}
RUN_BY = {
    "api.md": "pages/test_api_page.py",  # its examples are those of docstrings, which tests/test_doctests.py runs
    "capture.md": "pages/test_capture_page.py",
    "training/capture_reference.md": "pages/test_capture_page.py",
    "cluster.md": "cluster/doctor/test_cluster_page.py",
    "errors.md": "pages/test_errors_page.py",
    "extending.md": "pages/test_extending_page.py",
    "measuring/bench.md": "cluster/test_bench_page.py",
    "measuring/verify.md": "test_cli_plan.py",
    "saving/checkpoints.md": "examples/test_checkpoints_page.py",
    "saving/resuming.md": "examples/test_resuming_page.py",
    "training/compiling.md": "runtime/compiled/test_compiling_page.py",
    "training/ddp.md": "examples/test_ddp_page.py",
    "training/pipelines.md": "runtime/pipeline/test_pipeline_ranks.py",
    "training/zoo.md": "training/zoo/test_zoo_page.py",
}


def test_every_page_with_blocks_to_run_is_run():
    marked = {
        str(page.relative_to(DOCS))
        for page in DOCS.rglob("*.md")
        if re.search(r"^```(bash|python)$", page.read_text(), re.MULTILINE)
    }
    assert marked == RUN_HERE.keys() | RUN_BY.keys()
    for page, test in RUN_BY.items():
        assert page.rpartition("/")[2] in (DOCS.parent / "tests" / test).read_text(), f"{test} does not run {page}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "needs"), RUN_HERE.items(), ids=RUN_HERE)
def test_the_blocks_of_a_page_run(page, needs, tmp_path):
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    assert "bash" in run_blocks(DOCS / page, tmp_path)
