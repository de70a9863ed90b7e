"""The perceptron learns the digits on any number of ranks, under every launcher, as on one process."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import run_ranks
from shardwright.compiler.report.text import loss_line

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist_mlp.py"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run(
        [BIN / "shardwright", "data", "digits", "--format", "mnist", "--out", folder],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return str(folder)


def run_example(arguments, log):
    """The example's output and losses with all their digits, on this rank."""
    import torch

    import shardwright.compiler.report.text as text

    losses = []
    text.loss_line = lambda epoch, step, loss: losses.append(loss) or loss_line(epoch, step, loss)
    torch.set_num_threads(1)
    sys.argv = ["mnist_mlp.py", *arguments]
    with open(f"{log}.{os.environ['RANK']}", "w") as sys.stdout:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return Path(f"{log}.{os.environ['RANK']}").read_text(), losses


def run_on(ranks, tmp_path, *arguments):
    return run_ranks(ranks, run_example, arguments, str(tmp_path / f"log{ranks}"), timeout=110)[0]


@pytest.mark.slow
def test_the_accuracy_reaches_95_percent(digits, tmp_path):
    output, _ = run_on(4, tmp_path, "--data", digits)
    assert float(re.search(r"test accuracy: ([\d.]+) % \(\d+ of 360\)", output)[1]) >= 95


LAUNCHERS = {
    "plain": [sys.executable],
    "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"],
    "mpirun": [BIN / "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
    "shardwright": [BIN / "shardwright", "launch", "-n", "2"],
}


# The README runs a script of its own under two of them.
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_file_runs_under_every_launcher(digits, tmp_path, launcher):
    checkpoint = tmp_path / "model.pt"
    command = [*LAUNCHERS[launcher], EXAMPLE, "--data", digits, "--steps", "20", "--checkpoint", checkpoint]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "loss is" in line or "accuracy" in line]
    assert [line.rpartition("epoch")[2].split(",")[0] for line in lines[:2]] == [": 1 step: 10", ": 1 step: 20"]
    assert "test accuracy: " in lines[2]
    assert checkpoint.exists()
