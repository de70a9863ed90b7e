"""What bounds a collective: copying memory inside a host, the rate of the network between hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from shardwright.backends.table import backends_by_device
from shardwright.cluster.bench.output import Roofline
from shardwright.cluster.bench.stopwatch import beyond_caches, cache_bytes, refill, synchronize, took_s

_COPY_BYTES = 64 * 2**20
_COPIES = 5


def copy_rate(device: torch.device, barrier: Callable[[], None]) -> float:
    """Bytes copied per second within this rank's memory, the best of a few, while all ranks copy."""
    copied_bytes = beyond_caches(_COPY_BYTES, cache_bytes(device))
    source = torch.zeros(copied_bytes // 4, device=device)
    refill(source)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(1 + _COPIES):
        synchronize(device)
        barrier()
        best_s = min(best_s, took_s(lambda: target.copy_(source), device))
    return copied_bytes / best_s


def fastest_link(backend: str, system: Path = Path("/sys")) -> tuple[str, float] | None:
    """The fastest network link of this host that is up, and its bytes per second; None where none tells its rate.

    InfiniBand counts where the backend can use it.
    """
    links = dict(_ethernet(system))
    if any(row.infiniband for row in backends_by_device(backend).values()):
        links |= dict(_infiniband(system))
    return max(links.items(), key=lambda link: link[1], default=None)


def _ethernet(system: Path) -> list[tuple[str, float]]:
    links = []
    for interface in sorted((system / "class/net").glob("*")):
        try:
            megabits = int((interface / "speed").read_text())
            up = (interface / "operstate").read_text().strip() == "up"
        except (OSError, ValueError):  # a loopback, or a virtual device that does not tell
            continue
        if up and megabits > 0:
            links.append((interface.name, megabits * 1e6 / 8))
    return links


def _infiniband(system: Path) -> list[tuple[str, float]]:
    links = []
    for port in sorted((system / "class/infiniband").glob("*/ports/*")):
        try:
            gigabits = float((port / "rate").read_text().split()[0])
            active = "ACTIVE" in (port / "state").read_text()
        except (OSError, ValueError, IndexError):
            continue
        if active:
            links.append((f"{port.parents[1].name} port {port.name}", gigabits * 1e9 / 8))
    return links


def roofline(hosts: int, copy_rates: list[float], links: list[tuple[str, float] | None]) -> Roofline:
    """The bound on bus bandwidth, from what each rank copies per second and each rank's fastest link.

    Inside a host every byte is copied at least once; around a ring over several hosts every byte passes one link.
    """
    if hosts == 1:
        return Roofline(min(copy_rates) / 1e9, "memory copy inside the host, all ranks at once")
    known = [link for link in links if link is not None]
    if len(known) < len(links):
        return Roofline(None, "no bound between hosts is known, since some host's links do not tell their rate")
    name, rate = min(known, key=lambda link: link[1])
    return Roofline(rate / 1e9, f"the rate of {name} between hosts, around a ring")


def processor() -> str:
    """The name of this host's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine
