"""The seconds of a training step: ours beside what others train with on the CPUs of one host.

    python benchmarks/step.py [--models perceptron,resnet18,transformer] [--ranks 2] [--rounds 3] [--backend shm]
    python benchmarks/step.py --compiled
    python benchmarks/step.py --fused
    python benchmarks/step.py --split
    python benchmarks/step.py --before ../other/src
    python benchmarks/step.py --around

The models are a perceptron (784-512-512-10, 64 rows), a ResNet-18 (of width 16, 64 images of 32 x 32) and a transformer
(4 layers of width 256, 8,192 words, 8 rows of 128). The rivals are DistributedDataParallel, fully_shard (FSDP2),
Accelerate, Lightning Fabric and DTensor's tensor parallelism, each as its users write it (`step_ranks.py`), started by
torchrun and over gloo; ours is started by ``shardwright launch``, over its usual backend or ``--backend``. All have one
model, one batch and AdamW, and ranks of one thread. Under ``--compiled`` it is our ``compile=True`` and
DistributedDataParallel by `torch.compile`. Under ``--split`` it is our tensor parallel and fully sharded plans beside
DTensor's tensor parallelism and FSDP2. Ours makes the steps of AdamW by torch's fused kernels, which are not usual on
CPUs; under ``--fused`` all ways and limits ask for them.

The ways take turns (A B A B ...), each in ranks of its own, in which its limit takes turns with it: the same ranks
without communication. A run's figure is the median of its steps, slowest rank. The tables give medians over the rounds,
and medians of the ratios within a round with the lowest and the highest; the processor's time is that of one rank. In
the first round each way also makes three steps in float64, whose losses must be the same to 1e-10: those of plain
PyTorch on all rows, or, with batch statistics of each rank's own rows, of each other. With ``--before`` the rival is
Shardwright from that folder.

With ``--around`` it gives the microseconds of the CPU that a call takes beside the program itself, on one rank: those
of calls that take the outputs of the program from an earlier one. They are little disturbed by other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quiet import add_busy, refuse_load

BIN = Path(sys.executable).parent
RANKS = Path(__file__).with_name("step_ranks.py")
SOURCE = str(Path(__file__).parents[1] / "src")
ALIKE = 1e-10  # by which losses in float64 may differ, relatively
Answers = Mapping[str, Sequence[Mapping[str, Any]]]
"""What the ranks of each way have measured, by round."""


@dataclass(frozen=True)
class Ours:
    """One of our ways, its rivals, and what was promised: at most so much of the fastest's, and of its limit's."""

    way: str
    rivals: tuple[str, ...]
    of_fastest: float
    of_limit: float | None = None


ALL = ("ddp", "fsdp2", "accelerate", "fabric", "dtensor")
CONVOLVING = ("ddp", "fsdp2", "accelerate", "fabric")  # DTensor's tensor parallelism has no plan for convolutions
EAGER: Mapping[str, Sequence[Ours]] = {
    "perceptron": (Ours("ours", ALL, 0.40, 1.5), Ours("ours-auto", ALL, 0.40, 1.5)),
    "resnet18": (Ours("ours", CONVOLVING, 1.03, 1.08), Ours("ours-per-replica", CONVOLVING, 0.97, 1.03)),
    "transformer": (Ours("ours", ALL, 0.93, 1.05), Ours("ours-auto", ALL, 0.93, 1.05)),
}
SPLIT = {"transformer": (Ours("ours-tensor", ("dtensor",), 0.6), Ours("ours-sharded", ("fsdp2",), 0.75))}
# Batch statistics of each rank's own rows: their losses are not those of one device.
OWN_ROWS = {"resnet18": {"ours-per-replica", *CONVOLVING}}


def compiled(model: str) -> tuple[Ours, ...]:
    own = "ours-per-replica" if model in OWN_ROWS else "ours"
    return tuple(Ours(of.way, ("ddp",), of.of_fastest, of.of_limit) for of in EAGER[model] if of.way == own)


class Jobs:
    """Runs ways as jobs of their own, whose ranks run ``script`` with these and more words."""

    def __init__(self, options: argparse.Namespace, folder: Path, script: Path = RANKS, *words: str) -> None:
        self.options, self.folder, self.script, self.words = options, folder, script, words

    def answer(self, model: str, way: str, check: bool = False) -> dict[str, Any]:
        """What the ranks of one job say."""
        answer, source = self.folder / "answer", self.options.before if way == "before" else SOURCE
        answer.unlink(missing_ok=True)
        words = [str(self.script), *self.words, "--model", model, "--answer", str(answer)]
        words += ["--way", "ours" if way == "before" else way]
        words += ["--compiled"] * self.options.compiled + ["--fused"] * self.options.fused + ["--check"] * check
        environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        command = [*self._launcher(way), *words]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return dict(json.loads(answer.read_text()))

    def _launcher(self, way: str) -> list[str]:
        if not way.startswith(("ours", "before", "around")):
            return [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={self.options.ranks}"]
        ranks = 1 if way == "around" else self.options.ranks
        backend = ["--backend", self.options.backend] if self.options.backend else []
        return [sys.executable, "-m", "shardwright", "launch", "-n", str(ranks), *backend]

    def answers(self, model: str, ways: Sequence[str]) -> Answers:
        """Those of all rounds, in each of which another way is the first."""
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for number in range(self.options.rounds):
            at = number % len(ways)
            for way in (*ways[at:], *ways[:at]):
                found[way].append(self.answer(model, way, check=number == 0))
        return found


def check_losses(model: str, answers: Answers) -> None:
    """Raise `SystemExit` where a way trains something else than the others."""
    own = [way for way in answers if way in OWN_ROWS.get(model, ())]
    for way, (first, *_) in answers.items():
        expected = answers[own[0]][0]["losses"] if way in own else first["alone"]
        if any(abs(a - b) > ALIKE * abs(b) for a, b in zip(first["losses"], expected, strict=True)):
            raise SystemExit(f"{model}: {way} has the losses {first['losses']}, expected {expected}")


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def over(answers: Answers, one: str, other: str) -> list[float]:
    """Of each round."""
    return [a["step_s"] / b["step_s"] for a, b in zip(answers[one], answers[other], strict=True)]


def over_limit(answers: Answers, way: str) -> list[float]:
    return [answer["step_s"] / answer["limit_s"] for answer in answers[way]]


def rows(model: str, mine: Sequence[Ours], answers: Answers) -> list[str]:
    """A row for each way, with each of ours over it."""
    found = []
    for way, of in answers.items():
        step_ms, cpu_ms = (statistics.median(answer[key] for answer in of) * 1e3 for key in ("step_s", "step_cpu_s"))
        cells = [model, way, of[0]["backend"], f"{step_ms:.2f}", f"{cpu_ms:.2f}", spread(over_limit(answers, way))]
        cells += [spread(over(answers, one.way, way)) if way in one.rivals else "" for one in mine]
        found.append(f"| {' | '.join(cells)} |")
    return found


def promises(model: str, mine: Sequence[Ours], answers: Answers) -> list[str]:
    """What was promised of each of ours, kept or not."""
    said = []
    for one in mine:
        fastest = min(one.rivals, key=lambda way: statistics.median(answer["step_s"] for answer in answers[way]))
        found = [(f"of the fastest rival, {fastest}", over(answers, one.way, fastest), one.of_fastest)]
        if one.of_limit is not None:
            found.append(("of its limit", over_limit(answers, one.way), one.of_limit))
        said += [_promise(f"{model}, {one.way}", *entry) for entry in found]
    return said


def _promise(who: str, of: str, ratios: Sequence[float], most: float) -> str:
    kept = "kept  " if statistics.median(ratios) <= most else "BROKEN"
    return f"{kept} {who}: {spread(ratios)} {of}; at most {most:g}"


def around(jobs: Jobs, models: Sequence[str]) -> None:
    print("| model | CPU time around the program, us |\n| --- | ---: |", flush=True)
    for model in models:
        print(f"| {model} | {jobs.answer(model, 'around')['around_s'] * 1e6:.0f} |", flush=True)


def chosen(model: str, options: argparse.Namespace) -> Sequence[Ours]:
    """Which of ours are measured for a model, beside which rivals."""
    if options.before:
        return (Ours("ours", ("before",), 1.0),)
    if options.split:
        return SPLIT[model]
    return compiled(model) if options.compiled else EAGER[model]


def add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", help=f"of {','.join(EAGER)}; all unless given")
    parser.add_argument("--ranks", type=int, default=2)


def models_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, known: Collection[str] = EAGER
) -> Sequence[str]:
    """Those that were asked for; all where none was."""
    models = options.models.split(",") if options.models else [*known]
    if unknown := {*models} - {*known}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(known)}")
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", help="of ours, as for shardwright launch; the rivals are over gloo")
    parser.add_argument("--compiled", action="store_true", help="by torch.compile, ours and DistributedDataParallel")
    parser.add_argument(
        "--fused", action="store_true", help="all ways make AdamW with fused=True, which ours takes anyway"
    )
    parser.add_argument("--split", action="store_true", help="our split plans beside DTensor and FSDP2")
    parser.add_argument("--before", type=os.path.abspath, help="the src folder of another checkout, as the rival")
    parser.add_argument("--around", action="store_true", help="what a call takes beside its program, on one rank")
    add_busy(parser)
    options = parser.parse_args()
    models = models_of(parser, options, SPLIT if options.split else EAGER)
    with tempfile.TemporaryDirectory() as name:
        jobs = Jobs(options, Path(name))
        if options.around:
            around(jobs, models)
            return
        refuse_load(options.busy)
        for model in models:
            mine = chosen(model, options)
            ways = dict.fromkeys([*(one.way for one in mine), *(rival for one in mine for rival in one.rivals)])
            answers = jobs.answers(model, [*ways])
            check_losses(model, answers)
            head = ["model", "way", "over", "a step, ms", "processor, ms", "over its limit"]
            print(f"| {' | '.join([*head, *(f'{one.way} / it' for one in mine)])} |")
            print(f"| --- | --- | --- | ---: | ---: |{' --- |' * (1 + len(mine))}")
            print(*rows(model, mine, answers), "", *promises(model, mine, answers), "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
