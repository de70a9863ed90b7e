"""Under a real Slurm of two nodes: its own srun, our launcher in an allocation, and a batch script of ours."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import host_network
from launching import COMMAND, wait_until
from many_hosts import ManyHosts
from shardwright.launch.carriers.srun import SrunCarrier
from shardwright.launch.host.program import Program
from shardwright.launch.hosts.hosts import Hosts
from shardwright.launch.options.launch_options import LaunchOptions
from shardwright.launch.options.request import PerHost, RemoteOptions
from slurm import slurm

SUM = """
    import sys
    import torch, torch.distributed as dist
    import shardwright as sw
    world = sw.init()
    total = torch.tensor(float(world.rank + 1))
    dist.all_reduce(total)
    with open(f"seen.{world.rank}", "w") as file:
        file.write(f"{world.rank} of {world.size}, {world.local_rank} here, sum {total.item():g}, {sys.argv[1:]}")
"""
PLACES = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $(hostname) $SLURM_JOB_ID"'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with (
        host_network(2, tmp_path_factory.mktemp("hosts")) as network,
        slurm(network, tmp_path_factory.mktemp("slurm")) as environment,
    ):
        yield network, environment


@pytest.fixture
def job(cluster, tmp_path):
    network, environment = cluster
    job = SlurmJobs(tmp_path, network, environment)
    try:
        yield job
        job.assert_none_left()
    finally:
        job.close()


class SlurmJobs(ManyHosts):
    def __init__(self, folder, network, environment):
        super().__init__(folder, network)
        self.environment = os.environ | environment

    def allocated(self, *words, tasks=4, **options):
        """The command in an allocation of both nodes."""
        command = ["salloc", "--quiet", "-N", "2", f"--ntasks-per-node={tasks // 2}", COMMAND, "launch", *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, **options,
        )  # fmt: skip

    def run_allocated(self, *words, timeout_s=60, **options):
        process = self.allocated(*words, **options)
        stdout, stderr = process.communicate(timeout=timeout_s)
        return process.returncode, stdout, stderr

    def submit(self, *words, wait=True, **options):
        """With the job's number as output; if ``wait``, once it has ended."""
        said = subprocess.run(
            ["sbatch", "--parsable", *(["--wait"] if wait else []), *words],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=90, **options,
        )  # fmt: skip
        return said.returncode, said.stdout.strip(), said.stderr


def test_an_agents_step_has_all_of_its_node_and_ranks_have_what_slurm_says_there(monkeypatch):
    given = {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "3"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    remote = RemoteOptions(Hosts.from_list("a:8"), python=PerHost("/p"))
    carrier = SrunCarrier(LaunchOptions(Program("program", ("true",)), 0, remote=remote), remote)
    client, shared = carrier.client_environment(), carrier.shared_environment()
    assert {name: client.get(name) for name in given} == {
        "SLURM_GPUS_PER_TASK": None, "SLURM_NTASKS_PER_NODE": None, "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "3"
    }  # fmt: skip
    assert not given.keys() & shared.keys()
    assert shared["PATH"] == os.environ["PATH"]
    command = carrier.command(remote.hosts.hosts[0])
    assert {"--overlap", "--mem=0", "--nodelist=a", "--unbuffered", "--immediate=10"} <= set(command)
    assert command[-3:-1] == ["/p", "-c"]


READ = """
    import os
    from shardwright.launch.hosts.environment import read_environment
    told = read_environment(os.environ)
    print(told.launcher, told.rank, told.size, told.local_rank, told.local_size, told.host, told.meeting.address)
"""


def test_what_srun_says_to_its_tasks_is_understood(job):
    command = ["srun", "-N", "2", "-n", "3", "--distribution=block", sys.executable, job.write("read.py", READ)]
    done = subprocess.run(command, cwd=job.folder, env=job.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "Slurm 0 3 0 2 host1 host1", "Slurm 1 3 1 2 host1 host1", "Slurm 2 3 0 1 host2 host1"
    ]  # fmt: skip


@pytest.mark.slow
def test_a_script_under_srun_is_initialised(job):
    command = ["srun", "-N", "2", "-n", "2", sys.executable, job.write("train.py", SUM), "word"]
    done = subprocess.run(command, cwd=job.folder, env=job.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = [(job.folder / f"seen.{rank}").read_text() for rank in range(2)]
    assert seen == [f"{rank} of 2, 0 here, sum 3, ['word']" for rank in range(2)]


def test_the_launcher_starts_the_ranks_of_an_allocation(job):
    code, shown, said = job.run_allocated("--via", "srun", "--", "sh", "-c", PLACES)
    assert (code, said) == (0, ""), said
    number = shown.split()[-1]
    assert [job.log(rank) for rank in range(4)] == [
        f"0 0 4 host1 {number}\n", f"1 1 4 host1 {number}\n", f"2 0 4 host2 {number}\n", f"3 1 4 host2 {number}\n"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("where", [["-H", "host2:1,host1:1"], ["-n", "2"]])
def test_ranks_of_srun_reduce_with_preloaded_torch(job, where):
    code, _, said = job.run_allocated("--via", "srun", *where, job.write("train.py", SUM))
    assert code == 0, said
    places = ["0 here", "0 here"] if where[0] == "-H" else ["0 here", "1 here"]
    assert [(job.folder / f"seen.{rank}").read_text() for rank in range(2)] == [
        f"{rank} of 2, {place}, sum 3, []" for rank, place in enumerate(places)
    ]


@pytest.mark.slow
def test_what_slurm_refuses_is_said(job):
    code, _, said = job.run_allocated("--via", "srun", "-H", "host1:1,host7:1", "--", "true")
    assert code == 2
    assert "host7: it is no node of this allocation, which has host[1-2]; name some of those" in said
    code, _, said = job.run_allocated("--via", "srun", "--python", "host2=/nowhere/python", "--", "true")
    assert code == 2
    assert "1 of 2 hosts cannot be used:\n  host2: there is no /nowhere/python there" in said
    code, _, said = job.run_allocated("--via", "srun", "-n", "9", "--", "true")
    assert code == 2
    assert "-n 9 is more than the slots of 2 hosts, 4 slots" in said
    ended = job.run("--via", "srun", "--", "true")
    assert (ended.code, "--via srun starts ranks in an allocation of Slurm, and this is none;" in ended.stderr) == (
        2,
        1,
    )


@pytest.mark.slow
def test_the_rank_that_failed_is_named_and_all_others_end(job):
    script = job.write("train.py", "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(7)\ntime.sleep(100)\n")
    code, _, said = job.run_allocated("--via", "srun", "--", sys.executable, script)
    assert code == 7
    assert "rank 3 on host2 failed first: exit code 7" in said


UP = """
import os, signal, time
signal.signal(15, signal.SIG_IGN)
rank = os.environ["RANK"]
open(f"scratch.{rank}", "w").write(os.path.dirname(os.environ["SHARDWRIGHT_FAILED_MARK"]))
open(f"up.{rank}", "w").write("x")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["launcher", "srun", "scancel"])
def test_nothing_survives_what_is_killed(job, how):
    script = job.write("train.py", UP + "time.sleep(100)\n")
    words = ["--via", "srun", "--lease", "2", "--grace", "1", "--job", "j", "--", sys.executable, script]
    allocation = job.allocated(*words, tasks=2)
    job.wait_for_ranks(2)
    launcher = int(re.search(r'"pid": (\d+)', (job.folder / "log_output/j/job.json").read_text())[1])
    if how == "scancel":
        subprocess.run(["scancel", "--user=root"], env=job.environment, check=True, timeout=20)
    else:
        below = subprocess.run(["pgrep", "-P", str(launcher), "srun"], capture_output=True, text=True).stdout.split()
        assert len(below) >= 2
        os.kill(launcher if how == "launcher" else int(below[0]), signal.SIGKILL)
    _, said = allocation.communicate(timeout=60)
    wait_until(lambda: not job.survivors(), 60, "the end of all processes")
    scratch = [Path((job.folder / f"scratch.{rank}").read_text()) for rank in (0, 1)]
    if how == "scancel":  # where srun is gone Slurm kills agents at once, and nobody is left to remove anything
        wait_until(lambda: not any(path.exists() for path in scratch), 60, "the job's folders on the nodes are removed")
    for path in scratch:
        shutil.rmtree(path, ignore_errors=True)
    if how == "srun":
        assert allocation.returncode == 1
        assert "the connection to host" in said
        assert "ended (was killed by SIGKILL), and all ranks with it" in said


@pytest.mark.slow
def test_a_printed_script_runs_as_a_batch_job(job):
    script = job.write("train.py", SUM)
    words = ["launch", "-n", "2", "--log-dir", "logs", "--print", "slurm", script, "a b", "--print-sbatch"]
    printed = subprocess.run([COMMAND, *words], cwd=job.folder, capture_output=True, text=True, timeout=30, check=True)
    code, _, said = job.submit("-N", "2", "--output=out", input=printed.stdout)
    assert code == 0, said + (job.folder / "out").read_text()
    assert [(job.folder / f"seen.{rank}").read_text() for rank in range(2)] == [
        f"{rank} of 2, 0 here, sum 3, ['a b', '--print-sbatch']" for rank in range(2)
    ]
    assert (job.folder / "logs/1/run.json").exists()


@pytest.mark.slow
def test_a_batch_job_that_is_told_to_end_tells_its_ranks(job):
    """As Slurm does before its time is over: TERM to the script, which is the launcher."""
    heed = "import os, signal, sys, time\nrank = os.environ['RANK']\n" + (
        "signal.signal(15, lambda *_: (open(f'told.{rank}', 'w').write('x'), sys.exit(0)))\n"
        "open(f'up.{rank}', 'w').write('x')\ntime.sleep(100)\n"
    )
    words = ["launch", "-n", "2", "--print-sbatch", "--", sys.executable, job.write("train.py", heed)]
    printed = subprocess.run([COMMAND, *words], cwd=job.folder, capture_output=True, text=True, timeout=30, check=True)
    assert "#SBATCH --signal=B:TERM@60\n" in printed.stdout
    code, number, said = job.submit("-N", "2", "--output=out", wait=False, input=printed.stdout)
    assert code == 0, said
    job.wait_for_ranks(2)
    end = ["scancel", "--batch", "--signal=TERM", number]
    subprocess.run(end, env=job.environment, check=True, timeout=20)
    for rank in (0, 1):
        job.wait_for_file(f"told.{rank}")
    wait_until(lambda: "SIGTERM: ending 2 ranks" in (job.folder / "out").read_text(), 60, "the launcher says so")
    wait_until(lambda: not job.survivors(), 60, "the end of all processes")
