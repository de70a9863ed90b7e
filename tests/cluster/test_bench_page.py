"""The page about the benchmark is true: its blocks run in order, in one folder, and print what stands under them."""

import pytest

from pages import DOCS, run_blocks
from shardwright.cluster.bench.options import BenchOptions
from shardwright.cluster.bench.output import opening

PAGE = DOCS / "measuring" / "bench.md"


@pytest.mark.slow
def test_the_blocks_of_the_page_run(tmp_path):
    assert run_blocks(PAGE, tmp_path) == ["bash", "python", "bash", "text"]


def test_the_header_that_the_page_shows_is_the_one_that_is_printed():
    header = opening("us", "all_reduce_perf", BenchOptions((), 8, 8, factor=2, iters=1, warmup=1), [])[-3:]
    assert "\n".join(header) + "\n" in PAGE.read_text()
