"""What Python and torch's dispatcher take of a step: a model of many operators on hardly any numbers, in one process.

    python benchmarks/python_cost.py [--layers 90] [--rounds 15] [--compiled]

The GPT of 90 layers has 1,811 operators and 1,443 parameters. Steps of plain PyTorch and ours take turns, with one
thread; ``--compiled`` adds `torch.compile` and our ``compile=True``, which take minutes to compile. The figures are the
fastest and the median of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch.nn import functional as F

import shardwright as sw
from shardwright.training.zoo import GPT


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    words, following = batch
    return F.cross_entropy(model(words).flatten(0, -2), following.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sw.init()
    ids = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = ids[:, :-1], ids[:, 1:].contiguous()
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for compiled in (False, True)[: 1 + options.compiled]:
        word = ", compiled" if compiled else ""
        plain, model = (GPT(64, width=16, heads=2, layers=options.layers, sequence_length=8) for _ in range(2))
        parallel = sw.parallelize(model, loss_fn, batch, batch="global", compile=compiled)
        called = torch.compile(plain) if compiled else plain
        calls[f"plain PyTorch{word}"] = lambda called=called: loss_fn(called, batch)  # type: ignore[misc]
        calls[f"ours{word}"] = lambda parallel=parallel: parallel(batch)  # type: ignore[misc]
    for call in calls.values():
        call().backward()
        call().backward()
    took: dict[str, list[tuple[float, float]]] = {way: [] for way in calls}
    for _ in range(options.rounds):
        for way, call in calls.items():
            start_s = time.perf_counter()
            loss = call()
            between_s = time.perf_counter()
            loss.backward()
            took[way].append((between_s - start_s, time.perf_counter() - between_s))
    print("| way | forward, ms | backward, ms | fastest step, ms |\n| --- | ---: | ---: | ---: |")
    for way, steps in took.items():
        forward, backward = (1e3 * statistics.median(each) for each in zip(*steps, strict=True))
        print(f"| {way} | {forward:.1f} | {backward:.1f} | {1e3 * min(map(sum, steps)):.1f} |")


if __name__ == "__main__":
    main()
