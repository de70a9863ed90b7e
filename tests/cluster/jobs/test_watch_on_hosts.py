"""A job with ranks on two hosts, watched here and by ssh."""

import json
import re

import pytest

from launching import wait_until
from many_hosts import BOTH, PYTHON

pytestmark = pytest.mark.slow
TRAIN = """
    import os, time
    from shardwright.pulse import own_pulse
    pulse = own_pulse()
    for step in range(120):
        pulse.begin_step()
        time.sleep(0.1)
"""


def test_ranks_on_other_hosts_are_told_of_here_and_read_by_ssh(job):
    launcher = job.start(*BOTH, "--job", "far", *PYTHON, job.write("train.py", TRAIN))
    folder = job.folder / "log_output" / "far"
    wait_until(lambda: (folder / "rank.1" / "steps.jsonl").exists(), 60, "rank 1 has told of a step")
    states = [json.loads(line) for line in (folder / "ranks.jsonl").read_text().splitlines()]
    assert {state["rank"]: state["host"] for state in states if "rank" in state} == {0: "host1", 1: "host2"}
    nowhere = job.run("-H", "host1", "nothing", command="watch", timeout_s=60)
    assert nowhere.code == 2
    assert "no job nothing launched on these hosts" in nowhere.stderr
    # The hosts of this test share their disk: the folder is there, too.
    watching = job.start("-H", "host2", str(folder), command="watch")
    assert job.finish(launcher, 60).code == 0
    watched = job.finish(watching, 60)
    assert watched.code == 0, watched.stderr
    assert re.search(r"^0:00:\d\d  step \d+, 1\d\d(\.\d)? ms a step", watched.stdout, re.M), watched.stdout
    assert "job far succeeded (exit code 0)" in watched.stderr
