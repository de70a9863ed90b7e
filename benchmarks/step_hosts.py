"""The seconds of a training step on two hosts of two ranks: over shm, over gloo, and with DistributedDataParallel.

    python benchmarks/step_hosts.py [--megabits 1000] [--rounds 4] [--steps 15] [--busy]

Needs root: the hosts are network namespaces of this machine (`tests/support/hosts.py`), whose links ``tc`` shapes. The
four ranks train a transformer (4 layers, width 256, 8,192 words, 128 tokens a row) on 8 rows with AdamW. "shm" is mode
"data" in shared memory within the hosts and by gloo between them, "gloo" the same by gloo alone, "ddp" torch's
DistributedDataParallel over gloo, all of them started by our launcher. The ways take turns (A B C A B C). The figure of
a run is the median of its steps, slowest rank, after three that warm it up. The table gives the median of the runs, and
the median of the ratios within a round.

It ends with what was promised: at most 0.8 of the step of either other way. Where other programs want the cores it
refuses to measure, unless told ``--busy``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from quiet import add_busy, refuse_load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from hosts import HostNetwork, host_network

SCRIPT = """
import statistics, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.nn import functional as F
import shardwright as sw
from shardwright.training.zoo import GPT

way, steps, answer = sys.argv[1], int(sys.argv[2]), sys.argv[3]
world = sw.init(backend="shm" if way == "shm" else "gloo")
sw.set_seed(0)
model = GPT(8192, width=256, heads=8, layers=4, sequence_length=128, dropout=0.0)
batch = torch.randint(8192, (8, 128)), torch.randint(8192, (8, 128))
loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
rows = [part.chunk(world.size)[world.rank] for part in batch]
if way == "ddp":
    trained = torch.nn.parallel.DistributedDataParallel(model)
    call = lambda: loss_fn(trained, rows)
else:
    trained = sw.parallelize(model, loss_fn, rows, mode="data", batch="local")
    call = lambda: trained(rows)
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
took = []
for step in range(3 + steps):
    start = time.perf_counter()
    call().backward()
    optimizer.step()
    optimizer.zero_grad()
    took.append(time.perf_counter() - start)
slowest = torch.tensor(statistics.median(took[3:]), dtype=torch.float64)
dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
if world.rank == 0:
    open(answer, "w").write(repr(slowest.item()))
"""
BIN = Path(sys.executable).parent
WAYS = ("shm", "gloo", "ddp")
PROMISED = 0.8


def step_s(network: HostNetwork, folder: Path, way: str, steps: int) -> float:
    answer = folder / "answer"
    answer.unlink(missing_ok=True)
    command = [str(BIN / "shardwright"), "launch", "-H", "host1:2,host2:2", "step.py", way, str(steps), str(answer)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": network.path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{way}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return float(answer.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, default=1000, help="of the link of each host, in each direction")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15, help="of each run")
    add_busy(parser)
    given = parser.parse_args()
    refuse_load(given.busy)
    with tempfile.TemporaryDirectory() as name, host_network(2, Path(name)) as network:
        (Path(name) / "step.py").write_text(SCRIPT)
        for host in network.hosts:
            network.slow(host, given.megabits * 1_000_000)
        rounds = [{way: step_s(network, Path(name), way, given.steps) for way in WAYS} for _ in range(given.rounds)]
    print("| Mbit/s | 2 hosts x 2 ranks by | step, ms | shm / theirs | lowest to highest |")
    print("| ---: | --- | ---: | ---: | --- |")
    kept = []
    for way in WAYS:
        ratios = sorted(row["shm"] / row[way] for row in rounds)
        median = statistics.median(ratios)
        took_ms = statistics.median(row[way] for row in rounds) * 1e3
        print(f"| {given.megabits} | {way} | {took_ms:.0f} | {median:.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |")
        if way != "shm":
            said = "kept  " if median <= PROMISED else "BROKEN"
            kept.append(f"{said} shm: {median:.2f} of {way}, at most {PROMISED}")
    print(*kept, sep="\n", flush=True)


if __name__ == "__main__":
    main()
