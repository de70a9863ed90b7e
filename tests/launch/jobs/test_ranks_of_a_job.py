"""What a rank finds: torchrun's variables, and an interpreter like any other."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from ranks import given_port
from shardwright.launch.carriers.connection import default_environment, where_unset
from shardwright.launch.host.program import Program
from shardwright.launch.joblog.judge import read_error_file
from shardwright.launch.supervisor import zygote

REPORT = """
    import json, os
    json.dump(dict(os.environ), open(f"env.{os.environ['RANK']}", "w"))
"""


def environments(launching, ranks):
    return [json.loads((launching.folder / f"env.{rank}").read_text()) for rank in range(ranks)]


def test_ranks_differ_in_their_rank_and_in_random_numbers_that_nobody_seeded(launching):
    script = launching.write(
        "train.py", REPORT + "    import numpy, random; print(random.random(), numpy.random.rand())"
    )
    given = {"RANK": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert launching.run("-n", "2", script, env=launching.light_torch("import numpy.random") | given).code == 0
    for one, other in zip(*(launching.log(rank).split() for rank in range(2)), strict=True):
        assert one != other
    zero, one = environments(launching, 2)
    assert {name for name in zero if zero[name] != one[name]} == {
        "RANK",
        "LOCAL_RANK",
        "ROLE_RANK",
        "TORCHELASTIC_ERROR_FILE",
        "SHARDWRIGHT_STEPS",
    }
    assert (one["RANK"], one["LOCAL_RANK"], one["ROLE_RANK"]) == ("1", "1", "1")
    assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["ROLE_WORLD_SIZE"]) == ("2", "2", "2")
    assert (one["GROUP_RANK"], one["GROUP_WORLD_SIZE"], one["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert (one["TORCHELASTIC_RESTART_COUNT"], one["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")
    assert one["TORCHELASTIC_RUN_ID"] == one["SHARDWRIGHT_JOB"]
    assert "TORCHELASTIC_USE_AGENT_STORE" not in one
    assert one["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert one["GLOO_SOCKET_IFNAME"] == "lo"
    assert one["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_options_of_the_allocator_that_a_user_has_set_stand_alone():
    """By whichever of their names: where several are set, torch reads one of them."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert not [other for other in where_unset(default_environment(4, 2), {name}) if "ALLOC_CONF" in other]


def test_variables_and_devices_from_the_command_line(launching):
    port = given_port()
    script = launching.write("train.py", REPORT)
    ended = launching.run(
        "-n", "1", "-x", "A=b=c", "-x", "PASSED", "-x", "OMP_NUM_THREADS=3", "--devices", "5,4",
        "-x", "PYTORCH_CUDA_ALLOC_CONF=a:1", "--port", str(port), "--", sys.executable, script,
        env={"PASSED": "on", "CUDA_VISIBLE_DEVICES": "4,5,6"},
    )  # fmt: skip
    assert ended.code == 0, ended.stderr
    (zero,) = environments(launching, 1)
    assert (zero["A"], zero["PASSED"], zero["OMP_NUM_THREADS"]) == ("b=c", "on", "3")
    assert (zero["CUDA_VISIBLE_DEVICES"], zero["MASTER_PORT"]) == ("5,4", str(port))
    assert {name: value for name, value in zero.items() if "ALLOC_CONF" in name} == {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}


def test_variables_are_in_place_before_torch_is_imported(launching):
    light = launching.light_torch("import os; SEEN = dict(os.environ); PID = os.getpid()")
    script = launching.write(
        "train.py",
        """
    import os, torch
    print(torch.SEEN["CUSTOM"], torch.SEEN["OMP_NUM_THREADS"], torch.PID == os.getppid(), "RANK" in torch.SEEN)
    """,
    )
    fake = f"PYTHONPATH={light['PYTHONPATH']}"
    ended = launching.run("-n", "1", "-x", "CUSTOM=1", "-x", fake, script, env={"OMP_NUM_THREADS": "5"})
    assert ended.stdout == "1 5 True False\n", ended.stderr


PROBE = """
    import atexit, multiprocessing, sys, threading, time
    def double(x):
        return 2 * x
    if __name__ == "__main__":
        atexit.register(print, "at exit")
        print(sys.argv, __file__, __spec__ and __spec__.name, sys.path[0], "main" in vars())
        print(sys.modules["__main__"].double is double, sys.stdin.read() == "", threading.active_count())
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                print(method, pool.map(double, [1, 2]))
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        sys.exit("a message")
"""


@pytest.mark.parametrize(
    "target", [["sub/probe.py"], pytest.param(["-m", "sub.probe"], marks=pytest.mark.slow)], ids=["script", "module"]
)
def test_a_forked_rank_is_like_a_fresh_interpreter(launching, target):
    (launching.folder / "sub").mkdir()
    launching.write("sub/probe.py", PROBE)
    plain = subprocess.run(
        [sys.executable, *target, "-v", "--", "x"], cwd=launching.folder, capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    ended = launching.run("-n", "1", *target, "-v", "--", "x", env=launching.light_torch())
    assert ended.stdout == plain.stdout
    assert "spawn [2, 4]\nthread\nat exit\n" in ended.stdout
    assert ended.code == plain.returncode == 1
    assert ended.stderr.splitlines()[0] == plain.stderr.splitlines()[0] == "a message"


def test_a_file_of_the_user_shadows_nothing_before_its_script_runs(launching):
    launching.write("selectors.py", "raise SystemExit('shadowed')")
    script = launching.write("train.py", "import sys; print(sys.path[0])")
    light = launching.light_torch("import selectors")
    assert launching.run("-n", "1", script, env=light).stdout == f"{launching.folder}\n"


def test_an_uncaught_exception_is_reported_as_by_the_interpreter(launching):
    script = launching.write("train.py", "def f():\n    return {}['x']\ntry:\n    f()\nexcept KeyError:\n    f()\n")
    plain = subprocess.run([sys.executable, script], cwd=launching.folder, capture_output=True, text=True, timeout=60)
    launching.run("-n", "1", "--tee", "none", script, env=launching.light_torch())
    assert launching.log(0, "stderr") == plain.stderr


def test_an_error_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))  # as on a full disk
    try:
        zygote._write_error_file(ValueError("x"), 7.25)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    for error in (ValueError("x"), ValueError("a later one")):
        zygote._write_error_file(error, 7.25)
    assert list(tmp_path.iterdir()) == [path]
    assert read_error_file(path) == ("ValueError: x", 7.25)


@pytest.mark.slow
def test_an_interrupted_rank_dies_as_by_the_interpreter(launching):
    script = launching.write("train.py", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    ended = launching.run("-n", "1", script)
    assert ended.code == 128 + signal.SIGINT
    assert launching.log(0, "stderr").splitlines()[-1] == "KeyboardInterrupt"
    assert "zygote.py" not in launching.log(0, "stderr")


@pytest.mark.slow
def test_parallel_operators_and_a_collective_work_after_the_fork(launching):
    script = launching.write(
        "train.py",
        """
    import torch, torch.distributed as dist
    torch.set_num_threads(2)
    dist.init_process_group("gloo")
    product = torch.ones(512, 512) @ torch.ones(512, 512)
    dist.all_reduce(product)
    print(product[0, 0].item())
    dist.destroy_process_group()
    """,
    )
    ended = launching.run("-n", "2", "--tee", "all", script)
    assert ended.code == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] 1024.0", "[rank 1] 1024.0"]


def test_what_training_imports_is_there_when_ranks_begin_and_data_loaders_work(launching):
    """Imported once for all ranks, where the script names it; nothing of a rank has been set up by that."""
    script = launching.write(
        "train.py",
        """
    import sys
    there = [name in sys.modules for name in ("torch._dynamo", "shardwright.runtime.parallel")]
    import shardwright as sw
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from shardwright.common.pulse import open_pulse
    print(there, open_pulse.cache_info().currsize)
    data = TensorDataset(torch.arange(8))
    print(sum(int(batch.sum()) for (batch,) in DataLoader(data, 2, num_workers=2)))
    """,
    )
    environment = {"CUDA_VISIBLE_DEVICES": ""}  # with GPUs ranks import by themselves
    ended = launching.run("-n", "1", script, env=environment)
    assert (ended.code, ended.stdout, ended.stderr) == (0, "[True, True] 0\n28\n", "")
    plain = launching.write("plain.py", "import torch.distributed as dist")
    sets = launching.write("sets.py", "import os; os.environ['TORCH_COMPILE_DISABLE'] = '1'; import shardwright")
    for own in (plain, sets):
        assert not zygote.trains(Program("script", (str(launching.folder / own),)))


def test_programs_modules_and_folders(launching):
    assert launching.run("-n", "1", "--", "sh", "-c", "echo $0 $1 -- $RANK", "a", "--").stdout == "a -- -- 0\n"
    assert launching.run("-n", "1", "--no-preload", "-m", "timeit", "-n1", "-r1", "pass").code == 0
    (launching.folder / "tool").mkdir()
    launching.write("tool/__main__.py", "import sys; print(sys.argv)")
    assert launching.run("-n", "1", "tool", "--", "y", env=launching.light_torch()).stdout == "['tool', '--', 'y']\n"


@pytest.mark.parametrize("how", [[], pytest.param(["--no-preload"], marks=pytest.mark.slow)])
def test_ranks_inherit_nothing_that_keeps_the_launcher_waiting(launching, how):
    script = launching.write("train.py", "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    plain = subprocess.run([sys.executable, script], cwd=launching.folder, capture_output=True, text=True)
    assert launching.run("-n", "2", *how, script, env=launching.light_torch()).stdout == plain.stdout
