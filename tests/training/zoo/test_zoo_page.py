"""The page about the models: its script runs, and its recipe for the digits reaches what it says."""

import contextlib
import io
import os
import re
import runpy
from pathlib import Path

import pytest

from ranks import run_ranks
from shardwright.data.digits import write_digits

PAGE = (Path(__file__).parents[3] / "docs" / "training" / "zoo.md").read_text()


def run_script(folder):
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path("script.py", run_name="__main__")
    return out.getvalue()


@pytest.mark.slow
def test_the_script_of_the_page_trains(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "script.py").write_text(code)
    write_digits(tmp_path / "digits_mnist", "mnist")
    lines = run_ranks(2, run_script, str(tmp_path), timeout=110)[0].splitlines()
    assert lines[0] == "global batch: 64 samples on 2 ranks, learning rate: 0.001, precision: bf16"
    assert [line.partition(" | loss")[0] for line in lines if line.startswith("val")] == [
        f"val | epoch: {epoch}" for epoch in (1, 2, 3)
    ]
