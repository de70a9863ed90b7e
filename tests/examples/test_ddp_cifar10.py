"""A script written for torchrun runs unchanged under our launcher, and gives the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwright.data.digits import write_digits

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_cifar10.py"
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"],
    "shardwright": [BIN / "shardwright", "launch", "-n", "2"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """launcher -> (what rank 0 printed, the folder of its checkpoints)."""
    data = tmp_path_factory.mktemp("cifar10")
    write_digits(data, "cifar10")
    found = {}
    for launcher, command in LAUNCHERS.items():
        folder = tmp_path_factory.mktemp(launcher)
        arguments = ["--data", data, "--epochs", "2", "--steps", "3", "--width", "8", "--batch-size", "4", "--out", "."]
        done = subprocess.run(
            [*command, EXAMPLE, *arguments],
            cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        found[launcher] = done.stdout, folder
    return found


@pytest.mark.slow
def test_the_weights_are_those_that_torchrun_gives(runs):
    ours, theirs = (torch.load(runs[name][1] / "epoch_1.pth", weights_only=True) for name in LAUNCHERS)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_script_knows_nothing_of_us():
    code = EXAMPLE.read_text().partition('"""\n\n')[2]
    assert "shardwright" not in code
    assert "import shardwright" not in EXAMPLE.read_text()
