"""The memory that a rank takes to train: ours beside what others train with on the CPUs of one host.

    python benchmarks/memory.py [--models perceptron,resnet18,transformer] [--ranks 2] [--backend shm]

The models and the ways are those of `step.py`. Each way trains a small model of the kind first, so that what libraries
and groups of ranks take once is there already; then the model is made, and five steps are taken. A rank's memory is
what it has of its own, and its share of what it shares with others: the anonymous pages of its process, and of the
pages of files in memory its part of each (proportional set size). It is read every 5 ms beside the steps. Between two
readings the kernel's own peak of resident pages (VmHWM) is one as well, less the pages of libraries and the others'
shares when the steps end; the higher of both counts. The figures are those of the rank with the most, in MiB: the
highest above what there was before the model was made, from then on ("from its making") and in the last three steps
alone ("in a step"), and the proportional set size with everything, interpreter and libraries ("in all"). They do not
depend on how busy the machine is. Memory that was taken to be shared and not touched, a quarter of a bucket at most, is
not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import EAGER, SPLIT, Jobs, add_models, models_of
from step_ranks import MODELS, WAYS, Batch, Case, Transformer, add_one_rank
from torch import nn

EVERY_S = 0.005
FIRST, LAST = 2, 3  # steps: those in which memory is taken for the first time, and those after them


def kib_of(file: str) -> Mapping[str, int]:
    return {name: int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", Path(file).read_text(), re.MULTILINE)}


def parts() -> tuple[int, int, int]:
    """KiB of this process: its own pages, its share of memory that it shares, and its share of everything."""
    found = kib_of("/proc/self/smaps_rollup")
    return found["Anonymous"], found["Pss_Shmem"], found["Pss"]


@dataclass
class Peak:
    """The highest of what was read, in KiB; ``took`` is without libraries, ``all`` with them."""

    took: int = 0
    all: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        anonymous, shared, everything = parts()
        self.took, self.all = max(self.took, anonymous + shared), max(self.all, everything)

    def watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.read()

    def end(self) -> None:
        """Read once more, and take what the kernel has counted between two readings."""
        self._ended.set()
        self.read()
        status, (_, shared, _) = kib_of("/proc/self/status"), parts()
        self.took = max(self.took, status["VmHWM"] - status["RssFile"] - status["RssShmem"] + shared)


@contextmanager
def peak() -> Iterator[Peak]:
    """That of what stands inside."""
    found = Peak()
    Path("/proc/self/clear_refs").write_text("5")  # so that VmHWM begins anew
    watching = threading.Thread(target=found.watch, daemon=True)
    watching.start()
    try:
        yield found
    finally:
        found.end()
        watching.join()


def small_perceptron() -> tuple[nn.Module, Batch]:
    from shardwright.training.zoo import Perceptron

    return Perceptron(16, [16, 16], 10), (torch.randn(8, 1, 4, 4), torch.randint(10, (8,)))


def small_resnet18() -> tuple[nn.Module, Batch]:
    from shardwright.training.zoo import resnet18

    return resnet18(width=4), (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))


def small_transformer() -> tuple[nn.Module, Batch]:
    ids = torch.randint(64, (4, 9))
    return Transformer(64, 16, layers=1), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


SMALL: Mapping[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "perceptron": small_perceptron, "resnet18": small_resnet18, "transformer": small_transformer,
}  # fmt: skip


def most(kib: int) -> float:
    """MiB of the rank with the most."""
    found = torch.tensor(kib / 1024, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def measured(name: str, way: str) -> dict[str, float]:
    """MiB that training takes above what was there before the model was."""
    step = WAYS[way](Case.made(replace(MODELS[name], make=SMALL[name]), torch.float32))
    for _ in range(FIRST):
        step()
    del step
    anonymous, shared, _ = parts()
    before = anonymous + shared
    with peak() as making:
        step = WAYS[way](Case.of(name, torch.float32))
        for _ in range(FIRST):
            step()
    with peak() as stepping:
        for _ in range(LAST):
            step()
    found = {"making": max(making.took, stepping.took) - before, "step": stepping.took - before}
    return {key: most(kib) for key, kib in (found | {"all": max(making.all, stepping.all)}).items()}


def inside(options: argparse.Namespace) -> None:
    """What each rank runs."""
    warnings.simplefilter("ignore")
    answer = measured(options.model, options.way) | {"backend": dist.get_backend()}
    if int(os.environ["RANK"]) == 0:
        options.answer.write_text(json.dumps(answer))
    if not options.way.startswith("ours"):
        dist.destroy_process_group()


def held_to(model: str) -> Mapping[str, str]:
    """Our ways to train a model, and the rival of which each is to take no more memory than."""
    split = {one.way: "fsdp2" for one in SPLIT.get(model, ())}
    return {one.way: "ddp" for one in EAGER[model]} | split


def ways_of(model: str) -> Sequence[str]:
    return [*held_to(model), *dict.fromkeys(rival for one in EAGER[model] for rival in one.rivals)]


def promise(model: str, way: str, rival: str, answers: Mapping[str, Mapping[str, Any]]) -> str:
    """What was promised of one of ours, kept or not."""
    ratios = [answers[way][key] / answers[rival][key] for key in ("making", "step")]
    kept = "kept  " if max(ratios) <= 1 else "BROKEN"
    return f"{kept} {model}, {way}: {ratios[0]:.2f} of {rival} from its making, {ratios[1]:.2f} in a step; at most 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--backend", help="of ours, as for shardwright launch; the rivals are over gloo")
    parser.add_argument("--ways", help="those of them alone, as ours,ddp")
    add_one_rank(parser)
    options = parser.parse_args()
    if options.model:
        inside(options)
        return
    options.compiled, options.fused, options.before = False, False, None
    models = models_of(parser, options)
    print("| model | way | over | from its making, MiB | in a step, MiB | in all, MiB |")
    print("| --- | --- | --- | ---: | ---: | ---: |", flush=True)
    said = []
    with tempfile.TemporaryDirectory() as name:
        jobs = Jobs(options, Path(name), Path(__file__))
        for model in models:
            ways = options.ways.split(",") if options.ways else ways_of(model)
            answers = {}
            for way in ways:
                answers[way] = found = jobs.answer(model, way)
                figures = " | ".join(f"{found[key]:.1f}" for key in ("making", "step", "all"))
                print(f"| {model} | {way} | {found['backend']} | {figures} |", flush=True)
            held = held_to(model).items()
            said += [promise(model, way, rival, answers) for way, rival in held if {way, rival} <= {*answers}]
    print("", *said, sep="\n")


if __name__ == "__main__":
    main()
