"""The Python of ours that a training step goes through: files and calls, and those of one all-reduce of a scalar.

    python benchmarks/hops.py [--backend gloo,shm] [--batch global,local,loader] [--list]

It starts two ranks by ``shardwright launch``, which train a two-layer perceptron (784-512-10, 64 rows, SGD) in the
mode "data", and counts by `sys.setprofile` on rank 0: in a warm step (forward and backward; and with the optimizer's
step and zero_grad) the files of the package and the calls of their functions, the local program's included; and the
functions and files that an all-reduce of a scalar by the program's communicator crosses, down to the backend. Of
several counts the least is given: where the other rank comes late, waiting for it takes more calls. ``--list`` names
the functions.

When the communicator asked backends for methods of their own, and ranks computed before they knew each other's sizes:

| backend | batch | step: files | calls | with update: files | calls | all-reduce: files | functions |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
| shm | global | 28 | 138 | 31 | 171 | 8 | 16 |
| shm | local | 30 | 152 | 33 | 185 | 8 | 16 |
| shm | loader | 28 | 134 | 31 | 167 | 8 | 16 |
| gloo | global | 24 | 141 | 28 | 174 | 5 | 19 |
| gloo | local | 27 | 147 | 30 | 180 | 5 | 19 |
| gloo | loader | 24 | 137 | 28 | 170 | 5 | 19 |

Since one file has what belongs to a batch, one what is to be as it was, and one the state and the run of a program:

| backend | batch | step: files | calls | with update: files | calls | all-reduce: files | functions |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
| shm | global | 13 | 61 | 14 | 79 | 3 | 4 |
| shm | local | 13 | 68 | 14 | 86 | 3 | 4 |
| shm | loader | 13 | 59 | 14 | 77 | 3 | 4 |
| gloo | global | 12 | 61 | 13 | 79 | 3 | 4 |
| gloo | local | 12 | 68 | 13 | 86 | 3 | 4 |
| gloo | loader | 12 | 59 | 13 | 77 | 3 | 4 |
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

Function = tuple[str, str]
"""A file of the package, or the local program, and a function in it."""
BATCHES = ("global", "local", "loader")
STEPS = 12
PROGRAM = "<program>"
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # which later releases of Python inline


def calls_in(act: Callable[[], object]) -> Counter[Function]:
    """Count the calls of functions of the package within ``act``."""
    import shardwright

    package = str(Path(shardwright.__file__).parent) + os.sep
    found: Counter[Function] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if frame.f_code.co_name in COMPREHENSIONS:
                return
            if name.startswith(package):
                found[name.removeprefix(package), frame.f_code.co_qualname] += 1
            elif name.startswith("<program"):
                found[PROGRAM, frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def count(kind: str) -> dict[str, list[tuple[str, str, int]]]:
    """What this rank counts, with batches of that kind."""
    import torch
    from torch.nn import functional as F

    import shardwright as sw
    from shardwright.training.zoo import Perceptron

    sw.set_seed(0)
    rank = sw.init().rank
    x, y = torch.randn(64, 784), torch.randint(10, (64,))
    batch: Any = (x, y) if kind == "global" else (x[32 * rank :][:32], y[32 * rank :][:32])
    if kind == "loader":
        data = torch.utils.data.TensorDataset(x, y)
        batch = next(iter(sw.loader(data, batch_size=64)))
    model = Perceptron(784, [512], 10)
    parallel = sw.parallelize(
        model,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batch,
        "data",
        batch=None if kind == "loader" else kind,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    communicator, scalar = parallel._communicator, torch.ones(())
    axes = communicator.mesh.names

    def computed() -> None:
        parallel(batch).backward()

    def updated() -> None:
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, Counter[Function]] = {}
    for _ in range(STEPS):  # the first calls compare what ranks hold, too
        acts = {"step": computed, "update": updated, "all-reduce": lambda: communicator.all_reduce(scalar, axes)}
        for name, act in acts.items():
            seen = calls_in(act)
            if name not in found or seen.total() < found[name].total():
                found[name] = seen
    return {name: [(*function, times) for function, times in each.items()] for name, each in found.items()}


def told(found: Iterable[tuple[str, str, int]]) -> tuple[int, int, int]:
    """Files, functions and calls."""
    files = {file for file, _, _ in found if file != PROGRAM}
    return len(files), len([*found]), sum(times for _, _, times in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="shm,gloo")
    parser.add_argument("--batch", default=",".join(BATCHES))
    parser.add_argument("--list", action="store_true", help="name the functions, with how often each is called")
    parser.add_argument("--count", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        found = count(options.batch)
        if os.environ["RANK"] == "0":
            Path(options.count).write_text(json.dumps(found))
        return
    print("| backend | batch | step: files | calls | with update: files | calls | all-reduce: files | functions |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for backend in options.backend.split(","):
        for batch in options.batch.split(","):
            with tempfile.TemporaryDirectory() as folder:
                answer = Path(folder, "answer")
                command = [sys.executable, "-m", "shardwright", "launch", "-n", "2", "--backend", backend, __file__]
                done = subprocess.run(
                    [*command, "--batch", batch, "--count", str(answer)], capture_output=True, text=True, cwd=folder
                )
                if done.returncode:
                    raise SystemExit(done.stdout + done.stderr)
                found = json.loads(answer.read_text())
            files, _, calls = told(found["step"])
            all_files, _, all_calls = told(found["step"] + found["update"])
            its_files, functions, _ = told(found["all-reduce"])
            cells = [backend, batch, files, calls, all_files, all_calls, its_files, functions]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            if options.list:
                for name, functions_called in found.items():
                    print(f"\n{name}:")
                    print("\n".join(f"  {times:3} {file} {function}" for file, function, times in functions_called))
                print()


if __name__ == "__main__":
    main()
