"""Jobs that hang: what the launcher says, which exit code it has, and what is left in the job's folder."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from stalling import TRAINING


def report(launching, job="1"):
    return (launching.folder / "log_output" / job / "stall-1.txt").read_text()


def test_a_rank_that_sleeps_is_shown_though_it_was_not_forked_from_the_zygote(launching):
    script = launching.write("t.py", "import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    ended = launching.run("-n", "2", "--stall-timeout", "2", "--", sys.executable, script)
    assert ended.code == 124
    assert "no rank has finished a step or written anything for 2 s: ranks 0-1 are " in ended.stderr
    assert "their stacks: log_output/1/stall-1.txt" in ended.stderr
    text = report(launching)
    assert "waits in" in text
    assert "py-spy" in text, "either it has read the stacks, or it is named as what could have"
    assert launching.told("failed.json")["rank"] is None
    assert launching.told("run.json")["exit_code"] == 124
    assert "no rank has finished a step" in launching.told("run.json")["cause"]
    assert launching.told("run.json")["stalls"] == ["stall-1.txt"]


@pytest.mark.slow
def test_a_hang_that_is_only_reported_goes_on(launching):
    script = launching.write(
        "t.py",
        """
    import os, time
    for name in ("first", "second"):
        print("on", flush=True)
        while not os.path.exists(name): time.sleep(0.01)
    """,
    )
    words = ["--stall-timeout", "3", "--on-stall", "report", "--", sys.executable, script]
    launcher = launching.start("-n", "1", *words)
    said = ""
    for hangs, name in enumerate(("first", "second"), 1):
        while said.count("  the job goes on (--on-stall report); Ctrl-C ends it") < hangs:
            line = launcher.stderr.readline()
            assert line, said
            said += line
        launching.write(name, "")
    ended = launching.finish(launcher)
    assert ended.code == 0, said + ended.stderr
    said += ended.stderr
    told = "no rank has finished a step or written anything for 3 s: rank 0 is "
    assert said.count(told) == 2, "once for each hang"
    assert said.count("shardwright: the ranks get on again") == 2
    assert not (launching.folder / "log_output/1/failed.json").exists()
    assert (launching.told("run.json")["stalls"], launching.told("run.json")["exit_code"]) == (
        ["stall-1.txt", "stall-2.txt"],
        0,
    )


def test_without_the_option_a_quiet_job_is_told_of_it_once(launching, refused):
    text = "import sys; from shardwright.launch.hangs import stall; stall.HINT_S = 0.5\n"
    text += "from shardwright.cli import main; main()"
    line = [sys.executable, "-c", text, "launch"]
    job = "echo up; until [ -e go ]; do sleep 0.05; done; echo on; sleep 1"
    launcher = launching.start("-n", "1", "--", "sh", "-c", job, line=line)
    assert launcher.stderr.readline() == (
        "shardwright: no rank has written anything for 3 minutes; should the job hang, `--stall-timeout SECONDS` "
        "shows where each rank is, and ends it\n"
    )
    launching.write("go", "")
    ended = launching.finish(launcher)
    assert (ended.code, ended.stderr) == (0, ""), "it is not told again"
    said = refused("-n", "1", "--on-stall", "report", "--", "true")
    assert "--on-stall report without --stall-timeout: nobody" in said


def test_torchrun_looks_for_no_hangs(refused):
    said = refused("-n", "2", "--via", "torchrun", "--stall-timeout", "5", "--", "true")
    assert "torchrun looks for no hangs; --stall-timeout needs --run, or another --via" in said


@pytest.mark.slow
def test_who_writes_or_takes_steps_now_and_then_is_left_alone(launching):
    script = launching.write(
        "t.py",
        """
    import os, sys, time
    from shardwright.common.pulse import own_pulse
    print("up", flush=True)
    for i in range(90):  # for longer than the limit by either sign of life alone
        time.sleep(0.2)
        if i < 45 and i % 2 == int(os.environ["RANK"]): print(i, file=sys.stderr, flush=True)
        if i >= 45: own_pulse().begin_step()
    """,
    )
    ended = launching.run("-n", "2", "--stall-timeout", "8", "--tee", "none", "--", sys.executable, script)
    assert (ended.code, ended.stderr) == (0, "")


def test_a_rank_that_is_stopped_inside_a_step_is_named_with_what_the_others_wait_for(launching):
    script = launching.write(
        "train.py", TRAINING.replace("RANK", "1").replace("HOW", "os.kill(os.getpid(), signal.SIGSTOP)")
    )
    ended = launching.run("-n", "3", "--stall-timeout", "3", "--grace", "2", script, timeout_s=100)
    assert ended.code == 124, ended.stderr
    named = (
        r"for 3 s: rank 1 is stopped \(SIGSTOP\) in (train.py:\d+ in hurt \()?step 4\)?; "  # its stack by py-spy alone
        r"2 ranks wait for it in all_reduce of step 4 for the loss\n"
    )
    assert re.search(named, ended.stderr), ended.stderr
    assert "2 ranks in all_reduce of step 4 for the loss (0, 2)" in ended.stderr
    assert launching.told("failed.json")["rank"] == 1
    text = report(launching)
    assert text.count("in all_reduce\n") >= 2, "the stacks of those that wait"
    assert "supervisor/zygote.py" not in text


@pytest.mark.slow
def test_a_rank_that_skips_a_collective_is_named(launching):
    """Where the backend does not compare what ranks call: with shm it is an error at once."""
    text = TRAINING.replace("RANK", "1").replace("HOW", "return tensor").replace("sw.init()", "sw.init('gloo')")
    text = text.replace("nn.Linear(8, 8))", "nn.Linear(8, 8), nn.BatchNorm1d(8))")
    script = launching.write("train.py", text)
    ended = launching.run("-n", "3", "--stall-timeout", "3", script, timeout_s=100)
    assert ended.code == 124, ended.stderr
    named = (
        r"rank 1 is in all_gather of step \d for \S+ of 2 while 2 ranks wait in all_reduce of step \d for .*: it has "
        r"passed or skipped that one\n"
    )
    assert re.search(named, ended.stderr), ended.stderr


DDP = """
    import os, signal, threading, time, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    up = threading.Event()
    def alive():
        while not up.wait(0.3): print(".", flush=True)
    threading.Thread(target=alive, daemon=True).start()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    class Slow(torch.utils.data.Dataset):
        def __len__(self): return 8
        def __getitem__(self, i):
            if i == 4 and dist.get_rank() == 2: time.sleep(600)
            return torch.zeros(4)
    def train():
        for i, batch in enumerate(torch.utils.data.DataLoader(Slow(), batch_size=1, num_workers=WORKERS)):
            if i == 3: up.set()
            model(batch).sum().backward()
    train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_of_torch_alone_is_explained_by_its_stacks(launching, workers):
    script = launching.write("ddp.py", DDP.replace("WORKERS", str(workers)))
    ended = launching.run("-n", "3", "--stall-timeout", "3", script, timeout_s=100)
    assert ended.code == 124, ended.stderr
    where = "in ddp.py:13 in __getitem__" if workers == 0 else "in DataLoader (called at ddp.py:16 in train)"
    assert f"rank 2 is {where} while 2 ranks wait in the backward (called at ddp.py:18 in train)" in ended.stderr
    assert ("processes below it" in report(launching)) == (workers == 1)


@pytest.mark.slow
def test_a_rank_that_returned_early_is_named(launching):
    script = launching.write(
        "t.py",
        """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1: os._exit(0)
    import time
    def wait_for_it(): time.sleep(600)
    wait_for_it()
    """,
    )
    ended = launching.run("-n", "2", "--stall-timeout", "8", script, timeout_s=100)
    assert ended.code == 124, ended.stderr
    assert "rank 0 is in t.py:7 in wait_for_it" in ended.stderr
    assert "rank 1 returned 0 before" in ended.stderr


@pytest.mark.slow
def test_ranks_of_mpirun_are_watched(launching):
    if not Path(sys.executable).with_name("mpirun").is_file():
        pytest.skip("no mpirun beside this Python")
    script = launching.write(
        "t.py",
        """
    import os, time
    from shardwright.common.pulse import own_pulse
    for _ in range(6):
        own_pulse().begin_step()
        time.sleep(0.3)
    def hang(): time.sleep(600)
    hang()
    """,
    )
    ended = launching.run("-n", "2", "--via", "mpirun", "--stall-timeout", "2", script, timeout_s=100)
    assert ended.code == 124, ended.stderr
    assert "for 2 s: ranks 0-1 are in t.py:7 in hang (step 6)\n" in ended.stderr
    assert "steps begun: 6" in report(launching)


@pytest.mark.slow
def test_the_stacks_of_a_stopped_rank_come_from_py_spy_where_it_is_installed(launching):
    if not (shutil.which("py-spy") or Path(sys.executable).with_name("py-spy").is_file()):
        pytest.skip("no py-spy")
    script = launching.write(
        "t.py", "import os, signal\ndef halt(): os.kill(os.getpid(), signal.SIGSTOP)\nprint(1, flush=True)\nhalt()\n"
    )
    ended = launching.run("-n", "1", "--stall-timeout", "1", "--", sys.executable, script)
    assert ended.code == 124
    assert "for 1 s: rank 0 is stopped (SIGSTOP) in t.py:2 in halt\n" in ended.stderr


@pytest.mark.slow
def test_a_program_that_took_the_place_of_the_rank_is_not_sent_a_signal(launching):
    script = launching.write(
        "t.py",
        """
    import os, sys
    os.execv(sys.executable, [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"])
    """,
    )
    ended = launching.run("-n", "1", "--stall-timeout", "4", script, timeout_s=100)
    assert (ended.code, launching.log(0)) == (124, "up\n")
    assert "neither forked by the launcher" in report(launching) or "by py-spy" in report(launching)
