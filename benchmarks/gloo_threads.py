"""Collectives of gloo with its receiving threads as they come, as batch work, and with every rank on its own core too.

    python benchmarks/gloo_threads.py [--ranks 2,4] [--rounds 3]

The three take turns in one job. Each row: mean and quantiles of one kind and size, the slowest rank's time counting.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BIN = Path(sys.executable).parent
SIZES = (8192, 2**20)
CALLS = 100
RECEIVER = "gloo_tcp_loop"


def threads() -> dict[int, str]:
    found = Path("/proc/self/task").iterdir()
    return {int(each.name): (each / "comm").read_text().strip() for each in found}


def arrange(policy: int, cores: set[int]) -> None:
    for thread, name in threads().items():
        os.sched_setaffinity(thread, cores)
        if name == RECEIVER:
            os.sched_setscheduler(thread, policy, os.sched_param(0))


def inside(rounds: int) -> None:
    """What each rank runs; rank 0 prints the rows."""
    import torch
    import torch.distributed as dist

    import shardwright as sw

    world = sw.init()
    cores = sorted(os.sched_getaffinity(0))
    own = {cores[world.local_rank * len(cores) // world.local_size]}
    ways = {
        "as they come": (os.SCHED_OTHER, set(cores)),
        "batch": (os.SCHED_BATCH, set(cores)),
        "batch, own core": (os.SCHED_BATCH, own),
    }
    data = torch.zeros(max(SIZES) // 4)
    back = torch.zeros_like(data)
    times: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(rounds):
        for way, (policy, at) in ways.items():
            arrange(policy, at)
            for size in SIZES:
                part, other = data[: size // 4], back[: size // 4]
                calls = {
                    "all_reduce": lambda part=part: dist.all_reduce(part),
                    "all_to_all": lambda part=part, other=other: dist.all_to_all_single(other, part),
                }
                for kind, call in calls.items():
                    times.setdefault((kind, size, way), []).extend(timed(call) for _ in range(CALLS))
    everyone: list[dict[tuple[str, int, str], list[float]]] = [{}] * world.size
    dist.all_gather_object(everyone, times)
    if world.rank == 0:
        print(f"\n{world.size} ranks, {len(cores)} cores; microseconds\n")
        print(
            "| collective | bytes | receivers | mean | 25 % | median | 75 % | 90 % |\n| --- | ---: | --- | "
            + "---: | " * 5
        )
        for kind, size, way in sorted(times, key=lambda key: key[:2]):
            slowest = [1e6 * max(of) for of in zip(*(theirs[kind, size, way] for theirs in everyone), strict=True)]
            at = statistics.quantiles(slowest, n=20)
            row = [statistics.fmean(slowest), at[4], at[9], at[14], at[17]]
            print(f"| {kind} | {size} | {way} | " + " | ".join(f"{us:.0f}" for us in row) + " |", flush=True)


def timed(call: object) -> float:
    import time

    import torch.distributed as dist

    dist.barrier()
    start_s = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside", action="store_true")
    options = parser.parse_args()
    if options.inside:
        inside(options.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks.split(","):
            command = [
                str(BIN / "shardwright"),
                "launch",
                "-n",
                ranks,
                __file__,
                "--inside",
                "--rounds",
                str(options.rounds),
            ]
            subprocess.run(command, cwd=folder, check=True)


if __name__ == "__main__":
    main()
