"""The bounds of a collective: copying memory inside a host, the rate of the network between hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardwright.cluster.bench.output import Roofline
from shardwright.cluster.bench.stopwatch import mean_s
from shardwright.distributed.backends.table import backends_by_device
from shardwright.launch.hosts.network import SYSFS, bytes_per_s, read_devices


def copy_s(size_bytes: int, device: torch.device, warmup: int, iters: int) -> float:
    """Return the seconds in which this rank copies so many bytes, timed as a row of collectives is.

    That is the mean of a loop of calls behind a barrier, after others, on buffers of that size, so that caches help as
    they help the row; while all ranks do so. Of the ways to copy the fastest counts.
    """
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return min(mean_s(way, device, warmup, iters) for way in _ways(source, target))


def _ways(source: Tensor, target: Tensor) -> list[Callable[[], object]]:
    """Return what copies: torch's kernel, and in the memory of CPUs the C library, which may pass caches by."""
    ways: list[Callable[[], object]] = [lambda: target.copy_(source)]
    if source.device.type == "cpu":
        ways.append(partial(np.copyto, target.numpy(), source.numpy()))
    return ways


def fastest_link(backend: str, system: Path = SYSFS) -> tuple[str, float] | None:
    """Return the fastest network link of this host that is up, and its bytes per second; None without a known rate.

    InfiniBand counts where the backend can use it.
    """
    by_infiniband = any(row.infiniband for row in backends_by_device(backend).values())
    links = {
        device.name: bytes_per_s(device.speed)
        for device in read_devices(system).devices.values()
        if device.up and (by_infiniband or device.kind != "infiniband")
    }
    known = {name: rate for name, rate in links.items() if rate is not None}
    return max(known.items(), key=lambda link: link[1], default=None)


def within(size_bytes: int, copies_s: Sequence[float]) -> Roofline:
    """Return the bound inside a host, by the mean over ranks of copying as many bytes: each is copied at least once."""
    mean_s = sum(copies_s) / len(copies_s)
    return Roofline(size_bytes / mean_s / 1e9, f"copies of {size_bytes} B inside the host, by all ranks at once")


def between(links: Sequence[tuple[str, float] | None]) -> Roofline:
    """Return the bound between hosts, from each rank's fastest link: around a ring every byte passes one."""
    known = [link for link in links if link is not None]
    if len(known) < len(links):
        return Roofline(None, "no bound between hosts is known, since some host's links do not tell their rate")
    name, rate = min(known, key=lambda link: link[1])
    return Roofline(rate / 1e9, f"the rate of {name} between hosts, around a ring")


def processor() -> str:
    """Return the name of this host's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine
