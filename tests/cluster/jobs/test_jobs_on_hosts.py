"""Jobs whose launcher is elsewhere or gone: found on their hosts, and ended there."""

import os
import signal

import pytest

from launching import wait_until
from many_hosts import BOTH, PYTHON, SLEEP, STUBBORN, wait_until_alone

pytestmark = pytest.mark.slow
ON = ["-H", "host1,host2"]


def row(job, name):
    """State, hosts, processes and launcher of a job; None where it is not shown."""
    shown = job.run(*ON, command="ps", timeout_s=60)
    assert shown.code == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines() if line.startswith(f"{name} ")]
    return (rows[0][1], rows[0][2], int(rows[0][3]), " ".join(rows[0][6:])) if rows else None


def test_a_launcher_that_is_elsewhere_is_asked_to_end_its_job(job, network):
    launcher = job.start(*BOTH, "--job", "far", "--max-restarts", "3", *PYTHON, job.write("train.py", SLEEP))
    job.wait_for_ranks(2)
    assert row(job, "far") == ("elsewhere", "host1,host2", 4, f"at {network.address}")
    stopped = job.run(*ON, "far", command="stop", timeout_s=60)
    assert (stopped.code, stopped.stdout.splitlines()) == (
        0,
        ["shardwright: job far on host1, host2: its launcher is told to end; `--now` kills",
         "shardwright: job far has ended on host1, host2"],
    ), stopped.stderr  # fmt: skip
    ended = job.finish(launcher)
    assert ended.code == 143, "as by `shardwright stop`, and without a restart"
    assert "`shardwright stop -H host" in ended.stderr
    wait_until(lambda: row(job, "far") is None, 60, "it is shown no more")


def test_now_kills_what_would_not_end(job):
    launcher = job.start(*BOTH, "--job", "deaf", "--grace", "90", *PYTHON, job.write("train.py", STUBBORN))
    job.wait_for_ranks(2)
    stopped = job.run("--now", *ON, "deaf", command="stop", timeout_s=60)
    assert stopped.code == 0, stopped.stdout + stopped.stderr
    assert job.finish(launcher).code == 143


def test_what_nobody_watches_any_more_is_shown_and_ended(job):
    """Of host2 the agent and the supervisor are killed: what ranks have put into sessions of its own goes on."""
    launcher = job.start(*BOTH, "--job", "lost", "--grace", "1", *PYTHON, job.write("train.py", STUBBORN))
    job.wait_for_ranks(2)
    job.wait_for_file("grandchild.1")
    agent = job.agent("host2")
    supervisors = [pid for pid, command in job.on_host("host2").items() if "launch.supervisor" in command]
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # neither has time to act on the end of the other
        for pid in [agent, *supervisors]:
            os.kill(pid, signum)
    assert job.finish(launcher, 60).code == 1
    wait_until(
        lambda: row(job, "lost") == ("left", "host2", 1, "-"), 60, "it is shown, without the rank that was killed"
    )
    stopped = job.run(*ON, "lost", command="stop", timeout_s=60)
    assert stopped.code == 0, stopped.stdout + stopped.stderr
    assert "its processes, which nobody watches, are told to end" in stopped.stdout
    wait_until_alone(job, "host2", 60)
    for path in job.folder.glob("scratch.1"):
        path.unlink()  # who would have removed the folder of the job there was killed


def test_a_host_that_is_silent_is_named_beside_what_others_say(job, network):
    launcher = job.start(*BOTH, "--job", "half", *PYTHON, job.write("train.py", SLEEP))
    job.wait_for_ranks(2)
    shown = job.run("-H", "host1,nobody", command="ps", timeout_s=60)
    assert shown.code == 1
    assert "\nhalf  elsewhere  host1  " in shown.stdout
    assert "shardwright: nobody: there is no host of that name; look at the spelling" in shown.stderr
    refused = job.run(*ON, "full", command="stop", timeout_s=60)
    assert (refused.code, "no job full of this user runs on these hosts; those there are: half" in refused.stderr) == (
        2, True,
    )  # fmt: skip
    launcher.send_signal(signal.SIGINT)
    assert job.finish(launcher).code == 130
