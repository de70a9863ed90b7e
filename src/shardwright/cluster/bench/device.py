"""The speed of a device, measured as a training step uses it: with autograd, while all ranks compute.

The planner prices a forward, and a backward as `BACKWARD` of them. So each figure is taken from a forward and its
backward together: priced with it, both come out as they were measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardwright.cluster.bench.stopwatch import beyond_caches, cache_bytes, synchronize, took_s
from shardwright.compiler.plan.pricing.cost import BACKWARD, BACKWARD_OF_ATTENTION
from shardwright.distributed.agreement import from_all_ranks

_TIMES = 1 + BACKWARD
_CALLS = 7
_LEAST_S = 0.1  # of a call: ranks that share the cores of a host compute beside each other for most of it
_SMALL_CALLS = 100
_FLOAT = 4


@dataclass(frozen=True)
class DeviceSpeeds:
    """The fields of `shardwright.compiler.plan.pricing.hardware.Hardware` that are about a device."""

    flops: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    launch_s: float
    at_once: float
    attention: float = 1.0


def measure_device(device: torch.device) -> DeviceSpeeds:
    """Return the figures of the slowest rank. All ranks call this together."""
    flops = tuple((str(dtype).removeprefix("torch."), _flops(device, dtype)) for dtype in _dtypes(device))
    bandwidth, launch_s = _memory_bandwidth(device), _launch_s(device)
    at_once = _at_once(device, dict(flops)["float32"], bandwidth)
    return DeviceSpeeds(flops, bandwidth, launch_s, at_once, _attention(device, dict(flops)))


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the bytes of the smallest GPU, and the most that is taken of one beside torch's allocator; 0 for CPUs.

    All ranks call this together, once collectives have run: CUDA's context and the buffers of NCCL are there then.
    """
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    totals, outsides = zip(*from_all_ranks((total, outside)), strict=True)
    return min(totals), max(outsides)


def timed_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of ``run()`` on this rank, from a moment that all ranks have reached."""
    synchronize(device)
    dist.barrier()
    return took_s(run, device)


def slowest_s(run: Callable[[], object], device: torch.device, calls: int = _CALLS) -> float:
    """Return the median over some calls of the seconds of ``run()`` on the slowest rank, the same on every rank."""
    timed_s(run, device)
    mine = [timed_s(run, device) for _ in range(calls)]
    return float(statistics.median(max(call) for call in zip(*from_all_ranks(mine), strict=True)))


def _forward_s(
    network: Callable[..., Tensor], leaves: Sequence[Tensor], device: torch.device, times: float = _TIMES
) -> float:
    """Return the part of a forward with its backward that the planner counts as the forward of ``network``.

    Args:
        times: how many forwards both count as.
    """
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    gradient = torch.randn_like(network(*leaves))

    def run(count: int) -> None:
        for _ in range(count):
            torch.autograd.grad(network(*leaves), leaves, gradient)

    count = max(1, math.ceil(_LEAST_S / slowest_s(partial(run, 1), device, calls=1)))
    return slowest_s(partial(run, count), device) / count / times


def _dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32, torch.float64, torch.bfloat16] + [torch.float16] * (device.type == "cuda")


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second in a square product that fills the device."""
    n = 8192 if device.type == "cuda" else 512
    x, weight = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))  # equal numbers draw less power
    return 2 * n**3 / _forward_s(F.linear, [x, weight], device)


def _attention(device: torch.device, flops: Mapping[str, float]) -> float:
    """Return the speed of fused attention, causal as in a language model, as a share of that of products."""
    dtype, heads, words, width = torch.float32, 4, 512, 64
    if device.type == "cuda":
        dtype, heads, words, width = torch.bfloat16, 64, 4096, 128
    leaves = [torch.randn(1, heads, words, width, device=device, dtype=dtype) for _ in range(3)]
    run = partial(F.scaled_dot_product_attention, is_causal=True)
    took_s = _forward_s(run, leaves, device, 1 + BACKWARD_OF_ATTENTION)
    return 2 * heads * words**2 * width / took_s / flops[str(dtype).removeprefix("torch.")]


def _pointwise(x: Tensor, y: Tensor) -> Tensor:
    """Operators of other kinds, as they stand in a model: four, which read and write nine tensors in the forward."""
    normal = F.layer_norm(x, x.shape[-1:])
    return (y + F.gelu(normal)).softmax(-1)


def _memory_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that operators read and write which do little with them."""
    size = beyond_caches(4 * 2**20, cache_bytes(device)) // _FLOAT
    x, y = (torch.randn(size // 256, 256, device=device) for _ in range(2))
    return 9 * x.nbytes / _forward_s(_pointwise, [x, y], device)


def _launch_s(device: torch.device) -> float:
    """Return the seconds of an operator that has next to nothing to do, one after the other."""

    def small(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(_SMALL_CALLS):
            x = torch.relu(F.linear(x, weight) * weight)
        return x

    operands = [torch.randn(4, 4, device=device) for _ in range(2)]
    return _forward_s(small, operands, device) / (3 * _SMALL_CALLS)


def _at_once(device: torch.device, flops: float, bandwidth: float) -> float:
    """Return the share of the shorter of multiplying and reading that is hidden behind the longer, for equal times."""
    n = 8192 if device.type == "cuda" else 2048
    rows = max(1, round(flops * _FLOAT / 2 / bandwidth))
    x, weight = torch.randn(rows, n, device=device), torch.randn(n, n, device=device)
    work_s, traffic_s = 2 * rows * n**2 / flops, _FLOAT * (n**2 + 2 * rows * n) / bandwidth
    took = _forward_s(F.linear, [x, weight], device)
    return min(1.0, max(0.0, (work_s + traffic_s - took) / min(work_s, traffic_s)))
