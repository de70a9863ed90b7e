"""What a job on several hosts loses: half of them, an agent that stands still, room, open files, its peers."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from many_hosts import BOTH, LEASE_S, PYTHON, SLACK_S, SLEEP, STUBBORN, jobs_on_hosts, wait_until_alone

pytestmark = pytest.mark.slow


def wrapper(job, name, text):
    """An interpreter that begins with ``text``."""
    path = job.folder / name
    path.write_text(f'#!/bin/sh\n{text}\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("how", ["told", "silent"])
def test_half_the_hosts_die_in_the_middle(tmp_path, how):
    """With all that runs on them, as when their power goes; ``silent``: nobody hears of it, not even over TCP."""
    with jobs_on_hosts(4, tmp_path) as (network, job):
        hosts = ",".join(f"{name}:2" for name in network.hosts)
        words = ["--lease", str(LEASE_S), "--grace", "1"]
        launcher = job.start("-H", hosts, *words, *PYTHON, job.write("train.py", STUBBORN))
        job.wait_for_ranks(8)
        for host in ("host3", "host4"):
            if how == "silent":
                network.cut(host)
        for host in ("host3", "host4"):
            os.kill(network.hosts[host].pid, signal.SIGKILL)
        died_s = time.monotonic()
        ended = job.finish(launcher)
        assert time.monotonic() - died_s < LEASE_S + 1 + 2 * SLACK_S
        for host in ("host1", "host2"):
            wait_until_alone(job, host, SLACK_S)
        assert ended.code == 1, ended.stderr
        told = "nothing was heard from" if how == "silent" else "the connection to"
        lost = set(re.findall(rf"{told} (host\d)", ended.stderr))
        assert lost in ({"host3"}, {"host4"}, {"host3", "host4"}), ended.stderr
        assert "failed first" not in ended.stderr
        assert "ranks 0-3 had to be killed" in ended.stderr
        assert job.told("failed.json")["rank"] is None
        for rank in range(4, 8):  # nobody was left to remove the folders of the job there
            shutil.rmtree(Path((job.folder / f"scratch.{rank}").read_text()), ignore_errors=True)


def test_a_host_whose_agent_stands_still_is_lost_and_ends_its_ranks(job):
    launcher = job.start(*BOTH, "--lease", str(LEASE_S), "--grace", "1", *PYTHON, job.write("train.py", STUBBORN))
    job.wait_for_ranks(2)
    agent = job.agent("host2")
    os.kill(agent, signal.SIGSTOP)
    try:
        ended = job.finish(launcher)
        assert ended.code == 1
        assert f"nothing was heard from host2 for {LEASE_S:g} s: the host or the line to it is down" in ended.stderr
        by_supervisor = {pid for pid in job.on_host("host2") if pid != agent}
        assert not by_supervisor or not wait_for_end(by_supervisor, SLACK_S)
    finally:
        os.kill(agent, signal.SIGCONT)


def wait_for_end(pids, timeout_s):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and (pids := {pid for pid in pids if alive(pid)}):
        time.sleep(0.05)
    return pids


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_host_that_may_not_open_enough_files_for_its_ranks_is_named(job):
    python = wrapper(job, "python", "ulimit -n 40")
    words = ["-H", "host1:1,host2:16", "--python", f"host2={python}"]
    ended = job.run(*words, *PYTHON, job.write("train.py", SLEEP), timeout_s=30)
    assert ended.code == 2, ended.stderr
    assert re.search(
        r"host2: 16 ranks on this host take 48 more open files, and it may have 40: Too many open files;", ended.stderr
    )
    assert not (job.folder / "log_output").exists()


def test_a_host_without_room_for_what_a_job_needs_there_is_refused(job, network):
    subprocess.run(network.inside("host2", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt"), check=True)
    try:
        python = wrapper(job, "python", "export TMPDIR=/mnt")
        ended = job.run(*BOTH, "--python", f"host2={python}", "--", "true")
        assert ended.code == 2
        assert "host2: the disk of /mnt is full there; make room, or set TMPDIR" in ended.stderr
    finally:
        subprocess.run(network.inside("host2", "umount", "/mnt"), check=True)


def other_pythons():
    """By version, those beside this one and on the PATH."""
    beside = Path(sys.base_prefix).parent.glob("*/bin/python3")
    found = [*beside, *(Path(path) for minor in range(6, 16) if (path := shutil.which(f"python3.{minor}")))]
    told = {}
    for path in found:
        asked = [str(path), "-c", "import sys; print(*sys.version_info[:2])"]
        version = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.split()
        if len(version) == 2:
            told[int(version[0]), int(version[1])] = str(path)
    return told


def test_real_interpreters_of_other_versions_are_refused(job):
    pythons = {version: path for version, path in other_pythons().items() if version != sys.version_info[:2]}
    if not pythons:
        pytest.skip("no Python of another version on this machine")
    for (major, minor), path in pythons.items():
        ended = job.run(*BOTH, "--python", f"host2={path}", "--", "true", timeout_s=30)
        assert ended.code == 2, (path, ended.stderr)
        own = f"{sys.version_info.major}.{sys.version_info.minor}"
        if (major, minor) >= (3, 11):
            assert f"host2: Python {major}.{minor}." in ended.stderr
            assert f"there, but {own}." in ended.stderr
        else:
            assert f"host2: {path} is Python {major}.{minor}." in ended.stderr
            assert "there, expected 3.11 or newer; type --python PATH" in ended.stderr
