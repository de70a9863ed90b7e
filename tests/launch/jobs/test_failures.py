"""Every way in which a job can go wrong: what is said, how soon, and that no process is left."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launching import SEEN_BY_SUPERVISOR, MemoryGroup, is_alive, wait_until

PYTHON = ["--", sys.executable]
WAIT = """
    import os, signal, sys, time
    rank = int(os.environ["RANK"])
    with open(f"new.{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"new.{rank}", f"up.{rank}")
    def wait():
        while len([n for n in os.listdir() if n.startswith("up.")]) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["preload", pytest.param("singly", marks=pytest.mark.slow)])
def test_exit_1_names_rank_traceback_and_log(launching, how):
    script = launching.write(
        "train.py",
        """
    import signal
    def read_batch():
        raise ValueError("a bad batch")
    def told(*_):
        open(f"told.{rank}", "w").write(str(os.path.exists("log_output/1/failed.json")))
        sys.exit(3)
    signal.signal(signal.SIGTERM, told)
    """
        + WAIT
        + """
    wait()
    if rank == 2:
        read_batch()
    time.sleep(600)
    """,
    )
    how = ["--no-preload"] if how == "singly" else []
    ended = launching.run("-n", "4", *how, script, env=launching.light_torch())
    assert ended.code == 1
    assert "rank 2 failed first: exit code 1, ValueError: a bad batch" in ended.stderr
    assert "in read_batch" in ended.stderr
    assert "supervisor/zygote.py" not in ended.stderr
    assert "its log: log_output/1/rank.2/stderr" in ended.stderr
    assert launching.told("failed.json")["rank"] == 2
    assert "ValueError: a bad batch" in launching.told("failed.json")["cause"]
    assert launching.told("job.json")["status"] == "failed"
    assert launching.told("job.json")["exit_code"] == 1
    told = [(launching.folder / f"told.{rank}").read_text() for rank in (0, 1, 3)]
    assert told == ["True"] * 3, "the job is marked as failed before the others are ended"


def test_out_of_memory_kill_is_told_from_another_kill(launching):
    script = launching.write(
        "train.py",
        """
    import os, sys, time
    group = sys.argv[1]
    if os.environ["RANK"] == "0":
        time.sleep(600)
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
    """
        + SEEN_BY_SUPERVISOR
        + """
    everything = bytearray(200 << 20)
    everything[::4096] = bytes(len(everything[::4096]))
    """,
    )
    with MemoryGroup(64 << 20) as group:
        ended = launching.run("-n", "2", *PYTHON, script, str(group))
    assert ended.code == 137
    assert "rank 1 failed first: killed by the kernel for lack of memory" in ended.stderr


@pytest.mark.slow
def test_a_kill_is_not_for_memory_though_the_kernel_has_killed_a_process_in_another_group(launching):
    script = launching.write(
        "train.py",
        """
    import os, signal, subprocess, sys
    grow = "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid())); b'x' * (200 << 20)"
    code = subprocess.run([sys.executable, "-c", grow, sys.argv[1]]).returncode
    os.kill(os.getpid(), signal.SIGKILL if code == -signal.SIGKILL else signal.SIGABRT)
    """,
    )
    with MemoryGroup(64 << 20) as group:
        ended = launching.run("-n", "1", *PYTHON, script, str(group))
    assert ended.code == 137, ended.stderr
    assert "rank 0 failed first: killed by SIGKILL\n" in ended.stderr


def test_a_rank_that_ignores_term_is_killed_after_the_grace(launching):
    script = launching.write(
        "train.py",
        "    import signal\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + WAIT
        + "    wait()\n    if rank == 0: sys.exit(5)\n    time.sleep(600)\n",
    )
    ended = launching.run("-n", "3", "--grace", "0.5", *PYTHON, script)
    assert ended.code == 5
    [attempt] = launching.told("run.json")["attempts"]
    assert attempt["ended_s"] - launching.told("failed.json")["time_s"] > 0.5
    assert "ranks 1-2 had to be killed" in ended.stderr


GRANDCHILDREN = (
    WAIT
    + """
    import subprocess
    def sleeps(kind):
        try:
            return open(f"/proc/{int(open(f'{kind}.{rank}').read())}/comm").read() == "sleep\\n"
        except (OSError, ValueError):
            return False
    subprocess.Popen(["setsid", "sh", "-c", f"sleep 300 & echo $! > marked.{rank}; wait"])
    subprocess.Popen(["env", "-i", "/bin/sh", "-c", f"setsid /bin/sleep 300 & echo $! > unmarked.{rank}"])
    while not (sleeps("marked") and sleeps("unmarked")): time.sleep(0.01)
    open(f"grand.{rank}", "w").write("up")
    while not all(os.path.exists(f"grand.{r}") for r in range(int(os.environ["WORLD_SIZE"]))): time.sleep(0.01)
"""
)


def grandchildren(launching, ranks):
    for rank in range(ranks):
        launching.wait_for_file(f"grand.{rank}")
    return [int(launching.wait_for_file(f"{kind}.{rank}")) for kind in ("marked", "unmarked") for rank in range(ranks)]


def test_grandchildren_that_a_good_run_leaves_are_named_and_ended(launching):
    script = launching.write("train.py", GRANDCHILDREN)
    launcher = launching.start("-n", "2", *PYTHON, script)
    pids = grandchildren(launching, 2)
    ended = launching.finish(launcher)
    assert ended.code == 0
    assert "left processes behind, which are ended now: " in ended.stderr
    assert "sleep" in ended.stderr
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("how", ["preload", pytest.param("singly", marks=pytest.mark.slow)])
def test_a_launcher_killed_with_sigkill_leaves_nothing(launching, how):
    script = launching.write(
        "train.py", GRANDCHILDREN + "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(600)\n"
    )
    how = [] if how == "preload" else PYTHON
    launcher = launching.start("-n", "2", *how, script, env=launching.light_torch())
    pids = grandchildren(launching, 2)
    launcher.kill()
    launching.assert_none_left()
    assert not any(map(is_alive, pids))


def test_a_supervisor_killed_with_sigkill_is_reported_and_leaves_nothing(launching):
    script = launching.write("train.py", GRANDCHILDREN + "    time.sleep(600)\n")
    launcher = launching.start("-n", "2", *PYTHON, script)
    pids = grandchildren(launching, 2)
    supervisor = next(pid for pid, command in launching.survivors().items() if "launch.supervisor" in command)
    os.kill(supervisor, signal.SIGKILL)
    ended = launching.finish(launcher)
    assert ended.code == 137
    assert "the supervisor of the ranks was killed by SIGKILL, and all ranks with it" in ended.stderr
    assert launching.told("failed.json")["rank"] is None
    launching.assert_none_left()
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_ctrl_c_ends_a_job_of_which_the_supervisor_is_stopped(launching):
    launcher = launching.start("-n", "2", *PYTHON, interruptible(launching, ignore=False))
    wait_for_ranks(launching, 2)
    supervisor = next(pid for pid, command in launching.survivors().items() if "launch.supervisor" in command)
    os.kill(supervisor, signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    assert launching.finish(launcher).code == 130


def interruptible(launching, ignore):
    handler = "signal.SIG_IGN" if ignore else "lambda *_: (print('saved', flush=True), sys.exit(0))"
    return launching.write(
        "train.py",
        WAIT + f"    signal.signal(signal.SIGINT, {handler})\n    print('up', flush=True)\n    time.sleep(600)\n",
    )


def wait_for_ranks(launching, ranks):
    for rank in range(ranks):
        wait_until(lambda r=rank: (launching.folder / f"log_output/1/rank.{r}/stdout").exists(), 60, "the log exists")
        wait_until(lambda r=rank: "up\n" in launching.log(r), 60, f"rank {rank} runs")


def test_ctrl_c_twice_kills(launching):
    launcher = launching.start("-n", "2", "--grace", "600", *PYTHON, interruptible(launching, ignore=True))
    wait_for_ranks(launching, 2)
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: "Ctrl-C again" in launcher.stderr.readline(), 60, "the first is answered")
    launcher.send_signal(signal.SIGINT)
    ended = launching.finish(launcher)
    assert ended.code == 130
    assert "ranks 0-1 had to be killed" in ended.stderr


def test_ctrl_c_while_torch_is_imported(launching):
    torch = launching.light_torch("import time\nopen('importing', 'w').write('x')\ntime.sleep(600)\n")
    launcher = launching.start("-n", "2", launching.write("train.py", ""), env=torch)
    launching.wait_for_file("importing")
    launcher.send_signal(signal.SIGINT)
    ended = launching.finish(launcher)
    assert ended.code == 130
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_other_signals_are_passed_on_and_those_of_users_end_nothing(launching, signum):
    script = launching.write(
        "train.py",
        WAIT + "    for s in (1, 15): signal.signal(s, lambda s, f: (print('got', s), sys.exit(0)))\n"
        "    signal.signal(signal.SIGUSR1, lambda *_: print('checkpoint', flush=True))\n"
        "    print('up', flush=True)\n    while True: time.sleep(600)\n",
    )
    launcher = launching.start("-n", "2", "--max-restarts", "2", *PYTHON, script)
    wait_for_ranks(launching, 2)
    launcher.send_signal(signal.SIGUSR1)
    wait_until(lambda: all("checkpoint\n" in launching.log(rank) for rank in (0, 1)), 60, "all have heard of it")
    launcher.send_signal(signum)
    ended = launching.finish(launcher)
    assert (ended.code, "restart" in ended.stderr) == (128 + signum, False)
    assert launching.log(1) == f"up\ncheckpoint\ngot {int(signum)}\n"


def test_a_stopped_rank_is_named_and_can_go_on_and_ctrl_c_ends_it(launching):
    script = launching.write("train.py", WAIT + "    wait()\n    time.sleep(600)\n")
    launcher = launching.start("-n", "2", *PYTHON, script)
    pid = int(launching.wait_for_file("up.1"))
    launching.wait_for_file("up.0")
    for goes_on in (True, False):
        os.kill(pid, signal.SIGSTOP)
        line = launcher.stderr.readline()
        assert f"rank 1 is stopped (SIGSTOP) and the job waits for it; `kill -CONT {pid}` continues it" in line
        assert launcher.poll() is None
        if goes_on:
            os.kill(pid, signal.SIGCONT)
            assert "rank 1 continues" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    ended = launching.finish(launcher)
    assert ended.code == 130
    assert "had to be killed" not in ended.stderr


def test_an_early_return_of_0_is_named_beside_a_failure(launching):
    script = launching.write(
        "train.py",
        WAIT + "    if rank == 0: sys.exit(0)\n"
        "    while '\"ended\"' not in open('log_output/1/ranks.jsonl').read(): time.sleep(0.01)\n    sys.exit(9)\n",
    )
    ended = launching.run("-n", "2", *PYTHON, script)
    assert ended.code == 9
    assert "rank 1 failed first: exit code 9" in ended.stderr
    assert re.search(r"rank 0 returned 0, \d+\.\d{3} s before\n", ended.stderr), ended.stderr


def test_the_cause_is_told_from_its_echoes(launching):
    script = launching.write(
        "train.py",
        WAIT
        + """
    def lives(pid):
        try:
            return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False
    wait()
    victim = int(open("up.2").read())
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while lives(victim): pass
    raise RuntimeError("Connection closed by peer")
    """,
    )
    ended = launching.run("-n", "4", *PYTHON, script)
    assert ended.code == 137
    assert "rank 2 failed first: killed by SIGKILL" in ended.stderr


def test_an_exception_counts_from_when_it_was_raised(launching):
    script = launching.write(
        "train.py",
        """
    import atexit, os, sys, time
    if os.environ["RANK"] == "1":
        atexit.register(time.sleep, 5)
        open("new", "w").write(os.environ["TORCHELASTIC_ERROR_FILE"])
        os.rename("new", "where")
        raise ValueError("the cause")
    while not (os.path.exists("where") and os.path.exists(open("where").read())): time.sleep(0.01)
    os._exit(7)
    """,
    )
    ended = launching.run("-n", "2", script, env=launching.light_torch())
    assert "rank 1 failed first: exit code 1, ValueError: the cause" in ended.stderr
    assert ended.code == 1


def test_ctrl_c_at_a_terminal_lets_ranks_end_by_themselves(launching):
    """It goes to the launcher alone, which passes it on once."""
    script = interruptible(launching, ignore=False)
    master, slave = os.openpty()
    adopt = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    environment = os.environ | {"SHARDWRIGHT_TEST": launching.mark}
    command = [str(Path(sys.executable).with_name("shardwright")), "launch", "-n", "2", *PYTHON, script]
    launcher = subprocess.Popen(
        [sys.executable, "-c", adopt, *command], cwd=launching.folder, env=environment,
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    launching.running.append(launcher)
    os.close(slave)
    wait_for_ranks(launching, 2)
    os.write(master, b"\x03")
    assert launcher.wait(60) == 130
    said = os.read(master, 10_000).decode()
    os.close(master)
    assert [launching.log(rank) for rank in range(2)] == ["up\nsaved\n"] * 2
    assert "SIGINT: ending 2 ranks" in said
    assert "had to be killed" not in said
    assert "failed" not in said
    assert launching.told("job.json")["status"] == "interrupted"
    assert not (launching.folder / "log_output/1/failed.json").exists()
