"""The pieces of the verdict, and the folders of jobs, without processes."""

import json
import os

import pytest

from shardwright.common.words import describe_ranks
from shardwright.launch.joblog.job import LOST, RUNNING, JobFolder, JobState, create_job_folder
from shardwright.launch.joblog.judge import RankEnd, first_failure, read_error_file, torchrun_end

RESET = b"RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:3\n"


def test_the_earliest_failure_is_the_cause():
    ends = [RankEnd(0, 1, 10.002), RankEnd(1, 3, 10.001), RankEnd(2, 0, 9.0)]
    assert first_failure(ends).rank == 1


SHM = b"shardwright.errors.WorldError: "
ENDED = SHM + b"rank 1 (process 7) has ended, while rank 0 waits for it in all_reduce\n"
LEFT = SHM + b"rank 1 has left the group of the ranks 0, 1\n"


@pytest.mark.parametrize("said", [RESET, ENDED, LEFT])
def test_an_echo_is_no_cause_as_long_as_there_is_another(said):
    echo, cause = RankEnd(0, 1, 10.0, stderr_tail=said), RankEnd(1, -9, 10.01)
    assert first_failure([echo, cause]) is cause
    assert first_failure([echo]) is echo


def test_what_we_ended_ourselves_is_no_cause():
    assert first_failure([RankEnd(0, -15, 1.0, signalled=True), RankEnd(1, 2, 2.0)]).rank == 1


def test_last_lines_are_those_of_the_last_traceback():
    tail = b"Traceback (most recent call last):\n old\n10%\r20%\rTraceback (most recent call last):\n  File x\nE: y\n"
    assert RankEnd(0, 1, 0, stderr_tail=tail).last_lines() == [
        b"Traceback (most recent call last):",
        b"  File x",
        b"E: y",
    ]
    assert RankEnd(0, 1, 0, stderr_tail=b"a\n\nb\nc\nd\ne\nf\n").last_lines() == [b"b", b"c", b"d", b"e", b"f"]


def test_causes_in_words():
    assert RankEnd(0, 1, 0, stderr_tail=b"pkg.BadError: no\n").cause() == "exit code 1, pkg.BadError: no"
    marked = b"[rank2]: Traceback (most recent call last):\n[rank2]:   File x\n[rank2]: KeyError: 'y'\n"
    assert RankEnd(2, 1, 0, stderr_tail=marked).cause() == "exit code 1, KeyError: 'y'"
    assert RankEnd(0, 4, 0, stderr_tail=b"usage: train\n").cause() == "exit code 4"
    assert RankEnd(0, -11, 0).cause() == "killed by SIGSEGV"
    assert RankEnd(0, -64, 0).cause() == "killed by SIGRTMAX"
    assert (RankEnd(0, -9, 0).exit_code, RankEnd(0, 3, 0).exit_code) == (137, 3)


def test_ranks_in_words():
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"


def test_error_files(tmp_path):
    path = tmp_path / "error.json"
    assert read_error_file(path) is None
    path.write_text(json.dumps({"message": {"message": "E: x", "extraInfo": {"timestamp": "7", "timestamp_s": 7.25}}}))
    assert read_error_file(path) == ("E: x", 7.25)
    path.write_text(json.dumps({"message": {"message": "E: x", "extraInfo": {"timestamp": "7"}}}))
    os.utime(path, (8.5, 8.5))
    assert read_error_file(path) == ("E: x", 8.5)
    path.write_text("half a fi")
    assert read_error_file(path) is None


def test_numbers_of_jobs_count_up_and_are_never_reused(tmp_path):
    assert create_job_folder(tmp_path, None).name == "1"
    assert create_job_folder(tmp_path, "9").name == "9"
    last = create_job_folder(tmp_path, None)
    assert last.name == "10"
    last.make_ranks(2)
    assert sorted(path.name for path in (tmp_path / "10").iterdir()) == ["rank.0", "rank.1"]


def test_a_job_whose_launcher_is_gone_is_lost(tmp_path):
    folder = JobFolder(tmp_path)
    assert folder.read_state() is None
    state = JobState.of_this_process(["script", "train.py"], 2)
    folder.write_state(state)
    assert folder.read_state().status == RUNNING
    folder.write_state(JobState(**vars(state) | {"start_ticks": 1}))
    assert folder.read_state().status == LOST


def test_the_end_of_a_torchrun_is_that_of_the_rank_that_it_names():
    said = b"""
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : a
  rank      : 5 (local_rank: 1)
  exitcode  : -9 (pid: 77)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 77
"""
    end = torchrun_end(RankEnd(1, 1, 0.0, stderr_tail=said))
    assert (end.exit_code, end.rank) == (137, 1)
    assert end.cause() == "rank 5 of the ranks that torchrun has started was killed by SIGKILL"
    assert torchrun_end(RankEnd(1, 1, 0.0, stderr_tail=b"exitcode  : 3")).exit_code == 1
    assert torchrun_end(RankEnd(1, 0, 0.0, stderr_tail=said)).exit_code == 0
