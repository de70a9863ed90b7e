"""All-reduce and all-gather by gloo, mpi and shm, and a plain copy as the limit.

    python benchmarks/collectives.py

starts 2 and then 4 ranks of this host by mpirun (by our launcher and without mpi, where there is none). The groups
of all backends have the same ranks, which use them in turn (A B A B); small calls are timed many at a time, between two
barriers. A time is that of the slowest rank. The copy is of as many bytes within its memory by each rank, all at once.

It ends with what was promised: 4 KiB reduced in 20 us, and from 1 MiB on at
least as fast as mpi, in at most 0.6 of gloo's time. Where other programs want the cores it refuses to
measure, unless told ``--busy``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from quiet import add_busy, refuse_load

import shardwright as sw

BIN = Path(sys.executable).parent
KIB = (4, 16, 64, 256, 1024, 4096, 16384, 65536)
BATCH_BYTES = 1 << 21  # of small calls that are timed together
Groups = Mapping[str, dist.ProcessGroup]


def all_groups(mpi: bool) -> Groups:
    groups = {"gloo": dist.new_group(backend="gloo")} | ({"mpi": dist.group.WORLD} if mpi else {})
    groups["shm"] = dist.new_group(backend="shm")
    return groups


def calls_of(what: str, groups: Groups, numel: int) -> dict[str, Callable[[], object]]:
    tensor, gathered = torch.zeros(numel), torch.zeros(dist.get_world_size(), numel)
    rows, copied = list(gathered.unbind()), torch.zeros(numel)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: copied.copy_(tensor)}
    for name, group in groups.items():
        if what == "all_reduce":
            calls[name] = lambda group=group: dist.all_reduce(tensor, group=group)
        else:
            calls[name] = lambda group=group: dist.all_gather(rows, tensor, group=group)
    return calls


def microseconds(call: Callable[[], object], times: int, gloo: dist.ProcessGroup) -> float:
    """Of one call on the slowest rank."""
    dist.barrier(gloo)
    start = time.perf_counter()
    for _ in range(times):
        call()
    took = torch.tensor([(time.perf_counter() - start) / times * 1e6], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX, group=gloo)
    return took.item()


def measured(what: str, kib: int, groups: Groups, rounds: int) -> dict[str, list[float]]:
    calls = calls_of(what, groups, kib * 256)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            took = microseconds(call, max(1, BATCH_BYTES // (kib * 1024)), groups["gloo"])
            if turn >= 2:
                found[name].append(took)
    return found


def ratio(found: Mapping[str, list[float]], one: str, other: str) -> float:
    """The median of those of the rounds."""
    return statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))


def inside(rounds: int) -> None:
    torch.set_num_threads(1)
    mpi = "OMPI_COMM_WORLD_SIZE" in os.environ
    world = sw.init(backend="mpi" if mpi else "gloo")
    groups = all_groups(mpi)
    names = ["copy", "gloo", *(["mpi"] if mpi else []), "shm"]
    rivals = [name for name in ("gloo", "mpi") if name in groups]
    lines = [["what", "ranks", "size", *(f"{name}, us" for name in names), *(f"shm / {rival}" for rival in rivals)]]
    kept: list[str] = []
    for what in ("all_reduce", "all_gather"):
        for kib in KIB:
            found = measured(what, kib, groups, rounds)
            medians = {name: statistics.median(times) for name, times in found.items()}
            lines.append([
                what, str(world.size), f"{kib} KiB",
                *(f"{medians[name]:.1f}" if name in medians else "" for name in names),
                *(f"{ratio(found, 'shm', rival):.2f}" for rival in rivals),
            ])  # fmt: skip
            if what == "all_reduce":
                kept += promises(kib, medians, ratio(found, "shm", "mpi") if mpi else None, ratio(found, "shm", "gloo"))
    if world.rank == 0:
        lines.insert(1, ["---"] * len(lines[0]))
        print("\n".join(f"| {' | '.join(line)} |" for line in lines), *kept, sep="\n", flush=True)


def promises(kib: int, medians: Mapping[str, float], to_mpi: float | None, to_gloo: float) -> list[str]:
    """A line for each promise about an all-reduce, kept or not."""
    limits = [("shm", 20)] if kib == 4 else []
    said = [
        (f"{name}: {medians[name]:.1f} us for {kib} KiB, at most {most}", medians[name] <= most)
        for name, most in limits
    ]
    if kib >= 1024 and to_mpi is not None:
        said.append((f"shm: {to_mpi:.2f} of mpi for {kib} KiB, at most 1", to_mpi <= 1))
    if kib >= 1024:
        said.append((f"shm: {to_gloo:.2f} of gloo for {kib} KiB, at most 0.6", to_gloo <= 0.6))
    return [f"{'kept  ' if kept else 'BROKEN'} {text}" for text, kept in said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=15)
    add_busy(parser)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.rounds)
        return
    refuse_load(options.busy)
    mpirun = shutil.which("mpirun", path=str(BIN)) or shutil.which("mpirun")
    for ranks in options.ranks.split(","):
        if mpirun:
            start = [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", ranks, sys.executable]
        else:
            start = [str(BIN / "shardwright"), "launch", "-n", ranks]
        subprocess.run([*start, __file__, "--inside", "--rounds", str(options.rounds)], check=True)


if __name__ == "__main__":
    main()
