"""From the command to the end of the first all-reduce, or training step: ``shardwright launch`` beside ``torchrun``.

    python benchmarks/launch.py [--step perceptron,transformer] [--ranks 2,4,8] [--repeats 5] [--before ../other/src]

The two take turns (A B A B ...), so that both see the same load; the row gives the medians and the median of the
pairs' ratios. With ``--step`` the training step is by mode "data" and by DistributedDataParallel, of a perceptron
(784-512-512-10) and a transformer (4 layers of 256, vocabulary 8192, 128 tokens). With ``--before`` the other is
``shardwright launch`` of another checkout's sources. The clock starts before the launcher's process does and stops on
rank 0 when that is done; the seconds of the processor are those of all processes until they have ended.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BEGIN = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
"""
END = """
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(repr(time.time()))
dist.destroy_process_group()
"""
REDUCES = """
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
"""
MODELS = {
    "perceptron": """
model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
rows = torch.randn(8, 784), torch.randint(10, (8,))
""",
    "transformer": """
layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(8192, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 8192))
rows = torch.randint(8192, (1, 128)), torch.randint(8192, (1, 128))
""",
}
LOSS = "cross_entropy(model({rows}[0]).flatten(0, -2), {rows}[1].flatten())"
OURS_STEPS = f"""
import shardwright as sw
sw.init()
call = sw.parallelize(model, lambda model, batch: {LOSS.format(rows="batch")}, rows, mode="data", batch="local")
optimizer = torch.optim.AdamW(call.parameters())
call(rows).backward()
optimizer.step()
"""
THEIRS_STEPS = f"""
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
{LOSS.format(rows="rows")}.backward()
optimizer.step()
"""
BIN = Path(sys.executable).parent


OURS = Path(__file__).parents[1] / "src"


def measure_s(command: list[str], source: Path, folder: Path) -> tuple[float, float]:
    """Seconds from here to what the script wrote down, and the processor's. Shardwright is imported from ``source``."""
    answer = folder / "answer"
    answer.unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    start_s, start_cpu_s = time.time(), children_s()
    result = subprocess.run([*command, str(answer)], cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr}")
    return float(answer.read_text()) - start_s, children_s() - start_cpu_s


def children_s() -> float:
    """Seconds of the processor that processes which have ended have taken, and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def scripts(step: str) -> tuple[str, str]:
    """What ours runs, and what torchrun does."""
    if not step:
        return BEGIN + REDUCES + END, BEGIN + REDUCES + END
    return BEGIN + MODELS[step] + OURS_STEPS + END, BEGIN + MODELS[step] + THEIRS_STEPS + END


def compare(step: str, ranks: int, repeats: int, before: Path | None, folder: Path) -> str:
    """A row of the table, after one run of each that warms the disk's cache."""
    for name, text in zip(("ours.py", "theirs.py"), scripts(step), strict=True):
        (folder / name).write_text(text)
    ours = [str(BIN / "shardwright"), "launch", "-n", str(ranks), "ours.py"]
    torchrun = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", "theirs.py"]
    ways = [(ours, OURS), (ours, before) if before else (torchrun, OURS)]
    for way in ways:
        measure_s(*way, folder)
    pairs = [tuple(measure_s(*way, folder) for way in ways) for _ in range(repeats)]
    cells = [step or "all-reduce", str(ranks)]
    for clock in (0, 1):
        taken = [tuple(way[clock] for way in pair) for pair in pairs]
        ratios = sorted(a / b for a, b in taken)
        cells += [f"{statistics.median(column):.2f}" for column in zip(*taken, strict=True)]
        cells += [f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", default="", help=f"of these models: {','.join(MODELS)}; else the first all-reduce")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=Path, help="the src folder of another checkout")
    options = parser.parse_args()
    other, before = "before" if options.before else "torchrun", options.before and options.before.absolute()
    print(f"| until the first | ranks | shardwright, s | {other}, s | ratio | processor, s | {other}, s | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for step in options.step.split(","):
            for ranks in map(int, options.ranks.split(",")):
                print(compare(step, ranks, options.repeats, before, Path(name)), flush=True)


if __name__ == "__main__":
    main()
