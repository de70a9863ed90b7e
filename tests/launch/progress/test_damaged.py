"""Files of a job that are damaged: what can be read of them is shown, and a person is told of the rest."""

import json
import os
import subprocess
import sys
import time

import pytest

from mutated import mutations
from reported_jobs import LINE, PLAN, job, tell
from shardwright.cluster.jobs import on_host as of_jobs
from shardwright.cluster.trust import on_host as of_trust
from shardwright.cluster.watch.report import report
from shardwright.common import private_folder
from shardwright.launch.carriers.packed import sources
from shardwright.launch.joblog.job import JobFolder, JobState, find_job
from shardwright.launch.joblog.jobs import JobRecord, known_jobs, make_private
from shardwright.launch.joblog.judge import read_error_file
from shardwright.launch.progress.ranks import WatchedJob

OTHERS = (None, True, "x", -1, 1.5, 10**40, float("nan"), [], {})
NO_JSON = (b"\xff\xfe", b"{", b"[" * 100_000, b"3", b"\0", b"[]", b'"x"')


@pytest.fixture
def done(tmp_path):
    """A job of two ranks that has ended, which told of a plan, steps and a validation."""
    made, live = job(tmp_path, ranks=2, lasted_s=100.0, status="failed", exit_code=3)
    live.write_steps(0, json.dumps({"time_s": time.time(), "plan": PLAN, "doing": "saving"}).encode() + b"\n")
    for rank in range(2):
        tell(live, rank, wire={"in": 1, "out": 2, "within": 3})
        live.write_steps(
            rank, b'{"time_s": 1.0, "step": 12, "validation": {"loss": 0.5, "metrics": {"accuracy": 0.9}}}\n'
        )
        live.write_state(rank, "stopped", signal="SIGSTOP", pid=100, host="first")
        live.write_state(rank, "ended", code=3)
    made.write_failure({"rank": 1, "cause": "rank 1 failed", "time_s": time.time()})
    return made


def shown(folder, capsys):
    report(folder.path, None)
    report(folder.path, folder.path / "page.html")
    return capsys.readouterr()


@pytest.mark.parametrize("file", ["rank.0/steps.jsonl", "ranks.jsonl", "failed.json"])
def test_no_line_of_any_form_ends_a_report(done, capsys, monkeypatch, file):
    monkeypatch.setattr("shardwright.cluster.watch.report.Console.print", lambda *_: None)
    path = done.path / file
    lines = path.read_bytes().splitlines(keepends=True) if file != "failed.json" else [path.read_bytes()]
    for number, line in enumerate(lines):
        for _, changed in mutations(json.loads(line), (None, "x", 10**40, [])):
            other = json.dumps(changed).encode() + b"\n"
            path.write_bytes(b"".join([*lines[:number], other, *lines[number + 1 :]]))
            report(done.path, None)
    capsys.readouterr()


@pytest.mark.parametrize("damage", NO_JSON, ids=ascii)
def test_damaged_steps_are_told_of_and_the_others_shown(done, capsys, damage):
    path = done.rank(0) / "steps.jsonl"
    before = shown(done, capsys)
    path.write_bytes(damage[:60_000] + b"\n" + path.read_bytes() + b'{"step": "x"}\n')
    after = shown(done, capsys)
    assert after.out == before.out
    said = [line for line in after.err.splitlines() if "damaged and left out" in line]
    assert len(said) == 2
    assert said[0].startswith(f"shardwright: {path}: 2 lines of it are damaged and left out; the first: it is")


def test_a_step_of_another_type_is_named(done, capsys):
    path = done.rank(1) / "steps.jsonl"
    path.write_bytes(path.read_bytes() + json.dumps({"time_s": 1, "step": "x", **LINE}).encode() + b"\n")
    said = shown(done, capsys).err
    assert "1 line of it is damaged and left out; the first: step is 'x', expected a whole number" in said


@pytest.mark.parametrize("damage", NO_JSON, ids=ascii)
def test_a_damaged_state_is_no_state(done, damage):
    (done.path / "job.json").write_bytes(damage)
    assert done.read_state() is None


def test_a_state_of_any_form_is_read_or_is_none(done):
    path = done.path / "job.json"
    for _, changed in mutations(json.loads(path.read_text()), OTHERS):
        path.write_text(json.dumps(changed))
        state = done.read_state()
        assert state is None or isinstance(state.end, str)
        if state is not None:
            assert find_job(done.path.parent, None) == JobFolder(done.path)
            WatchedJob(done.path).snapshot()


def test_records_of_any_form_are_read_or_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(private_folder, "TOP", tmp_path)
    state = JobState.of_this_process([], 2)
    record = JobRecord("a", "/logs", state.host, state.pid, state.start_ticks, 0.0, "running", ["h"], 2, 0, 10.0)
    make_private(record.path.parent)
    record.write()
    assert known_jobs() == [record]
    whole = record.path.read_bytes()
    for data in (*NO_JSON, *(json.dumps(changed).encode() for _, changed in mutations(json.loads(whole), OTHERS))):
        record.path.write_bytes(data)
        assert len(known_jobs()) <= 1
        record.path.write_bytes(whole)


def test_error_files_of_any_form_are_read_or_left_out(tmp_path):
    path = tmp_path / "error.json"
    whole = {"message": {"message": "no", "extraInfo": {"py_callstack": "x", "timestamp": "1", "timestamp_s": 1.5}}}
    path.write_text(json.dumps(whole))
    assert read_error_file(path) == ("no", 1.5)
    path.write_text('{"message": "plain"}')
    assert read_error_file(path) == ("plain", os.stat(path).st_mtime)
    for data in (*NO_JSON, *(json.dumps(changed).encode() for _, changed in mutations(whole, OTHERS))):
        path.write_bytes(data)
        assert read_error_file(path) is None or isinstance(read_error_file(path)[1], float)


PROGRAMS = {
    "shardwright.launch.carriers.agent": (),
    "shardwright.launch.supervisor.main": (),
    **{
        module.__name__: ("cluster/__init__", "cluster/programs", "/".join(module.__name__.split(".")[1:-1]))
        for module in (of_jobs, of_trust)
    },
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_sent_to_a_host_is_all_that_runs_there(tmp_path, program):
    for name, data in sources(*PROGRAMS[program]).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {program}"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)
