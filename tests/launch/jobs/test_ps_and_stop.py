"""What `shardwright ps` shows and `shardwright stop` ends, on this host and on others."""

import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from launching import COMMAND, PATIENT, wait_until
from shardwright.common import private_folder
from shardwright.common.private_folder import make_private
from shardwright.errors import UsageError
from shardwright.launch.host.processes import start_ticks
from shardwright.launch.joblog import jobs
from shardwright.launch.joblog.jobs import JobRecord, find_job, known_jobs, show_jobs

PYTHON = ["--", sys.executable]
SLEEP = """
    import os, signal, sys, time
    for number in map(int, sys.argv[1:]): signal.signal(number, signal.SIG_IGN)
    open(f"up.{os.environ['RANK']}", "w").write("x")
    time.sleep(600)
"""


def shown(launching, name):
    """The line of a job, taken apart; None where there is none."""
    lines = launching.run(command="ps").stdout.splitlines()
    mine = [line.split() for line in lines if line.endswith(str(launching.folder / "log_output" / name))]
    return mine[0] if mine else None


def test_ps_lists_a_job_and_stop_ends_it(launching):
    script = launching.write("train.py", SLEEP)
    name = f"ps-{os.getpid()}"
    launcher = launching.start("-n", "2", "--job", name, *PYTHON, script)
    launching.wait_for_file("up.1")
    here = os.uname().nodename
    job, state, hosts, ranks, _, _, restarts, folder = shown(launching, name)
    assert [job, state, hosts, ranks, restarts] == [name, "running", here, "2", "0"]
    assert folder == str(launching.folder / "log_output" / name)
    stopped = launching.run(name, command="stop")
    assert stopped.code == 0, stopped.stderr
    assert stopped.stdout.splitlines() == [
        f"shardwright: the 2 ranks of job {name} on {here} are told to end, and have 10 s; "
        f"`shardwright stop {name}` again, or --now, kills them",
        f"shardwright: job {name} has ended; its logs: {folder}",
    ]
    assert launching.finish(launcher).code == 143
    assert shown(launching, name) is None


@pytest.mark.parametrize("now", [[], pytest.param(["--now"], marks=pytest.mark.slow)])
def test_stop_again_or_now_kills_what_would_not_end(launching, now):
    """Also where the launcher, behind a shell's &, ignores SIGINT. The job is named by the folder of its logs."""
    script = launching.write("train.py", SLEEP)
    ignores = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    launcher = launching.start("-n", "2", "--grace", "600", *PYTHON, script, "15", **ignores)
    launching.wait_for_file("up.1")
    first = launching.start("log_output/1", command="stop")
    wait_until(lambda: (shown(launching, "1") or [""] * 2)[1] == "stopping", 60, "ps shows that the job is to end")
    second = launching.run("log_output/1", *now, command="stop")
    assert second.code == 0
    assert "killing the 2 ranks of job 1 on " in second.stdout
    assert launching.finish(first).code == 0
    ended = launching.finish(launcher)
    assert ended.code == 143
    assert "stop --now: killing what is left" in ended.stderr


@pytest.mark.slow
def test_a_launcher_that_is_stopped_ends_its_job(launching):
    launcher = launching.start("-n", "1", "--grace", "600", *PYTHON, launching.write("train.py", SLEEP))
    launching.wait_for_file("up.0")
    launcher.send_signal(signal.SIGSTOP)
    assert launching.run("./log_output/1", command="stop").code == 0
    assert launching.finish(launcher).code == 143


@pytest.mark.slow
def test_a_job_that_waits_to_restart_is_shown_and_stopped(launching):
    launcher = launching.start("-n", "1", "--max-restarts", "9", "--", "sh", "-c", "exit 3", line=PATIENT)
    waits = ("restarting", "1")
    wait_until(lambda: (line := shown(launching, "1")) and (line[1], line[6]) == waits, 60, "it waits")
    assert launching.run("log_output/1", command="stop").code == 0
    assert launching.finish(launcher).code == 143
    assert launching.told("job.json")["status"] == "interrupted"


def test_a_job_whose_launcher_was_killed_is_shown_as_lost_and_cleared(launching):
    script = launching.write("train.py", SLEEP)
    launcher = launching.start("-n", "2", *PYTHON, script)
    launching.wait_for_file("up.1")
    launcher.kill()
    launcher.wait()
    assert shown(launching, "1")[1] == "lost"
    stopped = launching.run("log_output/1", command="stop")
    assert stopped.code == 0
    assert "the launcher of job 1 is gone; " in stopped.stdout
    launching.assert_none_left(0)
    assert shown(launching, "1") is None


# --- the records


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(private_folder, "TOP", tmp_path)
    return tmp_path / f"shardwright-{os.getuid()}" / "jobs"


def record(**changes):
    pid = os.getpid()
    host = os.uname().nodename
    made = JobRecord("a", "/logs/a", host, pid, start_ticks(pid), time.time(), "running", ["h1", "h2"], 4, 0, 10.0)
    return replace(made, **changes)


def test_records_are_private_and_hold_nothing_that_is_not_asked_for(folder):
    record().write()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700] * 2
    folder.chmod(0o755)
    record().write()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert show_jobs().splitlines()[1].split()[:4] == ["a", "running", "h1,h2", "4"]
    assert find_job("a") == record(started_s=find_job("a").started_s)


def test_a_folder_that_somebody_else_has_made_is_not_used(folder, tmp_path):
    folder.parent.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(PermissionError, match="is not a folder of this user; somebody else has made it"):
        make_private(folder)
    (tmp_path / "elsewhere" / "jobs").mkdir()
    with pytest.raises(UsageError, match="the jobs of this host cannot be listed: "):
        known_jobs()


def test_a_reused_process_number_is_no_living_job(folder):
    """Lost at first, and after a while gone; what another host of the same /tmp has written is left alone."""
    stale = record(start_ticks=1)
    stale.write()
    record(name="b", host="another").write()
    [found] = known_jobs()
    assert (found.name, found.state, found.lives) == ("a", "lost", False)
    assert found.lost_s == pytest.approx(time.time(), abs=30)
    assert "lost: its launcher was killed" in show_jobs()
    replace(found, lost_s=time.time() - 61).write()
    assert known_jobs() == []
    assert show_jobs() == "no job of this user runs that was launched on this host"
    assert [path.name for path in folder.glob("*.json")] == [record().path.name]
    (folder / "1-1.json").write_text("{")
    assert known_jobs() == []


def test_a_job_that_ends_between_two_looks_is_not_lost(folder):
    make_private(folder)
    assert jobs._seen(record(start_ticks=1)) is None
    assert list(folder.iterdir()) == []


def test_a_job_among_other_processes_is_left_alone(folder):
    """As of a container that shares /tmp and the name of this host: nobody here knows whether its launcher lives."""
    record(start_ticks=1, processes="pid:[1]").write()
    before = {path: path.read_text() for path in folder.glob("*.json")}
    assert known_jobs() == []
    assert {path: path.read_text() for path in folder.glob("*.json")} == before


def test_names_that_are_none_or_several(folder):
    with pytest.raises(UsageError, match=r"no job a of this user was launched on this host .*; there is none"):
        find_job("a")
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            record().write()
            record(pid=other.pid, start_ticks=start_ticks(other.pid), folder="/logs/b").write()
            with pytest.raises(
                UsageError, match="2 jobs are named a; name one by the folder of its logs:\n  /logs/a\n  /"
            ):
                find_job("a")
            assert find_job("/logs/b").pid == other.pid
            with pytest.raises(UsageError, match="still runs; those there are: a, a"):
                find_job("c")
        finally:
            other.kill()


# --- on other hosts


BOTH = ["-H", "host1:1,host2:1", "--lease", "2"]


@pytest.mark.slow
def test_stop_ends_a_job_on_all_its_hosts(job):
    launcher = job.start(*BOTH[:2], *PYTHON, job.write("train.py", SLEEP))
    job.wait_for_ranks(2)
    assert shown(job, "1")[2:4] == ["host1,host2", "2"]
    stopped = job.run("log_output/1", command="stop")
    assert stopped.code == 0
    assert "the 2 ranks of job 1 on host1, host2 are told to end" in stopped.stdout
    job.assert_none_left()
    assert job.finish(launcher).code == 143


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
def test_stop_says_what_ends_without_the_launcher(job, network, cut):
    launcher = job.start(*BOTH, *PYTHON, job.write("train.py", SLEEP))
    job.wait_for_ranks(2)
    try:
        if cut:
            network.cut("host2")
        launcher.kill()
        launcher.wait()
        stopped = subprocess.run(
            [COMMAND, "stop", "log_output/1"], cwd=job.folder, capture_output=True, text=True, timeout=30
        )
        assert stopped.returncode == 0
        assert "on host1, host2 the job's agents kill its ranks when the connection ends, or, " in stopped.stdout
        assert "at the latest 3 s after the launcher's end (--lease 2)" in stopped.stdout
        job.assert_none_left()
    finally:
        if cut:
            network.mend("host2")
