"""Training over shared memory: what gloo gives, by our launcher, by our runtime, and by torch alone."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend_ranks import verified
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.distributed.backends import shm

slow = pytest.mark.slow
BIN = Path(sys.executable).parent
QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.py"


def losses(ranks, backend, folder):
    """What rank 0 says of a job of our launcher."""
    ended = subprocess.run(
        [BIN / "shardwright", "launch", "-n", str(ranks), "--backend", backend, QUICKSTART], cwd=folder,
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return [float(line.rpartition("loss is ")[2]) for line in ended.stdout.splitlines() if "loss is" in line]


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_quick_start_has_the_losses_of_gloo(ranks, tmp_path):
    found = losses(ranks, "shm", tmp_path)
    assert len(found) >= 5
    assert found == pytest.approx(losses(ranks, "gloo", tmp_path), rel=1e-6)  # which sums in another order


def exact():
    sw.init("shm", timeout=100)
    return [verified(name, options) for name in ("perceptron", "transformer") for options in PLANS]


PLANS = ({"mode": "data"}, {"mode": "auto"})


@slow
def test_plans_give_what_one_device_gives():
    for ok, text, _ in run_ranks(2, exact, timeout=110)[0]:
        assert ok, text


def by_torch_alone(backend):
    """Losses of DistributedDataParallel, with several buckets."""
    shm.register()
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 1))
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(6):
        loss = (parallel(torch.randn(16, 64)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    dist.destroy_process_group()
    return found


@slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_of_torch_alone(ranks):
    for ours, gloos in zip(
        run_ranks(ranks, by_torch_alone, "shm"), run_ranks(ranks, by_torch_alone, "gloo"), strict=True
    ):
        assert ours == pytest.approx(gloos, rel=1e-5)


def mean_square(model, batch):
    return model(batch).square().mean()


def gradients(backend):
    """Those of a step, and the names of this rank's threads."""
    sw.init(backend, timeout=100)
    sw.set_seed(1)
    model = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 600), nn.ReLU(), nn.Linear(600, 3))
    batch = torch.randn(16, 64)
    parallel = sw.parallelize(model, mean_square, batch, mode="data", batch="global")
    parallel(batch).backward()
    found = [parameter.grad.sum().item() for parameter in parallel.parameters()]
    return found, {thread.name for thread in threading.enumerate()}


@slow
def test_gradients_that_are_waited_for_at_once_are_summed_by_who_waits():
    shared, plain = run_ranks(2, gradients, "shm"), run_ranks(2, gradients, "gloo")
    for (ours, threads), (gloos, _) in zip(shared, plain, strict=True):
        assert ours == pytest.approx(gloos, rel=1e-5)
        assert "shm" not in threads
