"""The scripts and commands on the page about resuming run, and go on."""

import contextlib
import io
import os
import re
import runpy
import shlex
import warnings
from pathlib import Path

from click.testing import CliRunner

from ranks import run_ranks
from shardwright.checkpoint.loading.source import open_source
from shardwright.cli import cli

PAGE = (Path(__file__).parents[2] / "docs" / "saving" / "resuming.md").read_text()


def loop(folder):
    os.chdir(folder)
    warnings.simplefilter("ignore")  # that nothing can be learned from noise
    found = runpy.run_path("loop.py", run_name="__main__")
    return found["step"], found["batches"].state_dict()


def test_the_loop_of_the_page_goes_on_on_other_ranks(tmp_path):
    [code] = re.findall(r"```python\n(# loop\.py\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "loop.py").write_text(code.replace("step < 6", "step < 3"))
    assert run_ranks(2, loop, str(tmp_path))[0][0] == 3
    assert open_source(tmp_path / "runs/loop").manifest.info["step"] == 2
    (tmp_path / "loop.py").write_text(code)
    step, position = run_ranks(1, loop, str(tmp_path))[0]
    assert step == 6  # 2, then the rest of the first epoch, and the second
    assert (position["epoch"], position["samples"]) == (2, 0)


def commands(folder, lines):
    os.chdir(folder)
    printed = []
    for line in lines:
        with contextlib.redirect_stdout(io.StringIO()):
            done = CliRunner().invoke(cli, shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.output, done.exception)
        printed.append(done.output)
    return printed


def test_the_commands_of_the_page_go_on(tmp_path):
    [block] = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    [(_, second)] = run_ranks(1, commands, str(tmp_path), block.splitlines())
    assert "resume: runs/q/checkpoints/step-00000002: epoch 1, 2 steps" in second
    assert open_source(tmp_path / "runs/q/checkpoints").manifest.info["step"] == 4
