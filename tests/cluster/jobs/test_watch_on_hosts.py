"""A job with ranks on two hosts, watched here and by ssh."""

import json
import re

import pytest

from launching import wait_until
from many_hosts import BOTH, PYTHON

pytestmark = pytest.mark.slow
TRAIN = """
    import os, time  # until there is a file "enough"
    from shardwright.common.pulse import own_pulse
    pulse = own_pulse()
    while not os.path.exists("enough"):
        pulse.begin_step()
        time.sleep(0.1)
"""


def hosts_of(folder):
    """By rank, as far as whole lines say it."""
    lines = (folder / "ranks.jsonl").read_text().splitlines(keepends=True)
    states = [json.loads(line) for line in lines if line.endswith("\n")]
    return {state["rank"]: state["host"] for state in states if "rank" in state}


def test_ranks_on_other_hosts_are_told_of_here_and_read_by_ssh(job):
    launcher = job.start(*BOTH, "--job", "far", *PYTHON, job.write("train.py", TRAIN))
    folder = job.folder / "log_output" / "far"
    wait_until(lambda: (folder / "rank.1" / "steps.jsonl").exists(), 60, "rank 1 has told of a step")
    wait_until(lambda: hosts_of(folder) == {0: "host1", 1: "host2"}, 60, "both ranks have begun")
    nowhere = job.run("-H", "host1", "nothing", command="watch", timeout_s=60)
    assert nowhere.code == 2
    assert "no job nothing launched on these hosts" in nowhere.stderr
    # The hosts of this test share their disk: the folder is there, too.
    watching = job.start("-H", "host2", str(folder), command="watch")
    seen = []
    for line in watching.stdout:
        seen.append(line)
        if re.match(r"0:\d\d:\d\d  step \d+, [\d.]+ m?s a step", line):
            break
    else:
        pytest.fail("".join(seen))
    (job.folder / "enough").touch()
    assert job.finish(launcher, 60).code == 0
    watched = job.finish(watching, 60)
    assert watched.code == 0, watched.stderr
    assert "job far succeeded (exit code 0)" in watched.stderr
