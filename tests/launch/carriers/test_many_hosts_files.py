"""What differs by host, what is copied to hosts, and where the logs of hosts are."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launching import wait_until
from many_hosts import BOTH


def test_directory_interpreter_and_variables_by_host(job, refused):
    for name in ("one", "two"):
        (job.folder / name).mkdir()
    python = job.folder / "python"
    python.write_text(f'#!/bin/sh\nVIA=wrapper exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    words = [
        "--wdir", str(job.folder / "one"), "--wdir", f"host2={job.folder}/two", "--python", f"host2={python}",
        "-x", "A=all", "-x", "host2:A=two", "-x", "host1:B", "-x", "host2:OMP_NUM_THREADS=3",
    ]  # fmt: skip
    show = 'echo "$(pwd) $A $B $VIA $OMP_NUM_THREADS"'
    ended = job.run(*BOTH, *words, "--", "sh", "-c", show, env={"B": "passed", "OMP_NUM_THREADS": "2"})
    assert ended.code == 0, ended.stderr
    assert [job.log(rank) for rank in range(2)] == [
        f"{job.folder}/one all passed  2\n", f"{job.folder}/two two passed wrapper 3\n"
    ]  # fmt: skip
    for wrong, message in (
        (["--wdir", "host3=/w"], "--wdir host3=/w: host3 is no host of this job, which has host1, host2"),
        (["-x", "host3:A=1"], "-x host3:A: host3 is no host of this job"),
        (["--python", "/a", "--python", "/b"], "--python /a and --python /b are for the same host; type one of them"),
        (["-x", "host1:RANK=1"], "-x RANK: the launcher sets RANK for each rank itself"),
    ):
        assert message in refused(*BOTH, *wrong, "--", "true")


def staged_things(job):
    (job.folder / "pkg").mkdir()
    (job.folder / "pkg/helper.py").write_text("WORD = 'staged'\n")
    (job.folder / "run.sh").write_text('#!/bin/sh\necho "from $0"\n')
    (job.folder / "run.sh").chmod(0o700)
    (job.folder / "not.staged").write_text("x")
    return job.write(
        "pkg/train.py",
        """
    import os, subprocess, sys, time
    import helper
    print(helper.WORD, os.getcwd(), sorted(os.listdir()), sys.argv[1:], flush=True)
    subprocess.run(["./run.sh"], check=True)
    open("result", "w").write("x")
    while os.path.exists("../wait") or os.path.exists(sys.argv[1]): time.sleep(0.01)
    """,
    )


def test_what_is_staged_is_where_the_ranks_run_and_is_gone_with_the_job(job):
    script = staged_things(job)
    ended = job.run(*BOTH, "--stage", "pkg", "--stage", "./run.sh", "--", sys.executable, script, "/nowhere")
    assert ended.code == 0, ended.stderr
    places = [re.fullmatch(r"staged (\S+) (.*) (\[.*\])\nfrom ./run.sh\n", job.log(rank)) for rank in range(2)]
    assert [place[2] for place in places] == ["['pkg', 'run.sh']"] * 2
    folders = {Path(place[1]) for place in places}
    assert len(folders) == 2
    wait_until(lambda: not any(folder.parent.exists() for folder in folders), 60, "what was staged is removed")
    assert not (job.folder / "result").exists()


@pytest.mark.slow
def test_what_is_staged_stays_where_asked_and_wdir_decides_where_ranks_run(job):
    script = staged_things(job)
    ended = job.run(
        *BOTH, "--stage", "pkg", "--stage", "run.sh", "--keep-stage", "--", sys.executable, script, "/nowhere"
    )
    assert ended.code == 0, ended.stderr
    kept = re.findall(r"shardwright: (/\S+/shardwright-staged-\w+) holds what was staged to host\d\n", ended.stderr)
    try:
        assert len(set(kept)) == 2
        assert all((Path(folder) / "result").exists() for folder in kept)
    finally:
        for folder in kept:
            subprocess.run(["rm", "-r", str(folder)], check=True)
    ended = job.run(*BOTH, "--stage", "pkg", "--wdir", str(job.folder), "--", "sh", "-c", "pwd", timeout_s=30)
    assert (ended.code, job.log(1, job="2")) == (0, f"{job.folder}\n")
    ended = job.run(*BOTH, "--stage", "run.sh", "--keep-stage", script)
    assert ended.code == 2
    folders = re.findall(r"host\d: there is no pkg/train.py in (/\S+/shardwright-staged-\w+);", ended.stderr)
    assert [Path(folder).exists() for folder in folders] == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["launcher", "agent"])
def test_what_is_staged_is_removed_when_something_is_killed(job, how):
    script = staged_things(job)
    (job.folder / "go").write_text("x")
    words = ["--lease", "2", "--grace", "1", "--stage", "pkg", "--stage", "run.sh"]
    launcher = job.start(*BOTH, *words, "--", sys.executable, script, str(job.folder / "go"))
    logs = [job.folder / f"log_output/1/rank.{rank}/stdout" for rank in (0, 1)]
    wait_until(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs), 60, "run")
    folders = [Path(job.log(rank).split()[1]) for rank in (0, 1)]
    assert all((folder / "pkg").exists() for folder in folders)
    os.kill(launcher.pid if how == "launcher" else job.agent("host2"), signal.SIGKILL)
    job.finish(launcher)
    wait_until(lambda: not job.survivors(), 60, "the end of all processes")
    wait_until(lambda: not any(folder.parent.exists() for folder in folders), 60, "what was staged is removed")


@pytest.mark.slow
def test_a_disk_without_room_for_what_is_staged_is_said_before_anything_starts(job, network):
    """Of one host alone, whose /tmp is small."""
    subprocess.run(network.inside("host2", "mount", "-t", "tmpfs", "-o", "size=20m", "none", "/mnt"), check=True)
    try:
        (job.folder / "big").write_bytes(bytes(30 << 20))
        ended = job.run(*BOTH, "--stage", "big", "-x", "host2:TMPDIR=/mnt", "--", "true", timeout_s=30)
        assert ended.code == 0, "a variable of the ranks is none of the agent's"
        with open(job.folder / "python", "w") as file:
            file.write(f'#!/bin/sh\nTMPDIR=/mnt exec {sys.executable} "$@"\n')
        os.chmod(job.folder / "python", 0o755)
        ended = job.run(*BOTH, "--stage", "big", "--python", f"host2={job.folder}/python", "--", "true", timeout_s=30)
        assert ended.code == 2
        message = "1 of 2 hosts cannot be used:\n  host2: 31.5 MB in 1 files and folders are to be staged to /mnt there"
        assert message in ended.stderr
    finally:
        subprocess.run(network.inside("host2", "umount", "/mnt"), check=True)


@pytest.mark.slow
def test_a_slow_line_takes_its_time_for_what_is_staged(job, network):
    """Longer than a host may be silent; the other host waits, within its lease."""
    (job.folder / "big").write_bytes(os.urandom(6_000_000))
    network.slow("host2", 2_000_000)
    try:
        start_s = time.monotonic()
        words = ["--lease", "4", "--stage", "big", "--", "sh", "-c", "wc -c big"]
        ended = job.run(*BOTH, *words, timeout_s=90)
        assert ended.code == 0, ended.stderr
        assert time.monotonic() - start_s > 20
    finally:
        network.unslow("host2")
    assert [job.log(rank) for rank in (0, 1)] == ["6000000 big\n"] * 2


LOUD = """
    import os, sys, time
    rank = os.environ["RANK"]
    os.write(1, f"out {rank}\\n".encode())  # in one piece: half a line would be shown as one after a while
    sys.stderr.write("x" * 50_000 + "\\n")
    sys.stderr.flush()
    if rank == "0":
        open("rank0_is_done", "w").close()
    while not os.path.exists("rank0_is_done"):
        time.sleep(0.01)
    sys.exit("the reason is told" if rank == "1" else 0)
"""


@pytest.mark.slow
def test_logs_stay_on_the_hosts_where_asked(job, network):
    """The hosts have a disk of their own where this machine's log folder is."""
    logs = str(job.folder / "log_output")
    os.mkdir(logs)
    for host in network.hosts:
        subprocess.run(network.inside(host, "mount", "-t", "tmpfs", "-o", "size=1500k", "none", logs), check=True)
    try:
        ended = job.run(*BOTH, "--no-collect-logs", "--", sys.executable, job.write("train.py", LOUD))
        assert ended.code == 1
        assert "rank 1 on host2 failed first: exit code 1" in ended.stderr
        assert "the reason is told" in ended.stderr
        assert f"its log: host2:{logs}/1/rank.1/stderr" in ended.stderr
        assert ended.stdout == "out 0\n"
        printing = job.run(*BOTH, "--no-collect-logs", "--job", "p", "--", "sh", "-c", "echo said by $RANK; exit $RANK")
        assert "    said by 1\n" in printing.stderr
        assert f"its log: host2:{logs}/p/rank.1/stdout" in printing.stderr
        assert [list((job.folder / f"log_output/1/rank.{rank}").iterdir()) for rank in (0, 1)] == [[], []]
        for rank, host in enumerate(network.hosts):
            seen = subprocess.run(
                network.inside(host, "sh", "-c", f"cat {logs}/1/rank.{rank}/stdout; wc -c {logs}/1/rank.{rank}/stderr"),
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            assert seen.startswith(f"out {rank}\n{50_001 + (19 if rank else 0)} ")
        refused = job.run(*BOTH, "--no-collect-logs", "--job", "1", "--", "true")
        assert "a job named 1 has its logs in" in refused.stderr
        flood = "head -c 4000000 /dev/zero"
        ended = job.run(*BOTH, "--no-collect-logs", "--tee", "none", "--", "sh", "-c", flood)
        assert ended.code == 0, ended.stderr
        assert re.search(rf"host2:{logs}/2/rank.1/stdout lacks 2\d+ bytes", ended.stderr), ended.stderr
        ended = job.run(*BOTH, "--no-collect-logs", "--", "true")
        assert ended.code == 2
        assert f"host2: the disk of {logs} is full there; type --log-dir DIR, or --collect-logs" in ended.stderr
    finally:
        for host in network.hosts:
            subprocess.run(network.inside(host, "umount", logs), check=True)


def test_logs_that_stay_are_where_they_always_are_on_a_common_file_system(job, refused):
    ended = job.run(*BOTH, "--no-collect-logs", "--tee", "all", "--", sys.executable, job.write("train.py", LOUD))
    assert ended.code == 1
    assert [job.log(rank) for rank in (0, 1)] == ["out 0\n", "out 1\n"]
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert job.run("--rank", "1", command="logs").stdout == "out 1\n"
    said = refused("-n", "1", "--no-collect-logs", "--", "true")
    assert "--no-collect-logs is for other hosts, but the job is on this one" in said


@pytest.mark.slow
def test_logs_that_stay_go_on_after_a_restart(job):
    again = ["--no-collect-logs", "--max-restarts", "1", "--grace", "1", "--", "sh", "-c"]
    ended = job.run(
        *BOTH, *again, "echo $TORCHELASTIC_RESTART_COUNT; exit $((RANK * (1 - TORCHELASTIC_RESTART_COUNT)))"
    )
    assert ended.code == 0, ended.stderr
    assert re.fullmatch(r"0\n\[shardwright: restart 1 of 1, .*\]\n1\n", job.log(1, job="1"))
