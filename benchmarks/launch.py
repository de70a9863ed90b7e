"""From the command to the end of the first all-reduce: ``shardwright launch`` beside ``torchrun``.

    python benchmarks/launch.py [--ranks 2,4,8] [--repeats 5] [--before ../other/src]

The two take turns (A B A B ...), so that both see the same load; the row gives the medians and the median of the
pairs' ratios. With ``--before`` the other is ``shardwright launch`` of another checkout's sources. The clock starts
before the launcher's process does and stops on rank 0 when the all-reduce is done.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    assert total.item() == dist.get_world_size()
    with open(sys.argv[1], "w") as file:
        file.write(repr(time.time()))
dist.destroy_process_group()
"""
BIN = Path(sys.executable).parent


OURS = Path(__file__).parents[1] / "src"


def measure_s(command: list[str], source: Path, folder: Path) -> float:
    """Seconds from here to what the script wrote down. Shardwright is imported from ``source``."""
    answer = folder / "answer"
    answer.unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    start_s = time.time()
    result = subprocess.run(
        [*command, str(folder / "first.py"), str(answer)], cwd=folder, env=environment, capture_output=True, text=True
    )
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr}")
    return float(answer.read_text()) - start_s


def compare(ranks: int, repeats: int, before: Path | None, folder: Path) -> str:
    """A row of the table, after one run of each that warms the disk's cache."""
    ours = [str(BIN / "shardwright"), "launch", "-n", str(ranks)]
    torchrun = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
    ways = [(ours, OURS), (ours, before) if before else (torchrun, OURS)]
    for way in ways:
        measure_s(*way, folder)
    pairs = [tuple(measure_s(*way, folder) for way in ways) for _ in range(repeats)]
    ours_s, theirs_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    return (
        f"| {ranks} | {ours_s:.2f} | {theirs_s:.2f} | {statistics.median(ratios):.2f} "
        f"| {ratios[0]:.2f} to {ratios[-1]:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=Path, help="the src folder of another checkout")
    options = parser.parse_args()
    print(f"| ranks | shardwright, s | {'before' if options.before else 'torchrun'}, s | ratio | lowest to highest |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first.py").write_text(SCRIPT)
        for ranks in map(int, options.ranks.split(",")):
            print(compare(ranks, options.repeats, options.before and options.before.absolute(), folder), flush=True)


if __name__ == "__main__":
    main()
