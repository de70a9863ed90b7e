"""The seconds that a plan takes: capture and search of a GPT of any depth on any mesh, on this machine alone.

    python benchmarks/plan.py [--layers 2 8 24 48 96] [--mesh 8 8,8] [--per-host 8] [--search exact] [--kind gpt|llama]

A GPT as GPT-2 is (width 1024, 16 heads, 50,304 words, 1,024 tokens), or a decoder as Llama-3 8B is (width 4096,
32 heads of which 8 have keys, inner width 14,336, 128,256 words), with a global batch of 64, on the meta device, at the
prices of H100s. Each case runs in a process of its own, whose peak memory is printed, too. Where there is one axis, as
in ``--mesh 64``, meshes are searched. *Processor* are the seconds of the search that the process had, which other
programs on the machine do not change much. The last line is ``search <seconds> s``, of the last case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CASE = """
import json, resource, sys, time, warnings
from dataclasses import replace
warnings.simplefilter("ignore")
import torch
from torch.nn import functional as F
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest

kind, layers, mesh, search, per_host = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
with torch.device("meta"):
    words = torch.zeros(64, 1024, dtype=torch.long)
    if kind == "gpt":
        from shardwright.training.zoo import GPT
        model = GPT(50304, width=1024, heads=16, layers=layers, sequence_length=1024, dropout=0.0)
        batch = words, words
        loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    else:
        from decoder import Decoder, loss_fn
        model = Decoder(layers, 4096, 32, 8, 14336, 128256)
        batch = words, torch.ones_like(words), words
start = time.perf_counter()
captured = captured_step(model, loss_fn, batch, {})
capture_s = time.perf_counter() - start
axes = Mesh.of(**{f"a{i}": int(size) for i, size in enumerate(mesh.split(","))})
hardware = replace(read_hardware("h100"), ranks_per_host=per_host or None)
start, cpu_start = time.perf_counter(), time.process_time()
plan = make_plan(captured, PlanRequest(axes, "auto", search, "split", hardware))
search_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
gap = (plan.cost - plan.bound) / plan.cost
for line in plan.considered:
    print(line, file=sys.stderr)
found = [len(captured.nodes), capture_s, search_s, cpu_s, peak, plan.cost, gap, plan.moved_bytes()]
print(json.dumps([*found, "×".join(str(axis.size) for axis in plan.mesh.axes)]))
"""
ROOT = Path(__file__).parents[1]


def case(kind: str, layers: int, mesh: str, search: str, per_host: int, sources: Path) -> list[Any] | str:
    """What one case took, or why it has no plan; what is said of each mesh goes to stderr."""
    paths = os.pathsep.join([str(sources), str(ROOT / "tests" / "support")])
    done = subprocess.run(
        [sys.executable, "-c", CASE, kind, str(layers), mesh, search, str(per_host)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    if done.returncode:
        return done.stderr.strip().splitlines()[-1][:150]
    print(done.stderr, end="", file=sys.stderr)
    return list(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 8, 24, 48, 96])
    parser.add_argument("--mesh", nargs="+", default=["8", "8,8"])
    parser.add_argument("--per-host", type=int, default=0, help="How many devices stand on a host; 0: all on one.")
    parser.add_argument("--search", default="exact")
    parser.add_argument("--kind", choices=["gpt", "llama"], default="gpt")
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="The sources of another checkout.")
    given = parser.parse_args()
    print(
        "| layers | mesh | operators | capture, s | search, s | processor, s | peak, GiB | step, ms | gap | sent, MB |"
    )
    print("|" + " --- |" * 10)
    search_s = float("nan")
    for mesh in given.mesh:
        for layers in given.layers:
            found = case(given.kind, layers, mesh, given.search, given.per_host, given.src)
            head = mesh.replace(",", "×")
            if isinstance(found, str):
                print(f"| {layers} | {head} | {found} |", flush=True)
                continue
            nodes, capture_s, search_s, cpu_s, peak, cost, gap, sent, planned = found
            on = head if planned == head else f"{head}: {planned}"
            print(
                f"| {layers} | {on} | {nodes:,.0f} | {capture_s:.1f} | {search_s:.2f} | {cpu_s:.2f} | {peak:.2f} | "
                f"{cost * 1e3:.1f} | {gap:.3%} | {sent / 1e6:,.1f} |",
                flush=True,
            )
    print(f"search {search_s:.2f} s")


if __name__ == "__main__":
    main()
