"""The mpi backend under mpirun and under our launcher: right results, exact training, and ends that are told."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli import cli

BIN = Path(sys.executable).parent
TESTS = Path(__file__).parents[2] / "support"
PROGRAM = str(Path(__file__).with_name("backend_ranks.py"))
MPIRUN = shutil.which("mpirun", path=str(BIN)) or shutil.which("mpirun")

needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="needs mpirun: pip install 'shardwright[mpi]'")
slow = pytest.mark.slow


def environment(**more):
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    return inherited | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | more


def command(way, ranks, *program):
    if way == "mpirun":
        return [MPIRUN, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks),
                sys.executable, *program]  # fmt: skip
    return [BIN / "shardwright", "launch", "--via", "mpirun", "--backend", "mpi", "-n", str(ranks), *program]


def run(way, ranks, *program, folder, timeout_s=110, **env):
    """How a job ended, and what it wrote. Under mpirun the script itself asks for the backend."""
    more = {"INIT": json.dumps({"backend": "mpi"})} if way == "mpirun" else {}
    mark = f"mpi-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        return subprocess.run(
            command(way, ranks, *program), env=environment(**{"MARK": mark} | more | env), cwd=folder,
            timeout=timeout_s, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        for pid in living(env.get("MARK", mark)):  # mpirun is killed, and leaves its ranks
            os.kill(pid, signal.SIGKILL)
        raise


def answer(ended):
    lines = [line for line in ended.stdout.splitlines() if line.startswith("ANSWER ")]
    assert ended.returncode == 0, ended.stderr
    assert len(lines) == 1, ended.stdout + ended.stderr
    return json.loads(lines[0].removeprefix("ANSWER "))


def assert_exact(found):
    for ok, text, moved in found:
        assert ok, text
        assert moved
        assert text.endswith("within tolerance: the plan gives what one device gives")


@needs_mpi
@pytest.mark.parametrize(("way", "ranks"), [("mpirun", 2), pytest.param("launch", 4, marks=slow)])
def test_collectives_and_training(way, ranks, tmp_path):
    found = answer(run(way, ranks, PROGRAM, "cheap", folder=tmp_path, EXAMPLES="6" if way == "mpirun" else "40"))
    assert found["world"].endswith("cpu, mpi")
    assert found["reductions"] >= 6
    assert_exact(found["exact"])
    average, bits, meta, count, whole, rows, other = found["refused"]
    assert average == (
        "the mpi backend cannot reduce by AVG on torch.int32; for torch.int32 it knows SUM, PRODUCT, MAX, MIN, BAND, "
        "BOR, BXOR"
    )
    assert "cannot reduce by BAND on torch.float32" in bits
    assert "all_reduce got a tensor on meta" in meta
    assert f"expected {ranks} tensors, one for each rank, of torch.float32, that of rank 0 with 2 elements" in count
    assert f"got an output of 3 elements of torch.float32; expected {ranks} times the 2 elements" in whole
    assert f"got {ranks + 1} output rows, which {ranks} ranks cannot share evenly" in rows
    assert "the world is already there with backend='mpi'" in other


@slow
@needs_mpi
def test_subgroups_and_counts_beyond_what_mpi_counts(tmp_path):
    answer(run("mpirun", 4, PROGRAM, "groups", folder=tmp_path))


@slow
@needs_mpi
@pytest.mark.parametrize(
    ("way", "how", "code", "cause"),
    [
        ("launch", "raises", 1, "rank 1 failed first: exit code 1, ValueError: the end of rank 1"),
        ("launch", "killed", 137, "rank 1 failed first: killed by SIGKILL"),
        ("launch", "exits", 1, "rank 1 has ended, while rank 0 waits for it in all_reduce"),
        ("mpirun", "hangs", 1, "rank 0 has waited"),
    ],
)
def test_a_rank_that_goes_ends_the_job(way, how, code, cause, tmp_path):
    mark = f"mpi-test-{os.getpid()}-{time.monotonic_ns()}"
    ended = run(way, 2, PROGRAM, "dies", how, folder=tmp_path, TIMEOUT="600", timeout_s=110, MARK=mark)
    assert ended.returncode == code, ended.stderr
    assert "ANSWER" not in ended.stdout
    if way == "launch":
        assert cause in ended.stderr
        assert f"its log: {Path('log_output/1/rank')}." in ended.stderr
    deadline = time.monotonic() + 60
    while left := living(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def living(mark):
    """The processes of a job by their ids, told by what their environment says."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"MARK={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
        except OSError:
            continue
    return found


@needs_mpi
def test_the_launcher_killed_takes_everything_with_it(tmp_path):
    """mpirun by itself leaves its ranks where it is killed; each rank has its own log, and passes on its output."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, time\n"
        "print('rank', os.environ['RANK'], os.environ['OMPI_COMM_WORLD_RANK'], flush=True)\n"
        "time.sleep(600)\n"
    )
    mark = f"mpi-test-{os.getpid()}-{time.monotonic_ns()}"
    launcher = subprocess.Popen(
        [*command("launch", 3), "--tee", "none", script], env=environment(MARK=mark), cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    logs = [tmp_path / "log_output" / "1" / f"rank.{rank}" / "stdout" for rank in range(3)]
    try:
        until(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs), 60)
        assert [log.read_text() for log in logs] == [f"rank {rank} {rank}\n" for rank in range(3)]
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not living(mark), 60)


def until(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "mpi"], "--backend mpi needs ranks that mpirun starts; type --via mpirun --backend mpi"),
        (["--mca", "pml", "ob1"], "--mca pml ob1 is a setting of mpirun; leave it out, or type --via mpirun too"),
        (["-mca", "pml", "ob1"], "--mca pml ob1 is a setting of mpirun; leave it out, or type --via mpirun too"),
        (["--via", "mpirun", "--mca", "p;l", "ob1"], "--mca p;l ob1 names no setting; type --mca NAME VALUE"),
    ],
)
def test_words_that_go_together(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(cli, ["launch", "-n", "2", *words, PROGRAM])
    assert message in str(ended.exception)
    assert not (tmp_path / "log_output").exists()


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    from shardwright.distributed.backends import mpi
    from shardwright.errors import LaunchError, WorldError
    from shardwright.launch.hosts.environment import LaunchEnvironment
    from shardwright.launch.options import carrier_facts

    told = LaunchEnvironment(launcher="torchrun", rank=0, size=2)
    for name in mpi._MARKERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(WorldError, match=r"needs mpi4py and an MPI library; type pip install 'shardwright\[mpi\]'"):
        mpi.prepare(told)
    monkeypatch.delitem(sys.modules, "mpi4py")
    pytest.importorskip("mpi4py")
    with pytest.raises(WorldError, match="needs ranks that mpirun started, and torchrun started these; type `mpirun"):
        mpi.prepare(told)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match=r"there is no mpirun beside .* type pip install 'shardwright\[mpi\]'"):
        carrier_facts.find_mpirun({"PATH": str(tmp_path)})
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho HYDRA build details:\n")
    other.chmod(0o755)
    with pytest.raises(LaunchError, match=r"understands Open MPI's mpirun, but .* answers: HYDRA build details:"):
        carrier_facts.find_mpirun({"PATH": ""})
    assert carrier_facts.mpirun_command("mpirun", 3, [("pml", "ob1")], root=False) == (
        "mpirun", "--host", "localhost:3", "-n", "3", "--bind-to", "none", "--mca", "pml", "ob1",
    )  # fmt: skip
