"""Ctrl-C in the middle of a training: one readable line, in time, and no process left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("shardwright")
MARK = "SHARDWRIGHT_INTERRUPT_TEST"
CASES = {
    "launch": (
        ["launch", "-n", "2", "--grace", "100", "train"],
        "shardwright: SIGINT: ending 2 ranks, which have 100 s before they are killed (Ctrl-C again kills them now)",
    ),
    "alone": (["train"], "shardwright: interrupted"),
}


def marked(mark):
    """Return the living processes with ``mark`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", CASES)
def test_an_interrupted_training_ends_in_one_line_and_leaves_no_process(how, tmp_path):
    words, line = CASES[how]
    settings = ["train.epochs=100000", "train.checkpoint=none", "eval.enabled=false", "parallel.mode=data"]
    command = [COMMAND, *words, "--config", "quickstart", *(word for setting in settings for word in ("-o", setting))]
    mark = uuid.uuid4().hex
    training = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        if not any(output.startswith("epoch: 3 step: 1,") for output in training.stdout):
            pytest.fail(training.stderr.read())
        training.send_signal(signal.SIGINT)
        _, stderr = training.communicate(timeout=90)
        # A second line would say that ranks did not end by themselves, and were killed.
        assert (stderr.splitlines(), training.returncode) == ([line], 130)
        until_s = time.monotonic() + 60
        while left := marked(mark):  # what has no more to do may be at its end
            assert time.monotonic() < until_s, left
            time.sleep(0.05)
        for path in tmp_path.glob("log_output/1/rank.*/stderr"):
            assert path.read_text() == ""
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        training.communicate()
