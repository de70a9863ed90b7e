"""Stopwatches: the host's clock for CPUs, and events for GPUs, whose work ends after the call returns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

_CACHES = 8  # a buffer of so many times a GPU's second-level cache has next to nothing of itself in it


def took_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of ``run()`` on ``device``."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def mean_s(call: Callable[[], object], device: torch.device, warmup: int, iters: int) -> float:
    """Return the seconds of one call on this rank, the mean of a loop that all ranks begin together, after others."""
    for _ in range(warmup):
        call()
    synchronize(device)
    dist.barrier()

    def loop() -> None:
        for _ in range(iters):
            call()

    return took_s(loop, device) / iters


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all enqueued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def refill(tensor: Tensor) -> None:
    """Give a tensor on a GPU other random numbers: equal ones draw less power, and sums of sums grow without end."""
    if tensor.device.type == "cuda":
        tensor.normal_()


def beyond_caches(least_bytes: int, cache_bytes: int) -> int:
    """Return the bytes of a buffer that is to be read from memory, where caches keep so many.

    >>> beyond_caches(64 * 2**20, 50 * 2**20) // 2**20, beyond_caches(64 * 2**20, 0) // 2**20
    (400, 64)
    """
    return max(least_bytes, _CACHES * cache_bytes)


def cache_bytes(device: torch.device) -> int:
    """Return the second-level cache of a GPU; 0 for others, whose buffers are chosen as if they had none."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0
