"""--via torchrun: the commands that it prints do what ours does, and --run runs them."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launching import wait_until
from many_hosts import jobs_on_hosts
from shardwright.common.step_lines import STEPS_VARIABLE, TELLS_VARIABLE, variable_of_this_rank
from shardwright.launch.carriers.torchrun import one_per_host
from shardwright.launch.host.program import Program
from shardwright.launch.options.launch_options import LaunchOptions

SUM = """
    import os, sys
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    with open(f"seen.{dist.get_rank()}", "w") as file:
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "A", "OMP_NUM_THREADS")
        file.write(" ".join([*(os.environ.get(name, "-") for name in names), f"{total.item():g}", *sys.argv[1:]]))
    dist.destroy_process_group()
"""


def seen(job, ranks):
    return [(job.folder / f"seen.{rank}").read_text() for rank in range(ranks)]


def as_ours(ended):
    """What was printed, with the interpreter of the command by the name that it has here."""
    return ended.stdout.replace(f"{Path(sys.executable).parent}/python3 ", f"{sys.executable} ")


def test_a_command_for_each_host_is_printed(launching):
    words = [
        "-H",
        "me@a:2,[fd00::1]:1",
        "--port",
        "23456",
        "-x",
        "A=x y",
        "-x",
        "fd00::1:B=1",
        "--python",
        "a=/p/python",
    ]
    ended = launching.run(*words, "--wdir", "/w", "--via", "torchrun", "-m", "pkg.train", "--lr", "1 2")
    run = "-m torch.distributed.run --nnodes=2"
    ends = "--master-addr=a --master-port=23456 -m pkg.train --lr '1 2'"
    assert as_ours(ended).splitlines() == [
        "# on me@a",
        f"cd /w && env 'A=x y' /p/python {run} --node-rank=0 --nproc-per-node=2 {ends}",
        "",
        "# on [fd00::1]",
        f"cd /w && env 'A=x y' B=1 {sys.executable} {run} --node-rank=1 --nproc-per-node=1 {ends}",
    ]
    ended = launching.run("-n", "2", "--via", "torchrun", "--", "prog", "-x")
    assert "no program prog on the PATH" in ended.stderr
    ended = launching.run("-n", "2", "--max-restarts", "3", "--via", "torchrun", "--", "true", "-x")
    words = "--standalone --nproc-per-node=2 --max-restarts=3 --no-python true -x"
    assert as_ours(ended) == f"cd {launching.folder} && {sys.executable} -m torch.distributed.run {words}\n"
    assert not (launching.folder / "log_output").exists()
    refused = launching.run("-n", "2", "--run", "--", "true")
    assert (refused.code, "--run belongs to --via torchrun" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_what_is_printed_for_this_host_is_run_by_a_shell_or_by_us(launching):
    words = ["-n", "2", "-x", "A=a b", "--via", "torchrun"]
    script = launching.write("train.py", SUM)
    printed = launching.run(*words, script, "x y").stdout
    done = subprocess.run(["sh", "-c", printed], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    by_shell = seen(launching, 2)
    assert by_shell == [f"{rank} 2 0 a b 1 3 x y" for rank in range(2)]
    ended = launching.run(*words, "--run", script, "x y", timeout_s=60)
    assert ended.code == 0, ended.stderr
    assert seen(launching, 2) == by_shell


def test_of_the_ranks_of_a_torchrun_the_first_tells(monkeypatch):
    options = LaunchOptions(Program("script", ("train.py",)), ranks=2)
    _, _, text, *_ = one_per_host(options).program.arguments
    name, _, value = text.partition(";")[0].removeprefix("export ").partition("=")
    assert name == TELLS_VARIABLE
    monkeypatch.setenv(STEPS_VARIABLE, "pipe")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert variable_of_this_rank(STEPS_VARIABLE) == "pipe"
    monkeypatch.setenv(TELLS_VARIABLE, value)
    assert variable_of_this_rank(STEPS_VARIABLE) is None
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert variable_of_this_rank(STEPS_VARIABLE) == "pipe"


@pytest.mark.slow
def test_what_is_printed_for_two_hosts_is_run_there_by_hand_or_by_us(tmp_path):
    with jobs_on_hosts(2, tmp_path) as (network, job):
        script = job.write("train.py", SUM)
        words = ["-H", "host1:2,host2:1", "-x", "A=1", "--via", "torchrun"]
        _, first, _, _, second = job.run(*words, script).stdout.splitlines()
        started = [
            subprocess.Popen(network.ssh_command(host, f"export PATH={shlex.quote(job.path)}; {line}"))
            for host, line in (("host1", first), ("host2", second))
        ]
        assert [process.wait(60) for process in started] == [0, 0]
        by_hand = seen(job, 3)
        assert by_hand == ["0 2 0 1 1 6", "1 2 0 1 1 6", "0 1 1 1 - 6"]
        ended = job.run(*words, "--run", script, timeout_s=60)
        assert ended.code == 0, ended.stderr
        assert seen(job, 3) == by_hand
        failing = job.write("fail.py", "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(3)\n")
        ended = job.run(*words, "--run", failing, timeout_s=60)
        assert ended.code == 3
        said = "rank 1 on host2 failed first: rank 2 of the ranks that torchrun has started ended with exit code 3"
        assert said in ended.stderr
        killed = job.write("kill.py", "import os\nif os.environ['RANK'] == '2': os.kill(os.getpid(), 9)\n")
        ended = job.run(*words, "--run", killed, timeout_s=60)
        assert ended.code == 137, ended.stderr
        assert "failed first: rank 2 of the ranks that torchrun has started was killed by SIGKILL" in ended.stderr


HANG = """
    import os, time
    from shardwright.common.pulse import own_pulse
    pulse = own_pulse()
    def stands_still():
        time.sleep(100)
    def goes_on():
        while True:
            pulse.begin_step()
            time.sleep(0.1)
    pulse.begin_step()
    stands_still() if os.environ["LOCAL_RANK"] == "0" else goes_on()
"""


@pytest.mark.slow
def test_the_first_rank_of_a_torchrun_answers_where_it_is(launching):
    """It may be slow to start, which is a hang of its own."""
    words = ["-n", "2", "--via", "torchrun", "--run", "--stall-timeout", "4", "--on-stall", "report", "--grace", "1"]
    launcher = launching.start(*words, launching.write("train.py", HANG))

    def told():
        return [path.read_text() for path in (launching.folder / "log_output" / "1").glob("stall-*.txt")]

    wait_until(lambda: any("stands_still" in text for text in told()), 100, "its stack is told")
    assert not any("goes_on" in text for text in told())
    launcher.send_signal(signal.SIGTERM)
    assert launching.finish(launcher).code == 143
