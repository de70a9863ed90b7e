"""The failures of a job that two hosts bring along: what is said, how soon, and that no process is left on either."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launching import wait_until
from many_hosts import BOTH, LEASE_S, PYTHON, SLACK_S, SLEEP, STUBBORN, UP, wait_until_alone

pytestmark = pytest.mark.slow


# --- ranks


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        pytest.param("os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_is_named_with_its_host(job, how, code, cause):
    script = job.write(
        "train.py",
        "    import signal\n    signal.signal(15, lambda *_: (open(f'told.{rank}', 'w').write("
        "str(os.path.exists(os.environ['SHARDWRIGHT_FAILED_MARK']))), sys.exit(0)))\n"
        + UP
        + f"    wait()\n    if rank == 1: {how}\n    time.sleep(100)\n",
    )
    ended = job.run(*BOTH, *PYTHON, script)
    assert ended.code == code, ended.stderr
    assert f"rank 1 on host2 failed first: {cause}" in ended.stderr
    assert (job.folder / "told.0").read_text() == "True", "the job is marked as failed before rank 0 is told to end"
    assert job.told("failed.json")["rank"] == 1
    report = job.told("run.json")
    assert report["cause"] == job.told("failed.json")["cause"]
    assert [rank["how"] for rank in report["ranks"]] == ["returned 0", cause]
    assert [host["ranks"] for host in report["hosts"]] == [[0], [1]]


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_failures_50_ms_apart_the_first_is_named_though_a_clock_is_5_s_ahead(job, first):
    script = job.write(
        "train.py",
        UP
        + f"""
    wait()
    ended = '"rank": {first}, "state": "ended"'
    while rank != {first} and ended not in open("log_output/1/ranks.jsonl").read(): time.sleep(0.005)
    time.sleep(0.05)
    os._exit(10 + rank)
    """,
    )
    skewed = [sys.executable, str(Path(__file__).parents[1] / "skewed_launch.py"), "host1", "5", "host1:1,host2:1"]
    ended = subprocess.run(
        [*skewed, sys.executable, script], cwd=job.folder, env=os.environ | {"PATH": job.path}, timeout=60,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 10 + first, ended.stderr
    assert f"rank {first} on host{first + 1} failed first: exit code {10 + first}" in ended.stderr
    assert job.told("run.json")["started_s"] < job.told("failed.json")["time_s"] < job.told("run.json")["ended_s"], (
        "by this host's clock"
    )
    ahead = {host["name"]: host["clock_ahead_s"] for host in job.told("run.json")["hosts"]}
    assert ahead["host1"] == pytest.approx(5, abs=1)
    assert ahead["host2"] == pytest.approx(0, abs=1)


def test_a_stopped_rank_is_named_and_ctrl_c_ends_the_job(job):
    launcher = job.start(*BOTH, *PYTHON, job.write("train.py", SLEEP))
    job.wait_for_ranks(2)
    [pid] = [pid for pid, command in job.on_host("host2").items() if "train.py" in command]
    os.kill(pid, signal.SIGSTOP)
    line = launcher.stderr.readline()
    assert "rank 1 is stopped (SIGSTOP) and the job waits for it; `kill -CONT" in line
    assert "on host2 continues it" in line
    launcher.send_signal(signal.SIGINT)
    assert job.finish(launcher).code == 130


# --- what stands between


def test_a_launcher_killed_with_sigkill_leaves_nothing(job):
    launcher = job.start(*BOTH, *PYTHON, job.write("train.py", STUBBORN))
    job.wait_for_ranks(2)
    launcher.kill()
    job.assert_none_left(within_s=SLACK_S)


def test_an_agent_killed_with_sigkill_is_told_as_the_loss_of_its_host(job):
    """Where the shell of the host, which is host2 by another name, warns of something, that is not told for it."""
    launcher = job.start("-H", "host1:1,noisy:1", "--grace", "1", *PYTHON, job.write("train.py", STUBBORN))
    job.wait_for_ranks(2)
    os.kill(job.agent("host2"), signal.SIGKILL)
    wait_until_alone(job, "host2", SLACK_S)
    ended = job.finish(launcher)
    assert ended.code == 1, ended.stderr
    killed = "the agent of noisy, which stands there above the ranks, was killed by a signal, and all ranks with it"
    assert killed in ended.stderr
    assert job.told("failed.json")["rank"] is None


def test_a_lost_host_is_the_cause_of_what_its_peers_complain_about(job):
    script = job.write(
        "train.py",
        """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    open(f"up.{dist.get_rank()}", "w").write("x")
    while True: dist.all_reduce(torch.ones(1))
    """,
    )
    launcher = job.start(*BOTH, script)
    job.wait_for_ranks(2)
    os.kill(job.agent("host2"), signal.SIGKILL)
    ended = job.finish(launcher)
    assert ended.code == 1
    assert "shardwright: the agent of host2, which stands there above the ranks, was killed by" in ended.stderr
    assert "failed first" not in ended.stderr
    assert job.told("failed.json")["rank"] is None


def test_a_killed_ssh_client_is_told(job):
    launcher = job.start(*BOTH, "--grace", "1", *PYTHON, job.write("train.py", STUBBORN))
    job.wait_for_ranks(2)
    os.kill(job.clients()[-1], signal.SIGKILL)
    ended = job.finish(launcher)
    assert ended.code == 1, ended.stderr
    assert "ended (was killed by SIGKILL), and all ranks with it" in ended.stderr


def test_a_supervisor_killed_with_sigkill_is_told(job):
    launcher = job.start(*BOTH, *PYTHON, job.write("train.py", SLEEP))
    job.wait_for_ranks(2)
    [pid] = [pid for pid, command in job.on_host("host2").items() if "launch.supervisor" in command]
    os.kill(pid, signal.SIGKILL)
    ended = job.finish(launcher)
    assert ended.code == 137, ended.stderr
    assert "the supervisor of the ranks on host2 was killed by SIGKILL, and all ranks with it" in ended.stderr


def test_both_sides_end_within_the_lease_when_the_line_is_cut(job, network):
    launcher = job.start(*BOTH, "--lease", str(LEASE_S), "--grace", "0.5", *PYTHON, job.write("train.py", STUBBORN))
    job.wait_for_ranks(2)
    try:
        network.cut("host2")
        cut_s = time.monotonic()
        wait_until_alone(job, "host2", LEASE_S + SLACK_S)
        ended = job.finish(launcher)
        assert time.monotonic() - cut_s < LEASE_S + 0.5 + 2 * SLACK_S
    finally:
        network.mend("host2")
    assert ended.code == 1, ended.stderr
    assert f"nothing was heard from host2 for {LEASE_S:g} s: the host or the line to it is down" in ended.stderr


def test_a_stopped_launcher_loses_its_hosts(job):
    launcher = job.start(*BOTH, "--lease", "1", *PYTHON, job.write("train.py", STUBBORN))
    job.wait_for_ranks(2)
    launcher.send_signal(signal.SIGSTOP)
    wait_until_alone(job, "host1", 1 + SLACK_S)
    wait_until_alone(job, "host2", 1 + SLACK_S)
    launcher.send_signal(signal.SIGCONT)
    assert job.finish(launcher).code == 1


# --- before anything starts


def test_all_hosts_that_cannot_be_used_are_listed_at_once(job):
    hosts = "host1,refused,changed,unknown,gone,stranger,bare,old,noisy"
    ended = job.run("-H", hosts, "--connect-timeout", "4", "--", "true", timeout_s=30)
    assert ended.code == 2
    assert ended.seconds < 4 + 2 * SLACK_S
    assert "7 of 9 hosts cannot be used:" in ended.stderr
    for line in (
        "refused: no sshd answers there (ssh: connect to host",
        "changed: its host key is not the one in known_hosts: the host was installed anew, or it is not that host; "
        "where you know why, type `ssh-keygen -R changed`",
        "unknown: its host key is not known here; type `ssh unknown true` once and compare it",
        "gone: it cannot be reached (ssh: connect to host",
        "stranger: ssh may not log in (",
        "type `ssh-copy-id stranger`",
        "bare: there is no ",
        "/nowhere/python: not found); type --python PATH, one that each host has",
        "old: ",
        "is Python 3.8.10 there, expected 3.11 or newer; type --python PATH",
    ):
        assert line in ended.stderr.replace("No such file or directory", "not found"), ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (job.folder / "log_output").exists()


def test_ctrl_c_while_hosts_are_asked(job, network):
    with socket.create_server((network.address, 0)) as mute:  # takes what ssh says, and answers nothing
        with network.config.open("a") as file:
            file.write(f"Host mute\n  HostName {network.address}\n  Port {mute.getsockname()[1]}\n")
        launcher = job.start("-H", "host1:1,mute:1", "--connect-timeout", "600", "--", "true")
        wait_until(lambda: len(job.clients()) == 2, 60, "ssh runs")
        launcher.send_signal(signal.SIGINT)
        ended = job.finish(launcher)
    assert ended.code == 130
    assert "Traceback" not in ended.stderr
    assert not (job.folder / "log_output").exists()


def test_what_is_not_on_a_host_is_said(job):
    program = job.write("train.py", SLEEP)
    ended = job.run(*BOTH, "--wdir", "/nowhere", *PYTHON, program)
    assert ended.code == 2
    assert ended.stderr.count("the working directory /nowhere cannot be entered: No such file or directory;") == 2
    ended = job.run(*BOTH, "--wdir", "/etc", program)
    assert "host2: there is no train.py in /etc; copy it there (--stage), or type --wdir DIR" in ended.stderr
    ended = job.run(*BOTH, "tarin.py")
    assert f"host2: there is no tarin.py in {job.folder}; copy it there (--stage), or type --wdir" in ended.stderr
    assert "does not exist" not in ended.stderr, "it need not be here"
    ended = job.run(*BOTH, "--wdir", "/etc", "--", "no-such-program")
    assert "host1: there is no program no-such-program on its PATH" in ended.stderr


def test_variables_that_name_no_device_of_a_host_are_told(job):
    names = ["-x", "NCCL_SOCKET_IFNAME=nic1", "-x", "GLOO_SOCKET_IFNAME=nic1", "-x", "host2:GLOO_SOCKET_IFNAME=nic2"]
    ended = job.run(*BOTH, *names, "--backend", "nccl", "--", "true")
    assert ended.code == 2
    wrong = (
        "  host2: NCCL_SOCKET_IFNAME=nic1 names none of its devices, which are lo, nic2; leave it out, or set one of"
    )
    assert wrong in ended.stderr
    assert "GLOO_SOCKET_IFNAME=" not in ended.stderr
    assert "  host1: NCCL_SOCKET_IFNAME" not in ended.stderr
    for host in ("host1", "host2"):
        assert f"  {host}: --backend nccl needs GPUs, of which ranks see none; type --backend gloo" in ended.stderr
    assert job.run(*BOTH, *names[2:], "--", "true").code == 0


def test_a_port_that_is_taken_on_the_first_host_is_refused(job, network):
    hold = "import socket, sys; s = socket.create_server(('', 23456)); print('up', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(network.inside("host1", sys.executable, "-c", hold), **pipes) as holder:
        assert holder.stdout.readline() == b"up\n"
        ended = job.run(*BOTH, "--port", "23456", "--", "true")
        holder.stdin.close()
    assert ended.code == 2
    assert "1 of 2 hosts cannot be used:\n  host1: --port 23456 cannot be had: Address already in use" in ended.stderr


def test_ranks_beyond_the_slots_and_an_interface_that_is_not_there(job):
    ended = job.run("-H", "host1:2,host2:2", "-n", "5", "--", "true")
    assert "-n 5 is more than the slots of 2 hosts, 4 slots: host1:2, host2:2; leave -n out" in ended.stderr
    ended = job.run(*BOTH, "--interface", "eth7", "--", "true")
    assert ended.code == 2
    assert "host1 has no address on --interface eth7; its addresses: 198." in ended.stderr
    assert "(nic1). Type --interface NAME with one of those" in ended.stderr


# --- signals and streams


def test_ctrl_c_once_lets_ranks_end_and_twice_kills(job):
    heed = "    import signal\n    signal.signal(2, lambda *_: (print('saved', flush=True), rank and sys.exit(0)))\n"
    wait = heed + UP
    launcher = job.start(
        *BOTH, "--grace", "600", *PYTHON, job.write("train.py", wait + "    while True: time.sleep(1)")
    )
    job.wait_for_ranks(2)
    launcher.send_signal(signal.SIGINT)
    assert "SIGINT: ending 2 ranks, which have 600 s" in launcher.stderr.readline()
    wait_until(lambda: all("saved" in job.log(rank) for rank in (0, 1)), 60, "the ranks have heard of it")
    launcher.send_signal(signal.SIGINT)
    ended = job.finish(launcher)
    assert ended.code == 130
    assert "rank 0 had to be killed" in ended.stderr


def test_a_hangup_does_not_end_a_job_under_nohup(job):
    script = job.write("train.py", UP + "    while not os.path.exists('go'): time.sleep(0.01)\n")
    launcher = job.start(*BOTH, *PYTHON, script, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    job.wait_for_ranks(2)
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    job.write("go", "go")
    assert job.finish(launcher).code == 0


def test_a_slow_line_holds_no_rank_up_and_what_it_loses_is_counted(job, network):
    """What takes 80 s through a line of 1 Mbit/s."""
    script = job.write(
        "train.py",
        UP
        + """
    start = time.monotonic()
    for _ in range(100):
        os.write(1, b"x" * 99_999 + b"\\n")
    with open(f"took.{rank}", "w") as file: file.write(repr(time.monotonic() - start))
    """,
    )
    network.slow("host2", 1_000_000)
    try:
        launcher = job.start(*BOTH, "--tee", "none", *PYTHON, script)
        took_s = float(job.wait_for_file("took.1"))
        ended = job.finish(launcher, 90)
    finally:
        network.unslow("host2")
    assert took_s < 60
    assert ended.code == 0, ended.stderr
    log = job.log(1)
    assert "bytes are missing here: the line between the hosts did not take them]" in log
    assert "lacks" in ended.stderr


def test_no_job_is_started_with_a_full_log_disk(job):
    (job.folder / "log_output").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", "log_output"], cwd=job.folder, check=True)
    try:
        (job.folder / "log_output/ballast").write_bytes(bytes(5 << 19))
        ended = job.run(*BOTH, *PYTHON, job.write("train.py", UP))
    finally:
        subprocess.run(["umount", "log_output"], cwd=job.folder, check=True)
    assert ended.code == 2
    assert "nothing was started:\n  the disk of log_output here is full; type --log-dir DIR" in ended.stderr


def test_two_jobs_at_once_and_a_low_limit_of_open_files(job):
    import resource

    script = job.write("train.py", UP + "    print(os.environ['MASTER_PORT'])\n    time.sleep(1)\n")
    low = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))}
    jobs = [job.start("-H", "host1:2,host2:2", "--job", name, *PYTHON, script, **low) for name in ("a", "b")]
    assert [job.finish(launcher).code for launcher in jobs] == [0, 0]
    ports = {job.log(rank, job=name) for name in ("a", "b") for rank in range(4)}
    assert len(ports) == 2
