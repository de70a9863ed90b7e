"""Ctrl-C in the middle of a training: one readable line, in time, and no process left."""

import contextlib
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
GRACE_S = 100


def marked(mark):
    """The living processes with ``mark`` in their environment, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
    return found


LAUNCHED = (
    f"shardwright: SIGINT: ending 2 ranks, which have {GRACE_S} s before they are killed (Ctrl-C again kills them now)"
)
CASES = {
    "launch": (["launch", "-n", "2", "--grace", str(GRACE_S), "train"], LAUNCHED),
    "alone": (["train"], "shardwright: interrupted"),
}


@pytest.mark.parametrize("how", [pytest.param(n, marks=pytest.mark.slow if n == "alone" else ()) for n in CASES])
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
        assert training.stdout is not None
        for output in training.stdout:
            if output.startswith("epoch: 3 step: 1,"):
                break
        else:
            pytest.fail(training.stderr.read())
        training.send_signal(signal.SIGINT)
        _, stderr = training.communicate(timeout=GRACE_S - 10)
        # A second line would say that ranks did not end by themselves, and were killed.
        assert (stderr.splitlines(), training.returncode) == ([line], 130)
        until_s = time.monotonic() + 60
        while left := marked(mark):  # what has no more to do may be at its end
            assert time.monotonic() < until_s, left
            time.sleep(0.05)
        if how == "launch":
            for rank in range(2):
                assert (tmp_path / f"log_output/1/rank.{rank}/stderr").read_text() == ""
    finally:
        training.kill()
        training.communicate()
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
