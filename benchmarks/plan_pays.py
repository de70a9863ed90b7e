"""Where a plan pays: training over a slow link, our plans beside DDP, FSDP and tensor parallelism by hand.

    python benchmarks/plan_pays.py [--megabits 1000 100] [--rounds 3] [--backend gloo] [--quick] [--busy]

Needs root: two hosts of two ranks each are network namespaces of this machine (`tests/support/hosts.py`), whose
links ``tc`` shapes to each rate in turn. For each rate the hosts are measured as ``shardwright bench --save-profile``
does it; then every case is trained by every way, all ways taking turns in each round. A case is a transformer (4
layers, width 256, 8,192 words, 32 tokens a row), a perceptron of wide layers (1024, 4096, 4096, 4096, 16) or a deep one
(32 layers of 1024), and the rows of its global batch. The deep one has gradients that take longer over a slow link than
what crosses between two of its layers, and rows enough for microbatches that multiply as fast as the whole batch.

The ways: "found", mode "auto" at the prices measured; "data", mode "data"; "tensor", pins as Megatron-LM splits, inside
the hosts, and the batch between them; "stages", a pipeline with a stage on each host and eight microbatches; torch's
DistributedDataParallel ("ddp") and fully_shard on every layer ("fsdp").
A run's figure is the median of its steps (forward, backward, a step of SGD), slowest rank; the table has the median of
the rounds. Predicted is what the cost model says of a plan with the speed that the cores have just before and after it
runs: that of a shared machine changes by the minute. All is measured over the usual backend, or ``--backend``.
``--quick`` measures little, to see that everything works.
Where other programs want the cores it refuses to measure, unless told ``--busy``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quiet import add_busy, refuse_load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from hosts import HostNetwork, host_network

PROFILE = """
import sys
import shardwright as sw
from shardwright.cluster.bench.profile import ROUNDS, SIZES, measure_hardware
world = sw.init()
quick = sys.argv[2] == "quick"
found = measure_hardware(world, SIZES[::8] if quick else SIZES, 1 if quick else ROUNDS)
if world.rank == 0:
    found.save(sys.argv[1])
"""
TRAIN = """
import json, statistics, sys, time, warnings
from dataclasses import replace
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
import shardwright as sw
from shardwright.cluster.bench.device import measure_device
from shardwright.compiler.plan.pipeline.costs import StagedCosts
from shardwright.compiler.report.plans.staged_page import staged_page
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.runtime.programs.planner import hardware_of
from shardwright.training.zoo import GPT

case, rows, way, budget_s, answer = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5]
world = sw.init()
sw.set_seed(0)
if case == "transformer":
    model = GPT(8192, width=256, heads=8, layers=4, sequence_length=32, tied=False)
    batch = torch.randint(8192, (rows, 32)), torch.randint(8192, (rows, 32))
    layers = [*model.layers]
    columns, back = ((2, 1, 1), (2, 1)), ((2, 1, 2), (1, 2))
    pins = dict.fromkeys(("*.q", "*.k", "*.v", "*.up"), columns) | dict.fromkeys(("*.out", "*.down"), back)
else:
    wide = [1024, 4096, 4096, 4096] if case == "perceptron" else [1024] * 33
    hidden = [part for a, b in zip(wide, wide[1:]) for part in (nn.Linear(a, b), nn.GELU())]
    model = nn.Sequential(*hidden, nn.Linear(wide[-1], 16))
    batch = torch.randn(rows, wide[0]), torch.randint(16, (rows,))
    layers = [part for part in hidden if isinstance(part, nn.Linear)]
    columns, back = ((2, 1), (2, 1)), ((2, 2), (1, 2))
    paired = len(layers) + len(layers) % 2  # the last layer of all is the second of a pair where one is left over
    pins = {str(2 * at): back if at % 2 else columns for at in range(paired)}
loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
mine = [part.chunk(world.size)[world.rank] for part in batch]
plan = None
if way in ("found", "data", "tensor", "stages"):
    hows = {"found": {"mode": "auto"}, "data": {"mode": "data"}, "tensor": {"mode": "semi-auto", "search": "exact"}}
    hows |= {"stages": {"mode": "auto", "mesh": "pp=2,ranks=2", "microbatches": 8}}
    how = hows[way]
    if way == "tensor":
        how |= {"pins": pins, "mesh": "dp=2,tp=2"}
    trained = sw.parallelize(model, loss_fn, batch, batch="global", hardware="hardware.json", optimizer="sgd", **how)
    plan, call = trained.plan, lambda: trained(batch)
elif way == "ddp":
    trained = nn.parallel.DistributedDataParallel(model)
    call = lambda: loss_fn(trained, mine)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    over = init_device_mesh("cpu", (world.size,))
    for part in layers:
        fully_shard(part, mesh=over)
    trained = fully_shard(model, mesh=over)
    call = lambda: loss_fn(trained, mine)
optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)

def step():
    dist.barrier()
    start = time.perf_counter()
    call().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start

step()
before = measure_device(world.device)
slowest = torch.tensor(step(), dtype=torch.float64)
dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
took = [step() for _ in range(max(2, min(25, round(budget_s / slowest.item()))))]
after = measure_device(world.device)

def between(read):
    return statistics.harmonic_mean([read(before), read(after)])

everyone = [None] * world.size
dist.all_gather_object(everyone, took)
if world.rank == 0:
    found = {"step_s": statistics.median(map(max, zip(*everyone))), "steps": len(took)}
    if plan is not None:
        hardware = replace(
            hardware_of(world, read_hardware("hardware.json")),
            flops=tuple((name, between(lambda speeds: dict(speeds.flops)[name])) for name, _ in before.flops),
            memory_bandwidth=between(lambda speeds: speeds.memory_bandwidth),
            launch_s=between(lambda speeds: speeds.launch_s),
        )
        found["predicted_s"] = (Prices if plan.stages is None else StagedCosts)(plan, hardware).step_s
        found["moved_bytes"] = plan.moved_bytes()
        found["plan"] = f"{plan if plan.stages is None else staged_page(plan, hardware)}"
    json.dump(found, open(answer, "w"))
"""
BIN = Path(sys.executable).parent
WAYS = ("found", "data", "tensor", "stages", "ddp", "fsdp")
CASES = (("transformer", 8), ("transformer", 64), ("perceptron", 64), ("deep", 4096))


class Hosts:
    """Starts scripts on two hosts of two ranks, over a backend, by default the usual one."""

    def __init__(self, network: HostNetwork, folder: Path, backend: str | None) -> None:
        self.network, self.folder = network, folder
        self.backend = ["--backend", backend] if backend else []
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": network.path}
        (folder / "measure_hosts.py").write_text(PROFILE)
        (folder / "train.py").write_text(TRAIN)

    def shape(self, megabits: int) -> None:
        for host in self.network.hosts:
            self.network.slow(host, megabits * 1_000_000)

    def run(self, *words: str) -> None:
        command = [str(BIN / "shardwright"), "launch", "-H", "host1:2,host2:2", *self.backend, *words]
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(words)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")

    def trained(self, case: str, rows: int, way: str, budget_s: float) -> dict[str, Any]:
        answer = self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        self.run("train.py", case, str(rows), way, str(budget_s), str(answer))
        return dict(json.loads(answer.read_text()))


def measured(hosts: Hosts, case: str, rows: int, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What each way took, and what was predicted of it: medians over the rounds."""
    rounds = [
        {way: hosts.trained(case, rows, way, 0.0 if given.quick else given.seconds) for way in given.ways}
        for _ in range(given.rounds)
    ]

    def medians(way: str) -> dict[str, float]:
        keys = [key for key in ("step_s", "predicted_s") if key in rounds[0][way]]
        return {key: statistics.median(of[way][key] for of in rounds) for key in keys}

    return {way: rounds[0][way] | medians(way) for way in given.ways}


def line(megabits: int, case: str, rows: int, took: dict[str, dict[str, Any]]) -> str:
    times = {way: took[way]["step_s"] for way in took}
    cells = []
    for way in took:
        said = took[way].get("predicted_s")
        cells.append(f"{times[way] * 1e3:,.0f}" + (f" ({said * 1e3:,.0f})" if said is not None else ""))
    best = min((times[way] for way in took if way != "found"), default=math.nan)
    found, ddp = times.get("found", math.nan), times.get("ddp", math.nan)
    off = took["found"]["predicted_s"] / found if "found" in took else math.nan
    figures = f"{found / best:.2f} | {found / ddp:.2f} | {off:.2f}"
    return f"| {megabits} | {case}, {rows} rows | {' | '.join(cells)} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", nargs="+", type=int, default=[1000, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of steps in each run, two steps at least")
    parser.add_argument("--only", default="", help="part of a case, as perceptron")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--backend", help="of all ways and of the profile, as for shardwright launch")
    parser.add_argument("--plans", type=Path, help="a folder for the plans")
    parser.add_argument("--quick", action="store_true")
    add_busy(parser)
    given = parser.parse_args()
    refuse_load(given.busy)
    given.rounds = 1 if given.quick else given.rounds
    print("Milliseconds of a step, predicted in brackets:\n")
    print(f"| Mbit/s | case | {' | '.join(given.ways)} | found / best other | found / ddp | predicted / measured |")
    print(f"| ---: | --- |{' ---: |' * (len(given.ways) + 3)}", flush=True)
    with tempfile.TemporaryDirectory() as name, host_network(2, Path(name)) as network:
        hosts = Hosts(network, Path(name), given.backend)
        for megabits in given.megabits:
            hosts.shape(megabits)
            hosts.run("measure_hosts.py", "hardware.json", "quick" if given.quick else "all")
            for case, rows in CASES:
                if given.only in case:
                    took = measured(hosts, case, rows, given)
                    print(line(megabits, case, rows, took), flush=True)
                    if given.plans:
                        given.plans.mkdir(exist_ok=True)
                        for way, of in took.items():
                            if "plan" in of:
                                (given.plans / f"{megabits}-{case}-{rows}-{way}.txt").write_text(of["plan"])


if __name__ == "__main__":
    main()
