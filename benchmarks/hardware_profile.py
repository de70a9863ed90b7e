"""A profile of this machine, and how well it predicts sizes that it was not fitted to.

    python benchmarks/hardware_profile.py [--ranks 2,4] [--apart] [--bind-to none]

Fitted sizes and held-out ones (the powers of two from 4 KiB to 64 MiB) are timed in one run, in an order drawn anew in
each round, so that both see the same machine; the curves are fitted to the former alone. With --apart the held-out
sizes are timed in a second job after the first has ended. Each row holds the median of 20 samples at a held-out
size (a sample: one call; of small sizes the median of a few in succession), the prediction, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from shardwright.compiler.mesh.redistribute import CollectiveKind

HELD_OUT = tuple(2**power for power in range(12, 27))
COMPARED: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "all_to_all")
BIN = Path(sys.executable).parent


def inside(sizes: list[int], answer: str) -> None:
    """What each rank runs: the medians at ``sizes``, which rank 0 writes down."""
    import shardwright as sw
    from shardwright.cluster.bench.profile import measure_links

    world = sw.init()
    found = measure_links(world, sizes, kinds=COMPARED, ranks=world.size)
    if world.rank == 0:
        Path(answer).write_text(json.dumps([[m.collective, m.points] for m in found]))


def measured(sizes: list[int], ranks: int, bind_to: str, folder: Path) -> dict[str, dict[int, float]]:
    """Kind -> size -> median seconds, of a job of its own."""
    answer = folder / "answer.json"
    command = [
        str(BIN / "shardwright"),
        "launch",
        "-n",
        str(ranks),
        "--bind-to",
        bind_to,
        __file__,
        "--inside",
        json.dumps(sizes),
        str(answer),
    ]
    subprocess.run(command, cwd=folder, check=True)
    return {kind: dict(map(tuple, points)) for kind, points in json.loads(answer.read_text())}


def compare(ranks: int, apart: bool, bind_to: str, folder: Path) -> None:
    """Print a table for each collective, and how far the worst row is off."""
    from shardwright.cluster.bench.profile import SIZES
    from shardwright.cluster.bench.profile_fit import fit

    first = measured([*SIZES, *(() if apart else HELD_OUT)], ranks, bind_to, folder)
    second = measured(list(HELD_OUT), ranks, bind_to, folder) if apart else first
    for kind in COMPARED:
        curve = fit([(size, seconds) for size, seconds in first[kind].items() if size in SIZES])
        print(f"\n{kind}, {ranks} ranks, {len(curve.segments)} segments\n")
        print("| bytes | measured, us | predicted, us | measured / predicted |\n| ---: | ---: | ---: | ---: |")
        off = []
        for size in HELD_OUT:
            ratio = second[kind][size] / curve.seconds(size)
            off.append(abs(ratio - 1))
            print(f"| {size} | {second[kind][size] * 1e6:.0f} | {curve.seconds(size) * 1e6:.0f} | {ratio:.2f} |")
        within = sum(each <= 0.25 for each in off)
        print(f"\n{within} of {len(off)} within 25 %, the worst off by {max(off):.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--bind-to", choices=["core", "none"], default="core")
    parser.add_argument("--inside", nargs=2)
    options = parser.parse_args()
    if options.inside:
        inside(json.loads(options.inside[0]), options.inside[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        for ranks in map(int, options.ranks.split(",")):
            compare(ranks, options.apart, options.bind_to, Path(folder))


if __name__ == "__main__":
    main()
