"""What memory="auto" leaves of a device, and what is said of the rest."""

from dataclasses import replace

import pytest
import torch

from shardwright.compiler.plan.pricing.hardware import Hardware, shipped, shipped_names
from shardwright.compiler.plan.pricing.reserve import reserve_of
from shardwright.distributed.world import World
from shardwright.errors import UsageError
from shardwright.runtime.limits import automatic_limit, memory_problem


def test_a_reserve_is_made_of_what_takes_it():
    found = reserve_of(replace(shipped("cpu_host"), memory_bytes=80 * 10**9, outside_bytes=2 * 10**9))
    assert found.limit_bytes == 80 * 10**9 - 2 * 10**9 - 256 * 2**20 - 24 * 10**8
    assert str(found) == (
        "of the 80.0 GB of a device a plan may hold 75.3 GB; kept free are 2.0 GB for CUDA's context, the buffers of "
        "NCCL and libraries, 268.4 MB for workspaces and 2.4 GB for fragmentation"
    )


def test_profiles_of_gpus_say_what_memory_they_have():
    gpus = [shipped(name) for name in shipped_names() if not name.startswith("cpu")]
    assert len(gpus) >= 4
    for hardware in gpus:
        assert 0.9 * hardware.memory_bytes < reserve_of(hardware).limit_bytes < hardware.memory_bytes - 1.5e9
        assert Hardware.from_json(hardware.to_json()) == hardware


def test_where_nothing_is_known_or_left_it_is_said():
    with pytest.raises(UsageError, match=r"the hardware profile cpu_host names no memory of a device; type how many"):
        reserve_of(shipped("cpu_host"))
    with pytest.raises(UsageError, match=r"3 ranks share 4.0 GB, and each keeps 1.8 GB free"):
        reserve_of(shipped("h100"), 4 * 10**9, sharing=3)
    assert "type how many bytes each rank may hold, as memory='8GiB'" in memory_problem("auto", torch.device("cpu"))
    assert memory_problem("auto", torch.device("cuda", 0)) is memory_problem("8GiB", torch.device("cpu")) is None


def test_the_smallest_share_of_a_gpu_counts_on_all_ranks(monkeypatch, capsys):
    """Three GPUs; the last of them is shared by two ranks."""
    everyone = [("a", 0, 80 * 10**9), ("a", 1, 60 * 10**9), ("b", 0, 80 * 10**9), ("b", 0, 80 * 10**9)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 80 * 10**9}))
    monkeypatch.setattr("shardwright.runtime.limits.from_all_ranks", lambda mine: everyone)
    for rank, host in ((0, "a"), (3, "b")):
        world = World(rank, 4, 0, 2, host, torch.device("cuda", 0), "nccl", ("a", "a", "b", "b"))
        assert automatic_limit(world, shipped("h100")) == reserve_of(shipped("h100"), 80 * 10**9, 2).limit_bytes
    said = capsys.readouterr().err
    assert said.startswith("shardwright: memory='auto': of the 40.0 GB of a device a plan may hold ")
    assert said.count("\n") == 1
