"""The mpi backend's all-reduce and all-gather beside gloo's, and a copy through /dev/shm as the limit.

    mpirun -n 2 --bind-to none python benchmarks/mpi.py

One world has a gloo group and an mpi group over the same two ranks, used in turn (A B A B) with a barrier before each
call; a call's time is that of the slower rank. The limit, in the same turn: both ranks at once write a tensor into
a file of /dev/shm, and then each reads the other's: the two copies that a message through shared memory takes at
least where no process may read another's memory.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import shardwright as sw


class SharedMemory:
    """A page-aligned file of each rank in /dev/shm, mapped by both and touched before it is timed."""

    def __init__(self, size_bytes: int, rank: int) -> None:
        self.paths = [Path(f"/dev/shm/shardwright-benchmark-{os.getppid()}-{size_bytes}-{r}") for r in range(2)]
        self.paths[rank].write_bytes(bytes(size_bytes))
        dist.barrier()
        self.own, self.other = (self._map(self.paths[r], size_bytes) for r in (rank, 1 - rank))
        dist.barrier()
        self.paths[rank].unlink()

    @staticmethod
    def _map(path: Path, size_bytes: int) -> torch.Tensor:
        with open(path, "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), size_bytes), dtype=torch.float32)

    def exchange(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        self.own.copy_(sent)
        dist.barrier()
        received.copy_(self.other)


def timed(call: Callable[[], object]) -> float:
    """Seconds of the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    call()
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    world = sw.init(backend="mpi")
    gloo = dist.new_group(backend="gloo")
    if world.rank == 0:
        print(
            "| what | size | gloo, ms | mpi, ms | limit, ms | mpi / gloo | limit / mpi |\n|---|---|---|---|---|---|---|"
        )
    for kib in (4, 64, 1024, 4096, 16384, 65536):
        tensor, received = torch.zeros(kib * 256), torch.zeros(kib * 256)
        gathered = torch.zeros(2, kib * 256)
        shared = SharedMemory(kib * 1024, world.rank)
        calls: dict[str, dict[str, Callable[[], object]]] = {
            "all_reduce": {
                "gloo": lambda t=tensor: dist.all_reduce(t, group=gloo),
                "mpi": lambda t=tensor: dist.all_reduce(t),
            },
            "all_gather": {
                "gloo": lambda t=tensor, g=gathered: dist.all_gather(list(g.unbind()), t, group=gloo),
                "mpi": lambda t=tensor, g=gathered: dist.all_gather(list(g.unbind()), t),
            },
        }
        for what, ways in calls.items():
            ways["limit"] = lambda t=tensor, r=received, s=shared: s.exchange(t, r)
            took: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(rounds + 2):
                for way, call in ways.items():
                    seconds = timed(call)
                    if turn >= 2:
                        took[way].append(seconds)
            g, m, limit = (statistics.median(took[way]) * 1e3 for way in ("gloo", "mpi", "limit"))
            ratio = statistics.median(a / b for a, b in zip(took["mpi"], took["gloo"], strict=True))
            of_limit = statistics.median(a / b for a, b in zip(took["limit"], took["mpi"], strict=True))
            if world.rank == 0:
                print(
                    f"| {what} | {kib} KiB | {g:.3f} | {m:.3f} | {limit:.3f} | {ratio:.3f} | {of_limit:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
