"""SHARDWRIGHT_TEST_DEVICE says where graphs and programs of the tests run; a device that is not there is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from device import DEVICE, chosen, placed
from ranks import run_ranks
from shardwright.errors import WorldError


def test_tensors_and_modules_go_where_is_asked():
    assert chosen("").type == chosen("cpu").type == "cpu"
    meta = chosen("meta")
    batch = placed({"x": torch.ones(2), "n": 3}, meta)
    assert (batch["x"].device.type, batch["n"]) == ("meta", 3)
    assert placed(torch.nn.Linear(2, 2), meta).weight.is_meta
    assert placed(torch.ones(1)).device.type == DEVICE.type


def joined():
    import shardwright as sw

    try:
        return str(sw.init().device)
    except WorldError as error:
        return str(error)


def test_ranks_compute_on_the_device_that_is_asked_for():
    assert run_ranks(1, joined, env={"SHARDWRIGHT_TEST_DEVICE": "cpu"}) == ["cpu"]
    if not torch.cuda.is_available():
        (refusal,) = run_ranks(1, joined, env={"SHARDWRIGHT_TEST_DEVICE": "cuda"})
        assert refusal.startswith("device='cuda', but torch sees 0 GPUs here")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_any_test_runs():
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"SHARDWRIGHT_TEST_DEVICE": "cuda"}
    done = subprocess.run(run, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "SHARDWRIGHT_TEST_DEVICE=cuda, but torch " in done.stderr
    with pytest.raises(pytest.UsageError, match="SHARDWRIGHT_TEST_DEVICE=gpu is no device"):
        chosen("gpu")
