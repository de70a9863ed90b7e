"""`shardwright watch` and `report` on jobs that run: in a terminal, which tmux is, and where there is none."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid

import pytest

from launching import COMMAND, wait_until

# What a rank of shardwright does, without the seconds that torch takes.
TRAIN = """
    import os, sys, time
    from shardwright.common.pulse import own_pulse
    pulse, rank = own_pulse(), int(os.environ["RANK"])
    class Loss:
        is_there = True
        def value(self): return 2.5
    if rank == 0:
        pulse.steps.tell({"plan": {"seconds": 0.05, "computing_s": 0.04, "communicating_s": 0.01}})
    print("rank", rank, "trains", flush=True)
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until and not os.path.exists("end"):
        pulse.begin_step()
        time.sleep(0.03)
        with pulse.inside(b"all_reduce"):
            time.sleep(0.02)
        pulse.steps.computed(32, Loss)
    sys.exit(int(sys.argv[2]) if rank == 1 else 0)
"""


def folder_of(launching):
    return launching.folder / "log_output" / "1"


def steps_of(launching, rank):
    path = folder_of(launching) / f"rank.{rank}" / "steps.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be half written
    values = [json.loads(line) for line in whole.splitlines()]
    return [value for value in values if "step" in value]


def test_a_job_is_watched_to_its_end_and_reported(launching):
    script = launching.write("train.py", TRAIN)
    launcher = launching.start("-n", "2", "--", os.sys.executable, script, "600", "3")
    wait_until(lambda: steps_of(launching, 1), 60, "rank 1 has told of a step")
    said = launching.folder / "said"
    with said.open("w") as file:
        watching = launching.start("log_output/1", command="watch", stdout=file)
    line = r"^0:0\d:\d\d  step \d+, loss 2.5, \d+(\.\d+)? samples/s, \d+(\.\d+)? ms a step"
    wait_until(lambda: re.search(line, said.read_text(), re.M), 60, "a line tells how it goes")
    launching.write("end", "")
    assert launching.finish(launcher).code == 3
    watched = launching.finish(watching)
    assert watched.code == 3
    assert "job 1 failed (exit code 3)" in watched.stderr
    last = steps_of(launching, 0)[-1]
    assert sum(line["steps"] for line in steps_of(launching, 0)) >= last["step"] - 1  # of the last nobody knows the end
    first = next(line for line in steps_of(launching, 0) if line["steps"])  # one may come before the first step ends
    assert first["communicating_s"] > 0.019 * first["steps"]
    assert first["seconds"] - first["communicating_s"] > 0.029 * first["steps"]
    report = launching.run("log_output/1", command="report")
    assert report.code == 0, report.stderr
    assert "job 1  failed (exit code 3)" in report.stdout
    assert "rank 1 ended with code 3" in report.stdout
    again = launching.run("log_output/1", command="watch")
    assert (again.code, "job 1 failed (exit code 3)" in again.stderr) == (3, True)


def test_jobs_that_are_not_there_are_said_so(refused, tmp_path):
    assert "no job" in refused("none", command="watch")
    (tmp_path / "empty").mkdir()
    assert "empty has no job.json that can be read" in refused("./empty", command="watch")


class Terminal:
    """A terminal of its own, in a server of tmux that nobody else uses."""

    def __init__(self, columns, rows, folder, command):
        self.socket = f"shardwright-{uuid.uuid4().hex[:8]}"
        self.tmux(
            "-f", os.devnull, "new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(folder), command
        )

    def tmux(self, *words):
        done = subprocess.run(
            ["tmux", "-L", self.socket, *words], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def lines(self):
        return self.tmux("capture-pane", "-p").splitlines()

    def resize(self, columns, rows):
        self.tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def close(self):
        subprocess.run(["tmux", "-L", self.socket, "kill-server"], capture_output=True, timeout=60, check=False)


def row(terminal, rank):
    return next((line for line in terminal.lines() if re.match(rf" +{rank} ", line)), "")


def is_whole(lines, columns):
    """Whether a screen has all that there is to see; a terminal may be asked while it is drawn anew."""
    begins = ("job 1  running 0:0", "step ", "rank ", "plan ", "   0 ", "   1 ", "[1] rank 1 trains")
    found = {begin: next((line for line in lines if line.startswith(begin)), "") for begin in begins}
    names = ("comp", "comm", "data") if columns < 100 else ("computes", "communicates", "loads data")
    return (
        "2 ranks" in found[begins[0]]
        and "loss 2.5" in found["step "]
        and all(name in found["rank "] for name in (*names, "a step", "holds"))
        and "50 ms" in found["plan "]
        and " ms " in found["   0 "]
        and "stopped" in found["   1 "]
        and all(found.values())
    )


# Rank 1 is busy with something that takes seconds before its first step.
LATE = """
    import time
    from shardwright.launch.progress_notes import waiting_for
    print("rank", rank, "trains", flush=True)
    if rank == 0:
        with waiting_for("capturing Net"):
            while not os.path.exists("go"): time.sleep(0.05)
"""


@pytest.mark.slow
def test_in_a_terminal_ranks_appear_a_stopped_one_is_marked_and_it_can_be_resized(launching):
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: apt-get install tmux")
    script = launching.write("train.py", TRAIN.replace('    print("rank", rank, "trains", flush=True)\n', LATE[1:]))
    launcher = launching.start("-n", "2", "--", os.sys.executable, script, "600", "0")
    wait_until((folder_of(launching) / "job.json").exists, 60, "the job has begun")
    watch = f"COLUMNS=80 LINES=24 {COMMAND} watch log_output/1"  # which a shell may have left there
    terminal = Terminal(100, 30, launching.folder, f"{watch}; sleep 600")
    try:
        wait_until(lambda: " ms " in row(terminal, 1), 60, "rank 1 has appeared with its steps")
        assert " ms " not in row(terminal, 0)
        wait_until(lambda: any("capturing Net: " in line for line in terminal.lines()), 60, "what takes long is said")
        launching.write("go", "")
        wait_until(lambda: " ms " in row(terminal, 0), 60, "rank 0 has appeared, too")
        assert not any("capturing" in line for line in terminal.lines())
        states = [json.loads(line) for line in (folder_of(launching) / "ranks.jsonl").read_text().splitlines()]
        [pid] = [state["pid"] for state in states if state.get("rank") == 1 and "pid" in state]
        os.kill(pid, signal.SIGSTOP)
        wait_until(
            lambda: any("stopped (SIGSTOP)" in line for line in terminal.lines()), 60, "the stopped one is marked"
        )
        for columns, rows in ((60, 20), (140, 40)):
            terminal.resize(columns, rows)
            time.sleep(1.5)  # what was shown before is gone
            wait_until(lambda: is_whole(terminal.lines(), columns), 60, f"all is shown on {columns} columns")  # noqa: B023
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not any("stopped" in line for line in terminal.lines()), 60, "it is no longer marked")
        launcher.send_signal(signal.SIGTERM)
        assert launching.finish(launcher).code == 143
        wait_until(lambda: any("job 1 interrupted" in line for line in terminal.lines()), 60, "the end is told")
    finally:
        terminal.close()


WAITS = """
    import os, time
    from shardwright.launch.progress_notes import waiting_for
    def wait_for(name):
        while not os.path.exists(name): time.sleep(0.01)
    with waiting_for("saving step-7"):
        wait_for("go")
    print("saved", flush=True)
    wait_for("end")
"""


@pytest.mark.slow
def test_a_launcher_in_a_terminal_shows_once_what_is_waited_for(launching):
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: apt-get install tmux")
    words = f"{COMMAND} launch -n 2 --tee all -- {os.sys.executable} {launching.write('train.py', WAITS)}"
    terminal = Terminal(80, 24, launching.folder, f"{words}; sleep 600")

    def lines():
        return sorted(line for line in terminal.lines() if line)

    try:
        wait_until(lambda: re.fullmatch(r"saving step-7: \d+ s", "\n".join(lines())), 60, "it is shown")
        launching.write("go", "")
        wait_until(lambda: lines() == ["[rank 0] saved", "[rank 1] saved"], 60, "it is gone")
        launching.write("end", "")
    finally:
        terminal.close()
    assert launching.run("-n", "2", "--", os.sys.executable, "train.py").stderr == ""
