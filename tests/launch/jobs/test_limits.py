"""Hosts that allow too little: the limit is named, with what to type; and what killed ranks leave is removed."""

import ctypes
import glob
import os
import shutil
import subprocess

import pytest

import shardwright as sw
from launching import COMMAND
from ranks import run_ranks
from shardwright.errors import WorldError
from shardwright.launch.joblog.judge import RankEnd

KILLED = """
    import multiprocessing.util, os, sys, time
    from multiprocessing.connection import Listener
    listener = Listener(family="AF_UNIX")
    open(f"folder.{os.environ['RANK']}", "w").write(multiprocessing.util.get_temp_dir())
    if os.environ["RANK"] == "1": os.kill(os.getpid(), 9)
    time.sleep(100)
"""


@pytest.mark.parametrize(
    "option", [[], pytest.param(["--no-preload"], marks=pytest.mark.slow)], ids=["forked", "executed"]
)
def test_temporary_folders_of_killed_ranks_are_removed(launching, option):
    text = KILLED if not option else f"    import shardwright as sw\n    sw.init(timeout=60)\n{KILLED}"
    script = launching.write("train.py", text.replace("\n    import shardwright", "import shardwright"))
    before = set(glob.glob("/tmp/pymp-*"))
    light = {} if option else launching.light_torch()
    ended = launching.run("-n", "2", "--grace", "0.2", *option, script, env=light)
    assert ended.code == 128 + 9, ended.stderr
    folders = {(launching.folder / f"folder.{rank}").read_text() for rank in range(2)}
    assert not [folder for folder in folders if os.path.exists(folder)]
    assert not folders & before


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("RuntimeError: accept: Too many open files", "type `ulimit -n 65536`"),
        ("OSError: [Errno 24] Too many open files: 'x'", "type `ulimit -n 65536`"),
        ("RuntimeError: unable to open shared memory object </torch_1_2_0> in read-write mode", "--shm-size=2g"),
        ("RuntimeError: unable to write to file </torch_22_1>: No space left on device (28)", "--shm-size=2g"),
        ("RuntimeError: DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that dataloader's "
         "workers are out of shared memory.", "type `mount -o remount,size=2G /dev/shm`"),
        ("    sl = self._semlock = _multiprocessing.SemLock(\nOSError: [Errno 28] No space left on device", "/dev/shm"),
    ],
)  # fmt: skip
def test_errors_of_limits_have_a_remedy(said, remedy):
    end = RankEnd(0, 1, 0.0, stderr_tail=f"Traceback (most recent call last):\n{said}\n".encode())
    [line] = end.remedy()
    assert remedy in line
    assert RankEnd(0, 1, 0.0, stderr_tail=b"OSError: [Errno 28] No space left on device: 'x'").remedy() == []


def without(what, *words):
    """Runs a command in a namespace of its own that lacks something."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a namespace of its own needs root and the program unshare")
    if subprocess.run(["unshare", f"--{what}", "true"], capture_output=True).returncode:
        pytest.skip(f"unshare --{what} is not allowed here")
    return ["unshare", f"--{what}", *words]


def init_without_a_network():
    """What is said where a rank has a network of its own, with nothing in it."""
    assert ctypes.CDLL(None).unshare(0x40000000) == 0, "CLONE_NEWNET"
    with pytest.raises(WorldError) as caught:
        sw.init(timeout=300)
    return str(caught.value)


def test_a_host_without_a_loopback_is_told_of_at_once(launching):
    script = launching.write("train.py", "import shardwright as sw\nsw.init(timeout=300)\n")
    lacking = "ranks of one host meet at 127.0.0.1, which cannot be reached: Network is unreachable; type `ip link set"
    words = without("net", COMMAND, "launch", "-n", "2", script)
    done = subprocess.run(words, cwd=launching.folder, capture_output=True, text=True, timeout=100)
    assert (done.returncode, lacking in done.stderr) == (2, True), done.stderr
    for said in run_ranks(2, init_without_a_network):  # of another launcher
        assert lacking in said


def test_too_few_open_files_are_told_of(launching):
    script = launching.write("train.py", "")
    words = ["bash", "-c", f"ulimit -n 12; exec {COMMAND} launch -n 2 {script}"]
    done = subprocess.run(words, cwd=launching.folder, capture_output=True, text=True, timeout=100)
    assert done.returncode in (1, 2), done.stderr
    assert "type `ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (launching.folder / "log_output").exists()
