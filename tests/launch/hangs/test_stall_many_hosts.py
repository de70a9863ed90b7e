"""Jobs on two hosts that hang: the ranks of both are asked, and the one that holds the others up is named."""

import re

import pytest

from launching import wait_until
from stalling import TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

WORDS = ["-H", "host1:2,host2:2", "--stall-timeout", "4", "--grace", "2"]


def report(job):
    return (job.folder / "log_output/1/stall-1.txt").read_text()


def test_a_rank_that_is_stopped_is_named_with_its_host(job):
    script = job.write("train.py", TRAINING.replace("RANK", "3").replace("HOW", "os.kill(os.getpid(), signal.SIGSTOP)"))
    ended = job.run(*WORDS, script, timeout_s=120)
    assert ended.code == 124, ended.stderr
    named = (
        r"for 4 s: rank 3 on host2 is stopped \(SIGSTOP\) in (train.py:\d+ in hurt \()?step 4\)?; "
        r"3 ranks wait for it in all_reduce of step 4 for the loss\n"
    )
    assert re.search(named, ended.stderr), ended.stderr
    assert re.findall("--- rank (.*), pid", report(job)) == ["0 on host1", "1 on host1", "2 on host2", "3 on host2"]
    assert report(job).count("main thread, by ") >= 3
    run = job.told("run.json")
    assert run["exit_code"] == 124
    assert "rank 3 on host2 is stopped" in run["cause"]


def test_a_rank_that_skips_a_collective_is_named_with_its_host(job):
    text = TRAINING.replace("RANK", "1").replace("HOW", "return tensor").replace("sw.init()", "sw.init('gloo')")
    script = job.write("train.py", text.replace("nn.Linear(8, 8))", "nn.Linear(8, 8), nn.BatchNorm1d(8))"))
    ended = job.run(*WORDS, script, timeout_s=120)
    assert ended.code == 124, ended.stderr
    named = (
        r"for 4 s: rank 1 on host1 is in all_gather of step \d for \S+ of 2 while 3 ranks wait in all_reduce of step "
        r"\d for .*: it has passed or skipped that one\n"
    )
    assert re.search(named, ended.stderr), ended.stderr


def test_a_slow_line_is_no_hang(job, network):
    """What ranks do on the host behind it comes late, and then at once."""
    script = job.write(
        "t.py",
        """
    import os, time
    from shardwright.common.pulse import own_pulse
    print("up", flush=True)
    for _ in range(60):
        time.sleep(0.2)
        own_pulse().begin_step()
    """,
    )
    launcher = job.start("-H", "host1:1,host2:1", "--stall-timeout", "3", "--lease", "30", script)
    wait_until(lambda: (job.folder / "log_output/1/rank.1/stdout").exists() and job.log(1), 60, "the ranks run")
    for host in network.hosts:
        network.cut(host)
    time_s = 6.0
    try:
        with pytest.raises(AssertionError):
            wait_until(lambda: launcher.poll() is not None, time_s, "the job ends")
    finally:
        for host in network.hosts:
            network.mend(host)
    ended = job.finish(launcher, 60)
    assert (ended.code, "no rank" in ended.stderr) == (0, False), ended.stderr
