"""What ranks tell of their steps, what is read of it again, and how it is shown."""

import contextlib
import gc
import json
import os
import resource
import time
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from reported_jobs import PLAN, job, tell
from shardwright.cluster.watch import command
from shardwright.cluster.watch.view import events, screen
from shardwright.common.schema import from_json
from shardwright.common.step_lines import Steps
from shardwright.errors import UsageError
from shardwright.launch.host.program import Program
from shardwright.launch.host.protocol import Start
from shardwright.launch.hosts.hosts import Host
from shardwright.launch.joblog.job import JobFolder
from shardwright.launch.joblog.logs import LiveFiles
from shardwright.launch.progress.lines import GrowingFile
from shardwright.launch.progress.ranks import Snapshot, WatchedJob
from shardwright.launch.supervisor.rank_start import check_open_files, open_steps


class There:
    """A loss that is there at once, or not until it is waited for."""

    def __init__(self, value, is_there=True):
        self.number, self.is_there = value, is_there

    def value(self):
        return self.number


class Clock:
    def __init__(self, monkeypatch):
        self.now_s = 1000.0
        monkeypatch.setattr("shardwright.common.step_lines.time.perf_counter", lambda: self.now_s)

    def passes(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock_stands(monkeypatch):
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)


def told(lines):
    return [{k: v for k, v in json.loads(line).items() if k != "time_s"} for line in lines]


def test_a_line_says_what_the_steps_since_the_last_took(monkeypatch):
    lines, clock = [], Clock(monkeypatch)
    steps = Steps(lines.append)
    steps.measures["held_bytes"] = lambda: 7
    for number in (1, 2, 3):
        steps.open()
        with steps.loading():
            clock.passes(0.1)
        steps.begin(number)
        steps.communicating_s += 0.05
        clock.passes(0.4)
        steps.computed(32, lambda number=number: There(float(number)))
        steps.close()
        clock.passes(3.0 if number == 1 else 0.0)  # a checkpoint or a validation, which belongs to no step
        steps.communicating_s += 2.0
    first = {"step": 1, "steps": 1, "seconds": 0.5, "data_s": 0.1, "samples": 32, "communicating_s": 0.05}
    assert told(lines) == [first | {"held_bytes": 7, "loss": 1.0}, first | {"step": 2, "held_bytes": 7, "loss": 2.0}]
    steps.open()  # the epoch has no more batches
    steps.finish()
    assert told(lines[2:]) == [first | {"step": 3, "loss": 3.0}]


def test_who_knows_but_the_beginning_of_steps_tells_of_those_that_have_ended(monkeypatch):
    lines, clock = [], Clock(monkeypatch)
    steps = Steps(lines.append)
    losses = [There(float(number), is_there=False) for number in range(4)]
    for number in (1, 2, 3):
        steps.begin(number)
        with steps.loading(), steps.loading():  # a loader in a loader
            clock.passes(0.5)
        clock.passes(1.5)
        steps.computed(8, lambda number=number: losses[number])
    assert lines == []  # no loss has come
    losses[1].is_there = True
    steps.begin(4)
    assert [(line["step"], line["loss"], line["seconds"], line["data_s"]) for line in told(lines)] == [
        (1, 1.0, 2.0, 0.5)
    ]
    steps.finish()
    assert [(line["step"], line["steps"], line["seconds"]) for line in told(lines)[1:]] == [(3, 2, 4.0)]


def test_in_a_long_run_lines_become_fewer(monkeypatch):
    lines, clock = [], Clock(monkeypatch)
    steps = Steps(lines.append)
    for number in range(1, 4001):
        steps.begin(number)
        clock.passes(2.0)
    assert 600 < len(lines) < 1700


def test_without_a_listener_nothing_is_done():
    steps = Steps(None)
    steps.measures["held_bytes"] = lambda: 1 / 0
    steps.begin(1)
    steps.computed(1, lambda: 1 / 0)
    steps.begin(2)
    steps.finish()
    assert not steps.has_reader


@pytest.mark.usefixtures("clock_stands")
def test_marks_name_who_is_stopped_who_is_slow_and_who_is_quiet(tmp_path):
    made, live = job(tmp_path)
    watched = WatchedJob(made.path)
    assert watched.snapshot().first is None
    live.write_steps(0, json.dumps({"plan": PLAN}).encode() + b"\n")
    for rank in range(4):
        tell(live, rank, communicating_s=0.1 if rank == 2 else 4.0)
    live.write_state(1, "stopped", signal="SIGSTOP", pid=101)
    live.write_steps(3, b'{"time_s": 1, "st')  # half a line
    seen = watched.snapshot()
    assert seen.marks() == {1: "stopped (SIGSTOP)", 2: "slow: 4.9 × others"}
    assert from_json(json.dumps(asdict(seen)), Snapshot).marks() == seen.marks()
    assert seen.plan == PLAN
    live.write_state(1, "running")
    os.utime(made.rank(3) / "steps.jsonl", (0, time.time() - 60))
    after = watched.snapshot()
    assert after.marks() == {2: "slow: 4.9 × others", 3: "quiet 60 s"}
    assert events(seen, after) == ["rank 3: quiet 60 s", "rank 1: no longer stopped"]
    again = LiveFiles(made, 1, 2)
    again.write_state(0, "ended", code=-9)
    restarted = watched.snapshot()
    assert [(rank.state.state, rank.line and rank.line.step) for rank in restarted.ranks] == [("ended", 12), ("", 12)]
    again.write_steps(1, b"")
    assert watched.snapshot().ranks[1].line is None
    assert watched.snapshot().marks() == {0: "ended (SIGKILL)"}


def test_what_is_no_folder_of_a_job_is_said_so(tmp_path):
    with pytest.raises(UsageError, match=r"nothing has no job.json that can be read"):
        WatchedJob(tmp_path / "nothing").snapshot()


class Answering:
    """A host that answers as `shardwright.cluster.jobs.on_host` does there."""

    def __init__(self, name, folder, state):
        self.host, self.record = Host(name), {"name": "digits", "folder": str(folder), "state": state}

    def demand(self, order):
        if order["order"] == "jobs":
            return {"records": [self.record]}
        return json.loads(json.dumps(asdict(WatchedJob(Path(order["folder"])).snapshot())))


def test_a_job_that_was_lost_is_not_meant_where_another_of_its_name_is(tmp_path, monkeypatch, capsys):
    made, _ = job(tmp_path, status="succeeded", exit_code=0)
    probes = {"a": Answering("a", tmp_path / "gone", "lost"), "b": Answering("b", made.path, "running")}
    monkeypatch.setattr(command, "open_all", lambda *_, **__: contextlib.nullcontext((probes, {})))
    assert command.watch_on("digits", None) == 0
    assert "job digits succeeded" in capsys.readouterr().err


def test_files_that_cannot_be_written_stop_nobody(tmp_path):
    made = JobFolder(tmp_path / "digits")
    made.path.mkdir()
    (made.path / "ranks.jsonl").mkdir()  # not even root writes there
    live = LiveFiles(made, 0, 1)
    live.write_state(0, "running")
    live.write_steps(0, b"{}\n")  # its folder is not there


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def no_collection():
    """What tests before have left open is not closed in the middle of one that counts."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_a_launcher_has_no_open_file_for_each_rank(tmp_path):
    before = open_files()
    made, live = job(tmp_path, ranks=20)
    for _ in range(2):
        for rank in range(20):
            tell(live, rank)
    assert open_files() == before
    assert len((made.rank(19) / "steps.jsonl").read_text().splitlines()) == 3  # one names the attempt


@pytest.mark.usefixtures("no_collection")
def test_jobs_that_may_open_few_files_start_and_tell_of_no_steps():
    start = Start(Program("program", ("true",)), False, {rank: {} for rank in range(3)})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held, needed = [], 2 * 3 + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 100, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(needed + 5):  # one too few
            os.close(held.pop())
        before = open_files()
        check_open_files(start, -1)
        assert open_steps(start) == ({}, [])
        assert open_files() == before
        assert start.ranks == {rank: {} for rank in range(3)}
        os.close(held.pop())
        reading, writing = open_steps(start)
        held += [*reading.values(), *writing]
        assert [len(reading), len(writing)] == [3, 3]
        assert all(variables["SHARDWRIGHT_STEPS"] for variables in start.ranks.values())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in held:
            os.close(fd)


@pytest.mark.parametrize("all", [False, True])
def test_a_file_without_lines_is_read_in_pieces(tmp_path, all):
    path, piece = tmp_path / "stdout", 1 << 16
    path.write_bytes(b"begin\n" + 5 * piece * b".")
    file = GrowingFile(path, all=all)
    assert file.new()[0] == b"begin"
    with path.open("ab") as more:
        more.write(b"-" * 9 * piece + b"\nend\n")
    found = file.new()
    assert found[-1] == b"end"
    assert max(map(len, found)) < 2 * piece
    assert (len(found) <= 3) is (not all)  # who looks seldom is shown the end


def lines_of(seen, width, height=24):
    console = Console(width=width, height=height, record=True, file=StringIO())
    console.print(screen(seen, width, height))
    return console.export_text().splitlines()


@pytest.mark.usefixtures("clock_stands")
@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_is_readable_at_any_width(tmp_path, width):
    made, live = job(tmp_path)
    live.write_steps(0, json.dumps({"plan": PLAN}).encode() + b"\n")
    wire = {"in": 0, "out": 0, "within": 0}
    tell(live, 0, -10, wire=wire)
    for rank in range(4):
        tell(live, rank, wire=wire | {"out": 30_000_000} if rank == 0 else None)
    live.write_state(1, "stopped", signal="SIGSTOP", pid=101)
    (made.rank(3) / "stdout").write_text("\x1b[31mloading 10 %\rloading 100 %\n" + "long " * 80 + "\n")
    lines = lines_of(WatchedJob(made.path).snapshot(), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "job digits  running 0:02:31  4 ranks on 2 hosts" in text
    assert "step 12, loss 2.25, 32 samples/s, 1 s a step" in text
    [stopped] = [line for line in lines if line.startswith("   1 ")]
    assert "stopped" in stopped
    assert stopped.split()[:6] == ["1", "12", "1", "s", "700", "ms"]
    assert "3.0 MB" in stopped
    assert any(line.startswith("plan ") and "900 ms" in line for line in lines)
    assert "3.0 MB/s out" in text
    assert "[3] loading 100 %" in lines
    assert "\x1b" not in text


def test_a_job_of_which_nothing_was_told_says_why(tmp_path):
    made, _ = job(tmp_path, ranks=2)
    assert "no step has been told yet" in lines_of(WatchedJob(made.path).snapshot(), 100)[1]
    (made.path / "ranks.jsonl").unlink()
    lines = lines_of(WatchedJob(made.path).snapshot(), 100)
    assert lines[0].endswith("  2 ranks")
    assert lines[1].startswith("ranks.jsonl is missing in its folder")


@pytest.mark.usefixtures("clock_stands")
def test_what_people_wait_for_is_shown_in_place_of_a_quiet_rank(tmp_path):
    made, live = job(tmp_path, ranks=2)
    watched = WatchedJob(made.path)
    live.write_steps(0, b'{"time_s": 1, "doing": "capturing Net: 2 s"}\n')
    assert lines_of(watched.snapshot(), 60)[1] == "capturing Net: 2 s"
    for rank in range(2):
        tell(live, rank)
    live.write_steps(0, b'{"time_s": 1, "doing": "saving step-12: 40 s"}\n')
    os.utime(made.rank(1) / "steps.jsonl", (0, time.time() - 60))
    saving = watched.snapshot()
    assert lines_of(saving, 60)[1].startswith("saving step-12: 40 s, step 12, loss 2.25, 32 samples/s")
    assert saving.marks() == {}
    assert from_json(json.dumps(asdict(saving)), Snapshot).doing == saving.doing
    live.write_steps(0, b'{"time_s": 1, "doing": ""}\n')
    after = watched.snapshot()
    assert lines_of(after, 60)[1].startswith("step 12")
    assert after.marks() == {1: "quiet 60 s"}


def test_of_many_ranks_those_with_a_mark_are_shown(tmp_path):
    made, live = job(tmp_path, ranks=200)
    live.write_state(150, "stopped", signal="SIGSTOP", pid=1)
    lines = lines_of(WatchedJob(made.path).snapshot(), 80)
    assert len(lines) <= 24
    assert any(line.startswith(" 150 ") and "stopped" in line for line in lines)
    assert any(line.startswith("and 18") for line in lines)
