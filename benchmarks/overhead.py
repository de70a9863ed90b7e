"""What a step costs more when it is watched, recorded, or kept in checkpoints, in percent.

    python benchmarks/overhead.py [--ranks 2] [--rounds 11] [--steps 40]

One job trains one model; blocks of steps with and without each companion take turns in it, the one and the other first,
so that all see the same machine. A block's figure is the mean of its steps, slowest rank, so that what is done now and
then is in it too; the table gives medians over the rounds. ``watched`` is what the ranks tell for `shardwright watch`,
with no watcher; ``checkpoints`` are saved every 20 steps. The last line is what a watcher takes itself, which runs
beside the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from torch.nn import functional as F
import shardwright as sw
from shardwright.common.pulse import own_pulse
from shardwright.common.step_lines import Steps
from shardwright.training.zoo import GPT

steps, rounds = int(sys.argv[1]), int(sys.argv[2])
world = sw.init()
sw.set_seed(0)
model = GPT(256, width=96, heads=6, layers=3, sequence_length=64, dropout=0.0)
data = torch.utils.data.TensorDataset(torch.randint(256, (16 * steps, 64)), torch.randint(256, (16 * steps, 64)))
loader = sw.loader(data, 16)
loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
parallel = sw.parallelize(model, loss_fn, loader.sample_batch(), mode="data")
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
heard, unheard = own_pulse().steps, Steps(None)

class Clock(sw.Callback):
    def on_fit_begin(self, run): self.ends = []
    def at_rest(self, run): self.ends.append(time.perf_counter())

def block(way, number):
    folder = f"{way}.{number}"
    made = {"csv": lambda: [sw.Recorder(folder, ["csv"])], "jsonl": lambda: [sw.Recorder(folder, ["jsonl"])],
        "tensorboard": lambda: [sw.Recorder(folder, ["tensorboard"])],
        "checkpoints": lambda: [sw.ModelCheckpoint(folder, every_steps=20)],
        "asynchronous checkpoints": lambda: [sw.ModelCheckpoint(folder, every_steps=20, asynchronous=True)],
        "NanGuard": lambda: [sw.NanGuard()], "LossMonitor": lambda: [sw.LossMonitor(10)]}
    own_pulse().steps = heard if way == "watched" else unheard
    clock = Clock()
    sw.Trainer(parallel, optimizer, [*made.get(way, list)(), clock]).fit(loader, steps=steps)
    mean = torch.tensor((clock.ends[-2] - clock.ends[0]) / (len(clock.ends) - 2), dtype=torch.float64)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return mean.item()

block("bare", "warm")
for way in sys.argv[4].split(","):
    pairs = []
    for number in range(rounds):
        of = {kind: block(kind, number) for kind in (("bare", way) if number % 2 else (way, "bare"))}
        pairs.append((of["bare"], of[way]))
    if world.rank == 0:
        import json
        with open(sys.argv[3], "a") as file:
            file.write(json.dumps([way, pairs]) + "\\n")
"""
WAYS = ("bare again", "watched", "LossMonitor", "NanGuard", "csv", "jsonl", "tensorboard", "checkpoints",
        "asynchronous checkpoints")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        words = [str(options.steps), str(options.rounds), "answers", options.ways]
        command = [sys.executable, "-m", "shardwright", "launch", "-n", str(options.ranks), "train.py", *words]
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"{done.stdout[-2000:]}{done.stderr}")
        print("| with | a step, ms | without, ms | more | lowest to highest |\n| --- | ---: | ---: | ---: | --- |")
        for line in (folder / "answers").read_text().splitlines():
            show(*json.loads(line))
        print(f"\nA watcher takes {watcher_s(folder / 'log_output' / '1') * 1e3:.1f} ms of a processor for each look.")


def show(way: str, pairs: list[tuple[float, float]]) -> None:
    bare_s, way_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    more = sorted(100 * (b / a - 1) for a, b in pairs)
    shown = f"| {way} | {way_s * 1e3:.2f} | {bare_s * 1e3:.2f} | {statistics.median(more):+.2f} % "
    print(f"{shown}| {more[0]:+.2f} to {more[-1]:+.2f} % |")


def watcher_s(folder: Path, looks: int = 20) -> float:
    """The processor time of one look of `shardwright watch`, once a second."""
    from rich.console import Console

    from shardwright.cluster.watch.view import screen
    from shardwright.launch.progress.ranks import WatchedJob

    watched, console = WatchedJob(folder), Console(width=100, file=StringIO())
    console.print(screen(watched.snapshot(), 100, 40))
    start_s = time.process_time()
    for _ in range(looks):
        console.print(screen(watched.snapshot(), 100, 40))
    return (time.process_time() - start_s) / looks


if __name__ == "__main__":
    main()
