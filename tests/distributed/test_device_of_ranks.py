"""Where ranks compute is asked for by itself, and need not follow the name of the backend."""

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from ranks import run_ranks
from shardwright.distributed.devices import asked_device, device_type, gpu_index
from shardwright.distributed.meeting import Card
from shardwright.errors import UsageError, WorldError


def card(rank, gpus=("g0", "g1")):
    return Card(rank=rank, size=9, backend="gloo", host="a", machine="m", pid=1, local_rank=None, gpus=gpus)


def test_ranks_that_talk_by_gloo_may_share_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_type(asked_device("cuda"), "gloo") == device_type(asked_device("cuda:1"), "gloo") == "cuda"
    assert [gpu_index([card(r) for r in range(4)], rank, shared=True) for rank in range(4)] == [0, 1, 0, 1]
    assert [gpu_index([card(r, ("g0",)) for r in range(2)], rank, shared=True) for rank in range(2)] == [0, 0]
    with pytest.raises(WorldError, match=r"has 1 ranks \(rank 0\), but they see 0 GPUs"):
        gpu_index([card(0, ())], 0, shared=True)


def test_the_device_follows_the_backend_where_nobody_asks():
    assert [device_type(None, name) for name in ("gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl")] == [
        "cpu", "cuda", "cpu", "cuda",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "backend", "error", "text"),
    [
        ("tpu", "gloo", UsageError, "device='tpu' is none that ranks compute on; expected 'cpu', 'cuda' or 'cuda:N'"),
        (3.5, "gloo", UsageError, "device=3.5 is none that ranks compute on"),
        ("cpu", "nccl", UsageError, "device='cpu', but the backend 'nccl' moves no tensors from there; choose "
         "backend='gloo' or 'mpi' or 'shm'"),
        ("cuda:0", "mpi", UsageError, r"moves no tensors from there; choose backend='gloo' or 'nccl'"),
        ("cuda:2", "gloo", WorldError, r"device='cuda:2', but torch sees 2 GPUs here \(CUDA_VISIBLE_DEVICES=4,5\)"),
    ],
)  # fmt: skip
def test_a_device_that_cannot_be_is_told(device, backend, error, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(error, match=text):
        device_type(asked_device(device), backend)


def say_device(own_group):
    if own_group:
        dist.init_process_group("gloo")
    world = sw.init(device="cpu:0")
    try:
        sw.init(device="cuda")
    except WorldError as error:
        return str(world.device), str(error)


@pytest.mark.parametrize("own_group", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_second_call_has_to_mean_the_same_device(own_group):
    said = run_ranks(2, say_device, own_group)
    assert said == [
        (
            "cpu",
            "sw.init(device='cuda'), but the world is already there with device='cpu'; call "
            "torch.distributed.destroy_process_group() first to set up another",
        )
    ] * 2  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(WorldError, match="device='cuda', but torch sees 0 GPUs here"):
        sw.init(backend="gloo", device="cuda")
