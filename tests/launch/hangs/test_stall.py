"""A job that hangs: where each rank is, who holds it up, in words, and what a person sees of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from shardwright.common.pulse import PulseFile, PulseReading, open_pulse
from shardwright.errors import UsageError
from shardwright.launch.hangs.stacks import (
    Frame,
    Observation,
    decode_observations,
    encode_observations,
    read_faulthandler,
    read_py_spy,
)
from shardwright.launch.hangs.stall import StallWatch
from shardwright.launch.hangs.stall_report import group_lines, headline, report_text, write_report
from shardwright.launch.hangs.stall_verdict import Hang, location_of
from shardwright.launch.options.launch_options import read_options
from shardwright.launch.options.request import LaunchRequest
from shardwright.launch.options.variables import read_variables
from shardwright.launch.supervisor.progress import Progress

TORCH = "/env/lib/python3.11/site-packages/torch"
C10D = TORCH + "/distributed/distributed_c10d.py"
IN_ALL_REDUCE = (
    Frame(C10D, 9, "all_reduce"), Frame(TORCH + "/distributed/c10d_logger.py", 83, "wrapper"),
    Frame("/home/me/train.py", 12, "main"), Frame("/home/me/train.py", 20, "<module>"),
)  # fmt: skip


def stack(*frames):
    return tuple(Frame(*frame) for frame in frames)


def seen(rank=0, frames=(), **facts):
    stacks = tuple(frames) if frames and isinstance(frames[0], tuple) else (tuple(frames),) if frames else ()
    return Observation(**{"rank": rank, "pid": 100 + rank, "state": "S", "stacks": stacks, "stacks_by": "x"} | facts)


def inside(operation="all_reduce", step=41, what="linear of layers.3", position=7, collectives=83):
    return PulseReading(1, 500, step, collectives, operation, what, position)


# --- where a rank is


@pytest.mark.parametrize(
    ("observation", "kind", "text"),
    [
        (seen(pulse=inside()), "waiting", "in all_reduce of step 41 for linear of layers.3"),
        (seen(pulse=inside(what="", step=0)), "waiting", "in all_reduce"),
        (seen(frames=IN_ALL_REDUCE), "waiting", "in all_reduce (called at train.py:12 in main)"),
        (seen(frames=IN_ALL_REDUCE, busy=1.0), "waiting", "in all_reduce (called at train.py:12 in main)"),
        (seen(frames=stack(("/w/t.py", 8, "load")), busy=1.0), "known", "in t.py:8 in load, computing"),
        (
            seen(frames=stack((C10D, 1, "all_gather"), (C10D, 2, "wrapper"), (C10D, 3, "all_gather_object"),
                              ("/w/t.py", 4, "<module>"))),
            "waiting", "in all_gather_object (called at t.py:4)",
        ),
        (
            seen(frames=stack(("/usr/lib/python3.11/queue.py", 171, "get"),
                              (TORCH + "/utils/data/dataloader.py", 1131, "_try_get_data"), ("/w/t.py", 8, "epoch")),
                 pulse=inside(operation="")),
            "known", "in DataLoader (called at t.py:8 in epoch)",
        ),
        (
            seen(frames=stack((TORCH + "/autograd/graph.py", 869, "_engine_run_backward"),
                              (TORCH + "/_tensor.py", 630, "backward"), ("/w/t.py", 8, "<module>"))),
            "waiting", "in the backward (called at t.py:8)",
        ),
        (
            seen(frames=(stack((TORCH + "/autograd/graph.py", 869, "_engine_run_backward"), ("/w/t.py", 8, "main")),
                         stack((C10D, 1, "all_reduce"), ("/w/hooks.py", 3, "hook")))),
            "waiting", "in all_reduce (called at hooks.py:3 in hook)",
        ),
        (
            seen(frames=stack(("/env/lib/python3.11/site-packages/numpy/x.py", 3, "dot"), ("/w/t.py", 8, "load"))),
            "known", "in t.py:8 in load",
        ),
        (seen(frames=stack(("<program of rank 0 7f>", 37, "step")), pulse=inside(operation="")), "known",
         "in the forward of step 41 (line 37 of its program)"),
        (seen(frames=stack(("/shardwright/distributed/meeting.py", 5, "roll_call"), ("/w/shardwright/my.py", 2, "go"))),
         "known", "in roll_call of shardwright (called at my.py:2 in go)"),
        (seen(frames=stack(("<frozen importlib._bootstrap>", 5, "_load"), ("/w/t.py", 1, "<module>"))), "known",
         "in an import (called at t.py:1)"),
        (seen(state="T", stopped_by=19, pulse=inside(operation="")), "stopped", "stopped (SIGSTOP) in step 41"),
        (seen(state="T", stopped_by=20), "stopped", "stopped (SIGTSTP)"),
        (seen(state="D", waits_in="nfs_wait", frames=stack(("/w/t.py", 8, "load"))), "kernel",
         "waiting for the kernel (state D, in nfs_wait) in t.py:8 in load"),
        (seen(waits_in="do_wait"), "unknown", "somewhere (the kernel has it in do_wait)"),
        (seen(state=""), "unknown", "gone"),
    ],
)  # fmt: skip
def test_a_place_in_words(observation, kind, text):
    place = location_of(observation)
    assert (place.kind, place.text) == (kind, text)


# --- who holds the others up


def hang(*observations, **facts):
    return Hang(tuple(observations), 30.0, **facts)


WAIT = "in all_reduce of step 41 for linear of layers.3"


@pytest.mark.parametrize(
    ("found", "verdict", "odd"),
    [
        (
            hang(*(seen(r, pulse=inside()) for r in range(7)),
                 seen(7, stack((TORCH + "/utils/data/dataloader.py", 1, "_get"), ("/w/t.py", 8, "epoch")))),
            f"rank 7 is in DataLoader (called at t.py:8 in epoch) while 7 ranks wait {WAIT}", (7,),
        ),
        (
            hang(*(seen(r, pulse=inside()) for r in (0, 1)), seen(2, state="T", stopped_by=19, pulse=inside("")),
                 hosts={0: "a", 1: "a", 2: "b"}),
            f"rank 2 on b is stopped (SIGSTOP) in step 41; 2 ranks wait for it {WAIT}", (2,),
        ),
        (
            hang(seen(0, pulse=inside()), seen(1, pulse=inside(what="linear of layers.4", position=8)),
                 seen(2, pulse=inside())),
            f"rank 1 is in all_reduce of step 41 for linear of layers.4 while 2 ranks wait {WAIT}: it has passed or "
            "skipped that one", (1,),
        ),
        (
            hang(seen(0, pulse=inside()), seen(1, pulse=inside(what="linear of layers.2", position=5)),
                 seen(2, pulse=inside())),
            f"rank 1 is in all_reduce of step 41 for linear of layers.2 while 2 ranks wait {WAIT}: it has not come to "
            "that one", (1,),
        ),
        (
            hang(seen(0, pulse=inside()), seen(1, pulse=inside(step=42, position=2))),
            "rank 1 is in all_reduce of step 42 for linear of layers.3 and has passed or skipped what others wait in: "
            f"rank 0 is {WAIT}", (1,),
        ),
        (
            hang(seen(0, IN_ALL_REDUCE), seen(1, stack((C10D, 1, "barrier"), ("/w/t.py", 3, "end")))),
            "ranks wait in different collectives, of which some left one out or called one twice: rank 0 is in "
            "all_reduce (called at train.py:12 in main); rank 1 is in barrier (called at t.py:3 in end)", (),
        ),
        (
            hang(*(seen(r, pulse=inside()) for r in (0, 1, 3)), returned=(2,)),
            f"rank 2 returned 0 before, and ranks 0-1, 3 are {WAIT}", (2,),
        ),
        (
            hang(*(seen(r, pulse=inside()) for r in (0, 1))),
            f"all 2 ranks wait for each other {WAIT}: the line between them is down, or what they pass differs in size",
            (),
        ),
        (
            hang(*(seen(r, stack(("/w/t.py", 9 - r // 2, "main")), pulse=inside("", collectives=85 - r // 2))
                   for r in (0, 1, 2))),
            "rank 2 is in t.py:8 in main (step 41) and has begun fewer collectives than the others: ranks 0-1 are in "
            "t.py:9 in main (step 41)", (2,),
        ),
        (hang(*(seen(r, stack(("/w/t.py", 9, "main"))) for r in (0, 1))), "ranks 0-1 are in t.py:9 in main", ()),
        (hang(silent=("b",)), "nobody has told where they are", ()),
    ],
)  # fmt: skip
def test_the_verdict_names_the_odd_one_out(found, verdict, odd):
    assert found.verdict() == (verdict, odd)


def test_the_report_groups_the_ranks_and_has_every_stack(tmp_path):
    found = hang(
        *(seen(r, IN_ALL_REDUCE, pulse=inside()) for r in range(3)),
        seen(4, no_stacks="it is stopped", state="T", stopped_by=19, below=("worker\n (pid 7, state S)",)),
        returned=(3,), hosts={0: "a", 1: "a", 2: "b", 4: "b"}, silent=("c",),
    )  # fmt: skip
    assert group_lines(found) == [
        f"3 ranks {WAIT} (0-2)", "rank 4 on b stopped (SIGSTOP)", "no stack of rank 4: it is stopped",
        "rank 3 returned 0 before",
        "from c came no word where its ranks are",
    ]  # fmt: skip
    assert headline(found).startswith(
        "no rank has finished a step or written anything for 30 s: rank 4 on b is stopped"
    )
    (tmp_path / "stall-1.txt").write_text("of an earlier attempt")
    path = write_report(found, tmp_path)
    assert path.name == "stall-2.txt"
    text = path.read_text()
    assert 'File "/home/me/train.py", line 12, in main' in text
    assert "steps begun: 41, collectives of shardwright's: 83, the last one for linear of layers.3" in text
    assert "no stack: it is stopped" in text
    assert "worker? (pid 7, state S)" in text
    assert text[20:] == report_text(found)[20:]


# --- what a rank writes, and how it is read


RANK = """
import os, signal, sys
from shardwright.common.pulse import open_pulse, site
pulse = open_pulse(sys.argv[1])
pulse.begin_step(41)
pulse.at(site("the gradients of " + "é" * 200, 5))
pulse.note(b"all_reduce", begins=True)
os.kill(os.getpid(), signal.SIGSTOP)
pulse.note(b"")
pulse.begin_step()
"""


def test_a_pulse_is_read_by_another_process_while_the_rank_is_stopped():
    file = PulseFile()
    rank = subprocess.Popen([sys.executable, "-c", RANK, file.path])
    os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
    reading = file.read()
    rank.send_signal(signal.SIGCONT)
    assert rank.wait(60) == 0
    assert (reading.listener, reading.steps, reading.collectives, reading.operation) == (rank.pid, 41, 1, "all_reduce")
    assert reading.site.startswith("the gradients of éé")
    assert reading.site.endswith("é...")
    assert reading.position == 5
    after = file.read()
    assert (after.operation, after.steps) == ("", 41), "who numbers the steps goes on to"
    assert after.beats > reading.beats


def test_a_pulse_that_nobody_gave_or_that_is_gone_is_written_in_vain():
    for path in (None, "/proc/1/fd/99999"):
        pulse = open_pulse(path)
        assert not pulse.watched
        with pulse.inside(b"barrier"):
            pulse.begin_step()


def test_the_stacks_that_faulthandler_and_py_spy_write():
    text = (
        'Thread 0x1 (most recent call first):\n  File "a b.py", line 1 in f\n\nCurrent thread 0x2 (most recent call '
        'first):\n  File "<string>", line 22 in <module>\n  File "t"'
    )
    assert read_faulthandler(text) == (stack(("<string>", 22, "<module>")), stack(("a b.py", 1, "f")))
    assert read_faulthandler("") == ()
    frame = {"name": "Thread.run", "filename": "/t.py", "line": 3}
    threads = [{"os_thread_id": 8, "frames": []}, {"os_thread_id": 7, "frames": [frame]}]
    assert read_py_spy(json.dumps(threads).encode(), 7) == (stack(("/t.py", 3, "run")), ())
    assert read_py_spy(b"Error: Permission denied", 7) == ()


def test_what_was_observed_passes_the_line_and_is_bounded():
    few = [seen(0, IN_ALL_REDUCE, pulse=inside(), below=("sh (pid 3, state S)",))]
    assert decode_observations(encode_observations(few)) == few
    many = [seen(r, (IN_ALL_REDUCE, stack(*[("/x" * 150, 1, "y" * 300)] * 64)) * 32) for r in range(8)]
    data = encode_observations(many)
    assert len(data) < 1 << 22
    assert [o.stacks for o in decode_observations(data)] == [(IN_ALL_REDUCE,)] * 8


def test_progress_is_a_pulse_that_moves():
    file = PulseFile()
    progress = Progress(0.4, {0: file}, lambda: None)
    progress.look()
    pulse = open_pulse(file.path)
    for moves in (True, False, True):
        if moves:
            pulse.beat()
        time.sleep(progress.interval_s)
        assert progress.look() == moves
    assert not progress.look(), "not sooner than the interval"


def test_a_stall_is_asked_about_and_forgotten_when_a_host_has_heard_of_its_ranks(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = StallWatch(8.0)
    assert (watch.wait_s(), watch.should_ask()) == (None, False), "not before all ranks have started"
    watch.moved()
    now[0] += 7
    assert (watch.wait_s(), watch.should_ask()) == (1.0, False)
    now[0] += 1
    assert watch.should_ask()
    watch.ask({"a": None, "b": 5.0})
    watch.answered("a", 8.1, encode_observations([seen(0)]))
    assert not watch.is_stalled()
    watch.answered("b", 0.5, encode_observations([seen(1)]))
    assert not watch.is_stalled(), "b has heard of its ranks: the line was slow"
    now[0] += 8
    assert watch.should_ask()
    watch.ask({"a": None, "b": 5.0})
    watch.answered("a", 8.1, encode_observations([seen(0)]))
    now[0] += 60
    assert watch.is_stalled(), "b never answers"
    assert (watch.observations, watch.silent_hosts) == ([seen(0)], ["b"])
    watch.moved()
    assert not watch.is_stalled()
    watch.reported()
    now[0] += 60
    assert (watch.wait_s(), watch.should_ask()) == (None, False), "a person knows of it"
    assert (watch.moved(), watch.moved(), watch.wait_s()) == (True, False, 8.0)


def test_without_a_timeout_a_person_is_told_of_the_option_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch, deaf = StallWatch(None), StallWatch(None, hears=False)
    for one in (watch, deaf):
        one.moved()
    assert (watch.wait_s(), deaf.wait_s()) == (180.0, None)
    now[0] += 180
    assert (watch.should_ask(), watch.is_stalled()) == (False, False)
    assert (watch.should_hint(), watch.should_hint(), deaf.should_hint()) == (True, False, False)
    watch.moved()
    assert watch.wait_s() is None


# --- the command line


@pytest.mark.parametrize("given", [0, 0.1, -3, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(given):
    said = re.escape(f"--stall-timeout {given:g} is no time to wait for a sign of life; type seconds, at least 0.5 and")
    with pytest.raises(UsageError, match=said):
        read_options(LaunchRequest(kind="program", arguments=["true"], ranks="1", stall_timeout_s=given))


def test_nobody_sets_the_pulse_of_a_rank():
    with pytest.raises(UsageError, match="-x SHARDWRIGHT_PULSE: the launcher sets SHARDWRIGHT_PULSE for each rank"):
        read_variables(["SHARDWRIGHT_PULSE=x"], {})
