"""What ranks write: kept whole, shown as asked, and never a reason for a rank to wait."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from launching import COMMAND, wait_until
from shardwright.launch.joblog.job import JobState, create_job_folder

PYTHON = ["--", sys.executable]
# What a launcher is told to show, while a rank writes.
DRAWS = """
from shardwright.launch.console import Console
console = Console(frozenset({0}))
for text in ("saving: 2 s", "saving: 3 s"):
    console.draw(text)
console.output(0, "stdout", b"epoch 1\\n")
console.output(0, "stderr", b"half a ")
console.draw("not inside of a line")
console.output(0, "stderr", b"line\\n")
console.draw("saving: 4 s")
console.close()
"""


def test_what_is_waited_for_is_drawn_on_a_terminal_and_wiped_away_before_anything_else():
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        subprocess.run([sys.executable, "-c", DRAWS], stdout=theirs, stderr=theirs, check=True, timeout=60)
        os.close(theirs)
        wipe = "\r\x1b[K"
        expected = f"{wipe}saving: 2 s{wipe}saving: 3 s{wipe}epoch 1\r\nhalf a line\r\n{wipe}saving: 4 s{wipe}"
        seen = b""
        with contextlib.suppress(OSError):  # nobody is at its other end any more
            while data := screen.read(1000):
                seen += data
        assert seen.decode() == expected
    piped = subprocess.run([sys.executable, "-c", DRAWS], capture_output=True, check=True, timeout=60)
    assert (piped.stdout, piped.stderr) == (b"epoch 1\n", b"half a line\n")


SLOW = """
import os, time
from shardwright.launch.console import Console
write = os.write
os.write = lambda fd, data: (time.sleep(0.6), write(fd, data))[1]
console = Console(frozenset({0}))
console.output(0, "stdout", b"last words\\n")
console.close(patience_s=0.1)
os._exit(0)
"""


def test_what_somebody_would_read_is_written_though_the_launcher_has_no_processor():
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, check=True, timeout=60)
    assert done.stdout == b"last words\n"


@pytest.mark.parametrize(
    ("tee", "shown"),
    [
        ([], "{} 0\n"),
        (["--tee", "0,2"], "[rank 0] {0} 0\n[rank 2] {0} 2\n"),
        pytest.param(["--tee", "none"], "", marks=pytest.mark.slow),
        pytest.param(["--tee", "1-2"], "[rank 1] {0} 1\n[rank 2] {0} 2\n", marks=pytest.mark.slow),
    ],
)
def test_each_rank_has_its_own_files_and_those_asked_for_are_shown(launching, tee, shown):
    script = launching.write(
        "train.py",
        """
    import os, sys
    print("out", os.environ["RANK"]); print("err", os.environ["RANK"], file=sys.stderr)
    """,
    )
    ended = launching.run("-n", "3", *tee, *PYTHON, script)
    assert ended.code == 0
    for said, stream in ((ended.stdout, "out"), (ended.stderr, "err")):
        assert sorted(said.splitlines()) == shown.format(stream).splitlines()
    for rank in range(3):
        assert launching.log(rank) == f"out {rank}\n"
        assert launching.log(rank, "stderr") == f"err {rank}\n"


def test_one_rank_is_shown_byte_by_byte_without_waiting_for_lines(launching):
    script = launching.write(
        "train.py",
        r"""
    import os, time
    os.write(1, b"loss: ")
    while not os.path.exists("go"): time.sleep(0.01)
    os.write(1, b"\r 10%\r 20%\xff\xfe\n")
    """,
    )
    launcher = launching.start("-n", "1", *PYTHON, script, text=False)
    assert launcher.stdout.read(6) == b"loss: "
    launching.write("go", "go")
    stdout, _ = launcher.communicate(timeout=60)
    assert stdout == b"\r 10%\r 20%\xff\xfe\n"


LINES = """
from shardwright.launch.console import Console
console = Console(frozenset({0, 1}))
for _ in range(200):
    for rank in (0, 1):
        console.output(rank, "stdout", b"half of a %d" % rank)
    for rank in (1, 0):
        console.output(rank, "stdout", b" line\\n")
console.close()
"""


def test_with_prefixes_lines_that_come_in_pieces_are_whole():
    shown = subprocess.run([sys.executable, "-c", LINES], capture_output=True, check=True, timeout=60).stdout
    lines = shown.splitlines()
    assert len(lines) == 400
    assert [lines.count(b"[rank %d] half of a %d line" % (rank, rank)) for rank in (0, 1)] == [200, 200]


def test_with_prefixes_unfinished_lines_appear(launching):
    script = launching.write(
        "train.py",
        r"""
    import os, time
    rank = os.environ["RANK"].encode()
    for i in range(200):
        os.write(1, b"all of a " + rank + b" line\n")
    os.write(1, b" 10%\r 20%\r\n\xff" + rank)
    while not os.path.exists("go"): time.sleep(0.01)
    os.write(1, b" end\n")
    """,
    )
    launcher = launching.start("-n", "2", "--tee", "all", *PYTHON, script, text=False)
    seen = b""
    while not (b"[rank 0] \xff0\n" in seen and b"[rank 1] \xff1\n" in seen):
        seen += os.read(launcher.stdout.fileno(), 65536)
    launching.write("go", "go")
    seen += launcher.communicate(timeout=60)[0]
    lines = seen.split(b"\n")
    for rank in (b"0", b"1"):
        prefix = b"[rank " + rank + b"] "
        assert lines.count(prefix + b"all of a " + rank + b" line") == 200
        assert lines.count(prefix + b" 10%") == lines.count(prefix + b" 20%") == lines.count(prefix + b" end") == 1
    assert all(re.match(rb"\[rank [01]\] ", line) for line in lines if line)


# A child starts with its parent's peak, so the launcher gets a small parent of its own instead of the test's process.
PEAK_OF_A_CHILD = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(child.pid, 0)
print(usage.ru_maxrss, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
@pytest.mark.parametrize("tee", ["0", "all"])
def test_a_line_of_100_megabytes_is_served_in_bounded_memory(launching, tee):
    script = launching.write(
        "train.py",
        """
    import os
    for i in range(100):
        os.write(1, b"x" * 1_000_000)
    """,
    )
    command = [COMMAND, "launch", "-n", "1" if tee == "0" else "2", "--tee", tee, *PYTHON, script]
    with (launching.folder / "shown").open("wb") as shown:
        done = subprocess.run(
            [sys.executable, "-c", PEAK_OF_A_CHILD, *command],
            cwd=launching.folder,
            stdout=shown,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 160_000, "KiB: 64 MB of queue and the interpreter"
    assert (launching.folder / "log_output/1/rank.0/stdout").stat().st_size == 100_000_000
    left_out = re.search(rb"shardwright: (\d+) bytes were not shown", done.stderr)
    assert (launching.folder / "shown").stat().st_size + (int(left_out[1]) if left_out else 0) >= 100_000_000


@pytest.mark.parametrize("blocked", ["stdout", pytest.param("both", marks=pytest.mark.slow)])
def test_a_console_that_nobody_reads_stops_no_rank(launching, blocked):
    script = launching.write(
        "train.py",
        """
    import os, sys
    for i in range(80):
        os.write(1, b"x" * 999_999 + b"\\n"); os.write(2, b"y" * 9_999 + b"\\n")
    open("done", "w").write("done")
    """,
    )
    read, write = os.pipe()
    said = launching.folder / "said"
    try:
        with said.open("wb") as file:
            launcher = launching.start(
                "-n", "1", *PYTHON, script, stdout=write, stderr=write if blocked == "both" else file
            )
        launching.wait_for_file("done", timeout_s=60)
        ended = launching.finish(launcher)
    finally:
        os.close(read)
        os.close(write)
    assert ended.code == 0
    assert len(launching.log(0)) == 80_000_000
    if blocked == "stdout":
        text = said.read_text()
        assert re.search(r"shardwright: \d+ bytes were not shown, since the console did not take them", text)


def test_a_console_that_goes_away_ends_nothing(launching):
    script = launching.write(
        "train.py",
        r"""
    import os
    for begin in range(0, 100_000, 100): os.write(1, b"".join(b"line %d\n" % i for i in range(begin, begin + 100)))
    """,
    )
    launcher = launching.start("-n", "1", *PYTHON, script)
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(60) == 0
    assert launching.log(0).endswith("line 99999\n")


def in_a_full_disk(command):
    """The command in a mount namespace of its own, where log_output is one megabyte; None if none may be made."""
    mount = 'mkdir -p log_output && mount -t tmpfs -o size=1m none log_output && exec "$@"'
    for flags in (["-m"], ["-Urm"]):
        if (
            shutil.which("unshare")
            and not subprocess.run(
                ["unshare", *flags, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
            ).returncode
        ):
            return ["unshare", *flags, "sh", "-c", mount, "sh", *command]
    return None


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.slow), 6])
def test_a_full_log_disk_is_reported_and_stops_no_rank(launching, code):
    script = launching.write(
        "train.py",
        f"""
    import os, sys, time
    for i in range(100):
        os.write(1, 30 * (999 * b"x" + b"\\n"))
    open(f"done.{{os.environ['RANK']}}", "w").write("done")
    while not (os.path.exists("done.0") and os.path.exists("done.1")): time.sleep(0.01)
    sys.exit({code})
    """,
    )
    shell = (
        f'"$0" launch -n 2 --tee 1 -- {sys.executable} {script}; code=$?; '
        "ls -l log_output/1/*/stdout >&2; ls -a log_output/1 >&2; cat log_output/1/*.json >&2; exit $code"
    )
    command = in_a_full_disk(["sh", "-c", shell, COMMAND])
    if command is None:
        pytest.skip("this user may not mount a small disk")
    shown = launching.folder / "shown"
    with shown.open("w") as file:
        result = subprocess.run(
            command, cwd=launching.folder, stdout=file, stderr=subprocess.PIPE, text=True, timeout=90
        )
    assert result.returncode == code, result.stderr
    assert shown.read_text() == ("x" * 999 + "\n") * 3000, "the console has all of it"
    assert result.stderr.count("cannot be written: No space left on device. The ranks go on") == 1
    assert (launching.folder / "done.0").exists()
    assert (launching.folder / "done.1").exists()
    for rank in range(2):
        lost = int(re.search(rf"rank\.{rank}/stdout lacks (\d+) bytes", result.stderr)[1])
        kept = int(re.search(rf"(\d+) \S+ +\d+ [\d:]+ log_output/1/rank.{rank}/stdout", result.stderr)[1])
        assert lost + kept >= 3_000_000
        assert kept < 1_100_000
    assert f'"exit_code": {code}' in result.stderr, "the state has found room"
    assert ('"cause": "rank ' in result.stderr) == (code != 0), "so has the mark of the failure"
    assert ".job.json" not in result.stderr
    assert ".failed.json" not in result.stderr


@pytest.mark.parametrize("how", [[], pytest.param(["--no-preload"], marks=pytest.mark.slow)])
def test_what_was_printed_is_in_the_log_of_a_killed_rank(launching, how):
    script = launching.write("train.py", "import os; print('last words'); os.kill(os.getpid(), 9)")
    launching.run("-n", "1", *how, script, env=launching.light_torch())
    assert launching.log(0) == "last words\n"


def test_detached_jobs_outlive_the_terminal_and_are_followed(launching):
    script = launching.write(
        "train.py",
        """
    import os, sys, time
    print("step 1 of", os.environ["RANK"])
    while not os.path.exists("go"): time.sleep(0.01)
    print("step 2 of", os.environ["RANK"]); print("warned", file=sys.stderr)
    open(f"done.{os.environ['RANK']}", "w").close()
    while not os.path.exists("done.0"): time.sleep(0.01)
    sys.exit(3 * int(os.environ["RANK"]))
    """,
    )
    ended = launching.run("-n", "2", "--detach", "--job", "night", *PYTHON, script, start_new_session=True)
    assert ended.code == 0
    assert "job night runs in the background" in ended.stdout
    assert "shardwright logs -f night" in ended.stdout
    follower = launching.start("-f", "night", command="logs")
    assert follower.stdout.readline() == "step 1 of 0\n"
    wait_until(lambda: launching.log(1, job="night").endswith("\n"), 60, "rank 1 has written")
    shown = launching.run("--rank", "all", command="logs")
    assert sorted(shown.stdout.splitlines()) == ["[rank 0] step 1 of 0", "[rank 1] step 1 of 1"]
    assert shown.code == 0
    launching.write("go", "go")
    followed = launching.finish(follower)
    assert followed.stdout == "step 2 of 0\n"
    assert followed.stderr == "warned\nshardwright: job night failed (exit code 3)\n"
    assert followed.code == 3
    console = launching.folder / "log_output/night/console"
    wait_until(lambda: "rank 1 failed first" in console.read_text(), 60, "the launcher says so")


def test_a_follower_ends_when_the_launcher_was_killed(launching):
    script = launching.write("train.py", "import time; print('up'); time.sleep(600)")
    launcher = launching.start("-n", "1", *PYTHON, script)
    assert launcher.stdout.readline() == "up\n"
    follower = launching.start("-f", command="logs")
    assert follower.stdout.readline() == "up\n"
    launcher.kill()
    launcher.wait()
    followed = launching.finish(follower)
    assert followed.stderr == "shardwright: job 1 lost (its launcher is gone)\n"
    assert followed.code == 1


def test_a_detached_job_that_cannot_start_says_so(launching):
    launching.write("torch.py", "raise ImportError('libcudart.so.12: cannot open')")
    script = launching.write("train.py", "print(1)")
    ended = launching.run("--detach", "-n", "1", script, env={"PYTHONPATH": str(launching.folder)})
    assert ended.code == 2
    assert "libcudart.so.12: cannot open" in ended.stderr
    assert not (launching.folder / "log_output/1").exists()


def test_logs_of_no_job(refused, tmp_path):
    assert "no job has logs in" in refused(command="logs")
    job = create_job_folder(tmp_path / "log_output", None)
    job.make_ranks(1)
    job.write_state(JobState.of_this_process(["program", "true"], 1))
    assert "no job named 7 in log_output; the latest are 1" in refused("7", command="logs")
    assert "the 1 ranks of this job are 0 to 0" in refused("--rank", "3", command="logs")


@pytest.mark.slow
def test_a_stopped_launcher_holds_its_ranks_but_loses_nothing(launching):
    """Ctrl-Z: the ranks wait once the pipes are full, and go on with the launcher."""
    script = launching.write("train.py", "import os\nfor i in range(200): os.write(1, b'x' * 100_000)")
    launcher = launching.start("-n", "1", "--tee", "none", *PYTHON, script)
    wait_until(lambda: (launching.folder / "log_output/1/rank.0/stdout").exists(), 60, "the log exists")
    os.kill(launcher.pid, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(launcher.pid, signal.SIGCONT)
    assert launching.finish(launcher).code == 0
    assert len(launching.log(0)) == 20_000_000
