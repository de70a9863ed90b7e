"""The seconds of a training step: mode "data" beside torch's DistributedDataParallel, or beside another checkout.

    python benchmarks/step.py [--ranks 2] [--rounds 5] [--compiled] [--before ../other/src]
    python benchmarks/step.py --around

The ways take turns (A B A B ...), each run in ranks of its own, so that all see the same machine; a run's figure is the
median of its steps, slowest rank, after some that warm it up. The table gives the median of the runs, and the median of
the ratios within a round. With ``--before`` the other way is Shardwright from that folder instead of DDP. With
``--compiled`` both are compiled: ours by ``compile=True``, DDP by `torch.compile`; that is done in the warming steps.

With ``--around`` it gives the microseconds of the CPU that a call takes beside the program itself, on one rank: those
of calls that take the outputs of the program from an earlier one. They are little disturbed by other programs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import sys, statistics, time
import torch, torch.distributed as dist
from torch.nn import functional as F
import shardwright as sw
from shardwright.zoo import GPT, Perceptron, resnet18

name, way, compiled, answer = sys.argv[1:]
world = sw.init(backend="gloo") if way == "ddp" else sw.init()  # what torchrun's users have, and what ours have
sw.set_seed(0)
if name == "perceptron":
    model, steps = Perceptron(), 150
    batch = torch.randn(256, 1, 28, 28), torch.randint(10, (256,))
elif name == "resnet18":
    model, steps = resnet18(width=16), 12
    batch = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
else:
    model, steps = GPT(256, width=128, heads=4, layers=4, sequence_length=64, dropout=0.0), 25
    batch = torch.randint(256, (16, 64)), torch.randint(256, (16, 64))
loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
rows = [part.chunk(world.size)[world.rank] for part in batch]
if way == "ddp":
    step_model = torch.nn.parallel.DistributedDataParallel(model)
    if compiled:
        step_model = torch.compile(step_model)
    call = lambda: loss_fn(step_model, rows)
else:
    options = {"compile": True} if compiled else {}
    parallel = sw.parallelize(model, loss_fn, rows, mode="data", batch="local", **options)
    step_model, call = parallel, lambda: parallel(rows)
if way == "around":
    from shardwright.run.programs.execute import Execution

    outputs, run = {}, Execution.__call__
    Execution.__call__ = lambda self, arguments: outputs.get(self) or outputs.setdefault(self, run(self, arguments))
    took = []
    for _ in range(30):
        start = time.process_time()
        for _ in range(100):
            call()
        took.append((time.process_time() - start) / 100)
    open(answer, "w").write(repr(statistics.median(took)))
    sys.exit()
optimizer = torch.optim.AdamW(step_model.parameters(), lr=1e-3)
took = []
for step in range(steps + 5):
    start = time.perf_counter()
    call().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step >= 5:
        took.append(time.perf_counter() - start)
slowest = torch.tensor(statistics.median(took), dtype=torch.float64)
dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
if world.rank == 0:
    open(answer, "w").write(repr(slowest.item()))
"""
MODELS = ("perceptron", "resnet18", "gpt")
OURS = str(Path(__file__).parents[1] / "src")


def step_s(name: str, way: str, source: str, compiled: bool, ranks: int, folder: Path) -> float:
    """The median seconds of a step, from ranks that import Shardwright from ``source``."""
    answer = folder / "answer"
    answer.unlink(missing_ok=True)
    words = ["step.py", name, way, "compiled" if compiled else "", str(answer)]
    command = [sys.executable, "-m", "shardwright", "launch", "-n", str(ranks), *words]
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{name}, {way}:\n{done.stdout}{done.stderr}")
    return float(answer.read_text())


def around(models: list[str]) -> None:
    print("| model | CPU time around the program, us |\n| --- | ---: |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "step.py").write_text(SCRIPT)
        for model in models:
            print(f"| {model} | {step_s(model, 'around', OURS, False, 1, folder) * 1e6:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--compiled", action="store_true", help="compile both ways")
    parser.add_argument("--before", help="the src folder of another checkout")
    parser.add_argument("--around", action="store_true", help="what a call takes beside its program, on one rank")
    options = parser.parse_args()
    if options.around:
        around(options.models.split(","))
        return
    other = ("ours", str(Path(options.before).absolute())) if options.before else ("ddp", OURS)
    names = ["ours", "before" if options.before else "ddp"]
    ours, theirs = (f"{name}{' compiled' if options.compiled else ''}, ms" for name in names)
    print(f"| model | {ours} | {theirs} | ratio | lowest to highest |")
    print("| --- | ---: | ---: | ---: | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "step.py").write_text(SCRIPT)
        for model in options.models.split(","):
            pairs = [
                tuple(step_s(model, *way, options.compiled, options.ranks, folder) for way in (("ours", OURS), other))
                for _ in range(options.rounds)
            ]
            ours_s, other_s = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios = sorted(a / b for a, b in pairs)
            print(
                f"| {model} | {ours_s * 1e3:.2f} | {other_s * 1e3:.2f} | {statistics.median(ratios):.2f} "
                f"| {ratios[0]:.2f} to {ratios[-1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
