"""The step that the planner predicts beside the one that is measured, after the machine was measured for it.

    python benchmarks/predicted.py [--models perceptron,resnet18,transformer] [--ranks 2] [--rounds 3] [--backend shm]
    python benchmarks/predicted.py --hardware hardware.json

First ``shardwright bench --save-profile`` measures this machine for as many ranks over the same backend, unless
``--hardware`` gives such a profile. Then the models of `step.py` are trained data parallel and by the plan that mode
"auto" finds at these prices, in turn, each in ranks of its own. Predicted is what the cost model says of the plan's
step; measured the median of the steps (forward, backward, a step of AdamW), slowest rank, median over the rounds. The
ratios are those of each round, with the lowest and the highest.
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

import torch
from quiet import add_busy, refuse_load
from step import SOURCE, Jobs, add_models, models_of, spread
from step_ranks import BLOCKS, MODELS, WARMING, Case, add_one_rank, looped, loss_fn, slowest, timed

WAYS = {"ours": "data", "ours-auto": "auto"}


def inside(options: argparse.Namespace) -> None:
    """What each rank runs."""
    import shardwright as sw
    from shardwright.compiler.plan.pricing.hardware import read_hardware
    from shardwright.compiler.plan.timing.prices import Prices
    from shardwright.runtime.programs.planner import hardware_of

    world = sw.init()
    case = Case.of(options.model, torch.float32)
    how = {"mode": WAYS[options.way], "batch": "local", "hardware": options.hardware}
    parallel = sw.parallelize(case.model, loss_fn, case.rows, **how)
    step = looped(lambda: parallel(case.rows), case.adamw(parallel))
    timed(step, WARMING)
    took_s = slowest([s for s, _ in timed(step, BLOCKS * MODELS[options.model].steps)])
    prices = Prices(parallel.plan, hardware_of(world, read_hardware(options.hardware)))
    answer = {
        "measured_s": took_s,
        "predicted_s": prices.step_s,
        "computing_s": prices.computing_s + prices.updating_s + prices.hardware.around_s,
        "communicating_s": prices.exposed_s,
        "backend": world.backend,
    }
    if world.rank == 0:
        options.answer.write_text(json.dumps(answer))


def measure_machine(options: argparse.Namespace, profile: str) -> None:
    """Have the command write the profile, and show what it believes of the device."""
    backend = ["--backend", options.backend] if options.backend else []
    words = ["bench", "-n", str(options.ranks), *backend, "--save-profile", profile]
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardwright", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    print(*(line for line in done.stdout.splitlines() if line.startswith(("profile: ", "matrix products: "))), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", help="as for shardwright launch")
    parser.add_argument("--hardware", type=os.path.abspath, help="a profile of this machine, as bench wrote it before")
    add_one_rank(parser)
    add_busy(parser)
    options = parser.parse_args()
    if options.model:
        inside(options)
        return
    options.compiled, options.fused, options.before = False, False, None
    models = models_of(parser, options)
    refuse_load(options.busy)
    with tempfile.TemporaryDirectory() as name:
        hardware = options.hardware or f"{name}/hardware.json"
        if options.hardware is None:
            measure_machine(options, hardware)
        jobs = Jobs(options, Path(name), Path(__file__), "--hardware", hardware)
        print(
            "\n| model | mode | over | predicted, ms | of it communication, ms | measured, ms | predicted / measured |"
        )
        print("| --- | --- | --- | ---: | ---: | ---: | --- |", flush=True)
        for model in models:
            for way, of in jobs.answers(model, [*WAYS]).items():
                measured_ms = statistics.median(answer["measured_s"] for answer in of) * 1e3
                first, ratios = of[0], [answer["predicted_s"] / answer["measured_s"] for answer in of]
                said = f"{first['predicted_s'] * 1e3:.2f} | {first['communicating_s'] * 1e3:.2f}"
                cells = f"{model} | {WAYS[way]} | {first['backend']} | {said} | {measured_ms:.2f} | {spread(ratios)}"
                print(f"| {cells} |", flush=True)


if __name__ == "__main__":
    main()
