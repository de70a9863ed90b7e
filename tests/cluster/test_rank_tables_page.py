"""The page about rank tables is true: its blocks run in order, in one folder, and print what stands under them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "rank_tables.md"


@pytest.mark.slow
def test_the_blocks_of_the_page_run(tmp_path):
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks].count("bash") == 4
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "DEVICE"))}
    variables |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    printed = None
    for language, text in blocks:
        if language == "python":
            (tmp_path / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)
        elif language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            printed = done.stdout, done.stderr
        else:
            assert printed is not None
            assert printed[0] == text, printed[1]
            printed = None
