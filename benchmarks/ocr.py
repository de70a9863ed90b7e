"""Images per second in training text detection and recognition, beside the same model under DDP, and the wait for data.

    shardwright data ocr --out texts --count 200 --words 2000 --size 320
    python benchmarks/ocr.py [--rounds 3] [--ranks 1,2] [--configs rec/crnn/crnn_small,det/dbnet/db_small]

Ours has statistics of the global batch (``global``) or, as DDP, of each rank's part (``per-replica``). The ways take
turns, each run in ranks of its own; a run's figures are those of its slowest rank after five steps that warm it
up. The table has the medians of the runs, and of the ratios within a round. Each rank computes on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import json, sys, time
import torch, torch.distributed as dist
import shardwright as sw
from shardwright.ocr.tasks import TASKS
from shardwright.ocr.training import make_model, make_optimizer, prepare

config, texts, way, steps, answer = sys.argv[1:]
experiment = prepare(config, [f"{part}.dataset.dataset_root={texts}" for part in ("train", "eval")])
settings = experiment.settings
world = sw.init()
sw.set_seed(0)
row, options = TASKS[settings.model.type], settings.train.loader
model = make_model(settings)
batches = sw.loader(
    experiment.train, options.global_batch_size, seed=0, drop_last=True, num_workers=options.num_workers
)
loss_fn = row.loss(settings)
if way == "ddp":
    trained = torch.nn.parallel.DistributedDataParallel(model)
    call = lambda batch: loss_fn(trained, tuple(batch))
else:
    trained = sw.parallelize(model, loss_fn, batches.sample_batch(), mode="data", batch_norm=way)
    call = trained
optimizer = make_optimizer(settings, trained)
trained.train()
waited, began, done = 0.0, 0.0, 0
source = iter(batches)
for step in range(int(steps) + 5):
    if step == 5:
        began, waited = time.perf_counter(), 0.0
    asked = time.perf_counter()
    batch = next(source, None)
    if batch is None:
        source = iter(batches)
        batch = next(source)
    waited += time.perf_counter() - asked
    call(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
took = torch.tensor([time.perf_counter() - began, waited], dtype=torch.float64)
dist.all_reduce(took, op=dist.ReduceOp.MAX)
if world.rank == 0:
    seconds, waited = took.tolist()
    images = int(steps) * options.global_batch_size
    json.dump({"rate": images / seconds, "waited": waited / seconds}, open(answer, "w"))
"""
WAYS = ("global", "per-replica", "ddp")
REPOSITORY = Path(__file__).parents[1]


def measured(config: str, texts: str, way: str, ranks: int, steps: int, folder: Path) -> dict[str, float]:
    """Images per second, and the share of the time in which a rank waited for its next batch."""
    answer = folder / "answer"
    answer.unlink(missing_ok=True)
    arguments = [str(REPOSITORY / f"configs/{config}.yaml"), texts, way, str(steps), str(answer)]
    command = [sys.executable, "-m", "shardwright", "launch", "-n", str(ranks), "ocr_step.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{config}, {way}, {ranks} ranks:\n{done.stdout}{done.stderr}")
    found: dict[str, float] = json.loads(answer.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", default="texts", help="the folder of shardwright data ocr")
    parser.add_argument("--configs", default="rec/crnn/crnn_small,det/dbnet/db_small")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    texts = str(Path(options.texts).absolute())
    print("| configuration | ranks | way | images/s | to DDP | waiting for data |")
    print("| --- | ---: | --- | ---: | ---: | ---: |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ocr_step.py").write_text(SCRIPT)
        for config in options.configs.split(","):
            for ranks in map(int, options.ranks.split(",")):
                rounds = [
                    {way: measured(config, texts, way, ranks, options.steps, folder) for way in WAYS}
                    for _ in range(options.rounds)
                ]
                for way in WAYS:
                    rate, waited = (statistics.median(one[way][what] for one in rounds) for what in ("rate", "waited"))
                    ratio = statistics.median(one[way]["rate"] / one["ddp"]["rate"] for one in rounds)
                    print(f"| {config} | {ranks} | {way} | {rate:.1f} | {ratio:.2f} | {waited:.1%} |", flush=True)


if __name__ == "__main__":
    main()
