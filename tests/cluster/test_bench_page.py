"""The page about the benchmark is true: its blocks run in order, in one folder, and print what stands under them."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "bench.md"


def test_the_blocks_of_the_page_run(tmp_path):
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks] == ["bash", "python", "bash", "text"]
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    printed = ""
    for language, text in blocks:
        if language == "python":
            (tmp_path / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)
        elif language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            printed = done.stdout
        else:
            assert printed == text


def test_the_header_that_the_page_shows_is_the_one_that_is_printed():
    from shardwright.cluster.bench_table import Config, opening

    header = opening("us", "all_reduce_perf", Config(8, 8, 2, True, 1, 1, 1), [])[-3:]
    assert "\n".join(header) + "\n" in PAGE.read_text()
