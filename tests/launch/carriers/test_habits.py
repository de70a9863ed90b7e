"""What people type already, and the scripts that they have: each runs as it is, within a bound of time."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from many_hosts import jobs_on_hosts

BIN = Path(sys.executable).parent
MPIRUN = shutil.which("mpirun", path=str(BIN)) or shutil.which("mpirun")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="needs mpirun: pip install 'shardwright[mpi]'")
TRAIN = """
import argparse, json, os
import torch
from torch import nn
import shardwright as sw

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
config = json.load(open(parser.parse_args().config))


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


world = sw.init()
sw.set_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
batch = torch.randn(8, 6).double(), torch.randn(8, 2).double()
parallel = sw.parallelize(model, loss_fn, batch, config["mode"], batch="global")
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
losses = []
for _ in range(config["steps"]):
    loss = parallel(batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if world.rank == 0:
    print(json.dumps({"size": world.size, "losses": losses, "data": os.environ.get("DATA_PATH")}), flush=True)
"""
TRAIN_TEST = """
import torch
import torch.distributed as dist
import shardwright as sw


def test_ranks_agree():
    world = sw.init()
    total = torch.tensor(float(world.rank + 1))
    dist.all_reduce(total)
    print(f"rank {world.rank} of {world.size} has {total.item():g}")
    assert total.item() == world.size * (world.size + 1) / 2
"""


@pytest.fixture
def project(tmp_path):
    for folder in ("tools", "configs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tools/train.py").write_text(TRAIN)
    (tmp_path / "train_test.py").write_text(TRAIN_TEST)
    (tmp_path / "configs/net.json").write_text('{"mode": "data", "steps": 3}')
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    return tmp_path


def run(folder, command, timeout_s=100, **env):
    """From the user's own folder, with the user's environment."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "OMPI_"))}
    return subprocess.run(
        [str(word) for word in command], cwd=folder, env=inherited | {"PATH": f"{BIN}:{os.environ['PATH']}"} | env,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


def trained(done):
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = re.findall(r"\{.*\}", done.stdout)
    return json.loads(line)


SCRIPT = ["python", "tools/train.py", "--config", "configs/net.json"]
MPIRUN_WORDS = {
    "few": ["--allow-run-as-root", "-n", "2"],
    "many": [
        "--allow-run-as-root", "-n", "2", "--hostfile", "hosts", "-x", "DATA_PATH", "-x", "PATH", "-mca", "pml", "ob1",
        "-mca", "btl", "^openib", "-mca", "btl_tcp_if_include", "lo",
    ],
}  # fmt: skip


@needs_mpi
@pytest.mark.parametrize("words", MPIRUN_WORDS)
def test_a_training_script_under_mpirun(project, words):
    alone = trained(run(project, SCRIPT))
    together = trained(run(project, ["mpirun", *MPIRUN_WORDS[words], *SCRIPT], DATA_PATH="/data/mnist"))
    assert (alone["size"], together["size"], together["data"]) == (1, 2, "/data/mnist")
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-12)
    assert len(alone["losses"]) == 3


@needs_mpi
def test_pytest_under_mpirun(project):
    done = run(project, ["mpirun", "--allow-run-as-root", "-n", "2", "pytest", "-s", "-v", "train_test.py"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank \d of 2 has 3", done.stdout)) == ["rank 0 of 2 has 3", "rank 1 of 2 has 3"]
    (project / "train_test.py").write_text(TRAIN_TEST + "    assert world.rank == 0, 'rank 1 has something to say'\n")
    done = run(project, ["mpirun", "--allow-run-as-root", "-n", "2", "pytest", "-s", "-v", "train_test.py"])
    assert done.returncode == 1
    assert "rank 1 has something to say" in done.stdout


DISTRIBUTED = """
    import argparse, os
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--lr", type=float)
    args = parser.parse_args()
    dist.init_process_group("gloo", init_method="env://")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = torch.randn(dist.get_world_size(), 4)[dist.get_rank()]
    for _ in range(3):
        loss = model(data).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss)
    with open(f"seen.{dist.get_rank()}", "w") as file:
        file.write(f"{args.local_rank} {dist.get_world_size()} {os.uname().nodename} {loss.item():.9f}")
    dist.destroy_process_group()
"""
PER_HOST = (
    f"exec {sys.executable} -m torch.distributed.launch --nproc_per_node 2 --nnodes $WORLD_SIZE --node_rank $RANK "
    "--master_addr $MASTER_ADDR --master_port $MASTER_PORT train.py --lr 0.1"
)


def test_a_script_for_torch_distributed_launch_on_two_hosts_by_one_command(tmp_path):
    """By ours, as it is; and by torch's own launcher, one per host, where it is to be that one."""
    with jobs_on_hosts(2, tmp_path) as (_, job):
        job.write("train.py", DISTRIBUTED)
        found = []
        for command in (
            ["-H", "host1:2,host2:2", "train.py", "--lr", "0.1"],
            ["-H", "host1:1,host2:1", "--", "sh", "-c", PER_HOST],
        ):
            ended = job.run(*command, timeout_s=80)
            assert ended.code == 0, ended.stderr
            found.append([(job.folder / f"seen.{rank}").read_text().split() for rank in range(4)])
            for rank in range(4):
                (job.folder / f"seen.{rank}").unlink()
        assert found[0] == found[1]
        assert [seen[:3] for seen in found[0]] == [[str(rank % 2), "4", f"host{1 + rank // 2}"] for rank in range(4)]
        assert len({seen[3] for seen in found[0]}) == 1


def test_a_benchmark_on_two_hosts(tmp_path):
    with jobs_on_hosts(2, tmp_path) as (_, job):
        words = ["all_reduce", "-H", "host1:1,host2:1", "-b", "64", "-e", "64", "--iters", "2", "-w", "1"]
        ended = job.run(*words, command="bench", timeout_s=120)
        assert ended.code == 0, ended.stderr
        assert "Rank  1 Group  0" in ended.stdout
        assert re.search(r" on +host2 ", ended.stdout)
        assert "# Out of bounds values : 0 OK" in ended.stdout
