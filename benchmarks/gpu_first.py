"""The first ten minutes on a GPU: what no test on CPUs can see, step by step, each with a limit of its own.

    python benchmarks/gpu_first.py [--minutes 10] [--only steady,masks] [--json gpu_first.json]
    python benchmarks/gpu_first.py --device cpu --quick       # the script itself, where there is no GPU

A step that fails or takes too long is told, and the next one begins. At the end stands a table, and all that was found
in the file of ``--json``; both belong into `RESULTS.md`. Nothing needs to be installed but what Shardwright imports:
the steps take it from ``../src``. Steps for several ranks run on one GPU by gloo, and by NCCL where there
are two of them: it lets no two ranks share one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
ONE, SEVERAL = HERE / "gpu_first_steps.py", HERE / "gpu_first_ranks.py"
Where = Literal["anywhere", "GPU", "two GPUs"]


@dataclass(frozen=True)
class Step:
    """Something to try: ``what`` says what passes, ``limit_s`` when it is given up.

    ``ranks`` of 0 is a process without a launcher. ``words`` stand before the script on the launcher's command line,
    and ``ends_with`` is the exit code that the step is to have.
    """

    name: str
    what: str
    limit_s: int
    where: Where = "anywhere"
    ranks: int = 0
    backend: str = ""
    words: tuple[str, ...] = ()
    ends_with: int = 0
    function: str = ""


# In the order of what a first user would meet; the figures last.
STEPS = (
    Step("machine", "versions, devices and links are read", 60),
    Step("clean exit", "import, fork, init, one collective, end with code 0", 60, ranks=1, function="clean_exit"),
    Step("numbers", "perceptron, transformer and ResNet lose in three steps what plain PyTorch loses", 90),
    Step("against the CPU", "the same three models, in float64, beside the CPU", 60, "GPU"),
    Step("bf16", "training under autocast in bf16 is captured, and loses what plain PyTorch loses", 60),
    Step("fp16", "the same in fp16 with a scaler", 60, "GPU"),
    Step("masks", "random numbers by position are the same bits on CPU and GPU", 30, "GPU"),
    Step("attention", "attention with dropout: the numbers of the CPU, and no memory for all scores", 60),
    Step("optimizer", "optimizers with fused=True: the numbers of torch's loops, and the time of both", 60),
    Step("vocabulary", "the loss of a large vocabulary: the numbers of a whole cast, memory and time", 60),
    Step("batch norm", "batch norm of all ranks by kernels: the numbers of operators, and the time of both", 60),
    Step("steady", "steady steps wait for the GPU nowhere (set_sync_debug_mode)", 60, "GPU"),
    Step("profile", "kernels, copies and busy time of a step beside plain PyTorch", 60, "GPU"),
    Step("saves", "an asynchronous save while steps overwrite what it saves", 60),
    Step("pinned", "memory for saves is pinned at its size, and copied to while the GPU works", 60, "GPU"),
    Step("meta", "a model on the meta device is made on the device, tensor by tensor", 60),
    *(
        Step(f"two ranks, {name}", what, 90, where, 2, backend, function="two_ranks")
        for name, what, where, backend in (
            ("gloo", "two ranks on one device by gloo: data, tensor parallel, global batch norm, accumulation, "
             "clipping, a loader with a plan", "anywhere", "gloo"),
            ("NCCL", "the same with a GPU for each", "two GPUs", "nccl"),
        )
    ),
    *(
        Step(f"split parameters, {ranks} ranks by {name}",
             "bf16, parameters within a budget, recomputation, saves of every rank, compiled", limit_s, where, ranks,
             backend, function="split_parameters")
        for ranks, name, limit_s, where, backend in (
            (2, "gloo", 150, "anywhere", "gloo"), (4, "gloo", 180, "anywhere", "gloo"),
            (2, "NCCL", 150, "two GPUs", "nccl"),
        )
    ),
    *(
        Step(f"groups, {name}", "groups that some ranks make, and groups that are made while steps run", 60, where, 2,
             backend, function="groups")
        for name, where, backend in (("gloo", "anywhere", "gloo"), ("NCCL", "two GPUs", "nccl"))
    ),
    *(
        Step(f"ids and dtypes, {name}", "ids out of range in a split table end no process; every dtype travels", 60,
             where, 2, backend, function="ids_and_dtypes")
        for name, where, backend in (("gloo", "anywhere", "gloo"), ("NCCL", "two GPUs", "nccl"))
    ),
    *(
        Step(f"stall, {name}", "a rank that sleeps is named, with the collective in which the other waits", 60, where,
             2, backend, ("--stall-timeout", "20"), 124, "stalling")
        for name, where, backend in (("gloo", "anywhere", "gloo"), ("NCCL", "two GPUs", "nccl"))
    ),
    Step("profile of a device", "products, copies and launches, beside the shipped profile", 60),
    Step("profile of links", "all-reduces between two GPUs, beside the shipped profile", 90, "two GPUs", 2, "nccl",
         function="links"),
    Step("speed of a transformer", "bf16 on one device: at most 1.03 of plain PyTorch; both compiled", 240),
    Step("speed of a Llama", "the same for a model of transformers, where that is installed", 240),
    Step("speed of ResNet-50", "the same for images", 180),
)  # fmt: skip


@dataclass
class Outcome:
    """How a step ended: "passed", "failed", "too slow", or why it did not begin; ``found`` is what it tells."""

    name: str
    ended: str
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)
    said: str = ""  # the end of what a failed one printed


def missing(step: Step, gpus: int, left_s: float) -> str:
    """Why a step cannot begin, "" where it can."""
    wanted = {"anywhere": 0, "GPU": 1, "two GPUs": 2}[step.where]
    if gpus < wanted:
        return f"needs {'a GPU' if wanted == 1 else 'two GPUs'}"
    return "" if left_s > 5 else "no time left"


def command(step: Step, device: str, quick: bool, answer: str) -> list[str]:
    """What runs a step, which writes what it finds to the file ``answer``."""
    words = [step.function or step.name, device, "quick" if quick else "whole", answer]
    if not step.ranks:
        return [sys.executable, str(ONE), *words]
    launched = [sys.executable, "-m", "shardwright", "launch", "-n", str(step.ranks), "--tee", "all"]
    backend = ["--backend", step.backend] if step.backend else []
    return [*launched, *backend, *step.words, str(SEVERAL), *words]


def run(step: Step, device: str, quick: bool, limit_s: float) -> Outcome:
    """Run a step to its end, or to the limit, when it is ended with all that it started."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        path = os.pathsep.join(filter(None, (str(HERE.parent / "src"), os.environ.get("PYTHONPATH"))))
        variables = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": folder}
        variables |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        start = time.monotonic()
        process = subprocess.Popen(
            command(step, device, quick, str(answer)), cwd=folder, env=variables, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit_s)
            ended = "passed" if process.returncode == step.ends_with else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            said, ended = _after_term(process), "too slow"
        found = json.loads(answer.read_text()) if answer.exists() else {}
    seconds = time.monotonic() - start
    if ended == "passed" and step.ends_with:
        ended, found = _told(said)
    return Outcome(step.name, ended, round(seconds, 1), found, "" if ended == "passed" else said[-2000:])


def _after_term(process: subprocess.Popen[str]) -> str:
    """What a process that was asked to end has printed; it is killed where it does not."""
    try:
        return process.communicate(timeout=15)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def _told(said: str) -> tuple[str, dict[str, Any]]:
    """Whether the report of a stall names the rank that sleeps, and what it says."""
    verdicts = (line.strip() for line in said.splitlines() if "for 20 s: rank 1 is in " in line)
    lines = [line for line in verdicts if "in stalling" in line and " of step 6 for the loss" in line]
    return ("passed", {"verdict": lines[0]}) if lines else ("failed", {})


def gpus_here(device: str) -> int:
    """How many GPUs torch sees, asked of a process of its own; none where another device was asked for."""
    if device != "cuda":
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return int(done.stdout or 0)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as they stand in RESULTS.md."""
    rows = [f"| {o.name} | {o.ended} | {o.seconds:g} | {_short(o)} |" for o in outcomes]
    return "\n".join(["| step | ended | s | found |", "| --- | --- | ---: | --- |", *rows])


def _short(outcome: Outcome) -> str:
    if outcome.said:
        lines = [line for line in outcome.said.splitlines() if line.strip()]
        return lines[-1].strip()[:160].replace("|", "/") if lines else ""
    return ", ".join(f"{name} {value}" for name, value in outcome.found.items())[:240].replace("|", "/")


def chosen(only: str) -> list[Step]:
    """The steps whose names begin with one of some words, all where there are none."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    steps = [step for step in STEPS if not words or any(step.name.startswith(word) for word in words)]
    if not steps:
        raise SystemExit(f"no step begins with {only!r}; the steps are {', '.join(step.name for step in STEPS)}")
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="small models and few steps: tries the script, not the GPU"
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--limits", type=float, default=1.0, help="times the limits of the steps, for a busy machine")
    parser.add_argument("--only", default="", help="names of steps, or how they begin, with commas between")
    parser.add_argument("--json", default="gpu_first.json")
    options = parser.parse_args()
    end, gpus, outcomes = time.monotonic() + 60 * options.minutes, gpus_here(options.device), []
    if options.device == "cuda" and not gpus:
        raise SystemExit("torch sees no GPU here; type --device cpu --quick to try the script itself")
    for step in chosen(options.only):
        left_s = end - time.monotonic()
        why = missing(step, gpus, left_s)
        limit_s = min(step.limit_s * options.limits, left_s)
        outcome = Outcome(step.name, why) if why else run(step, options.device, options.quick, limit_s)
        outcomes.append(outcome)
        print(f"{outcome.name}: {outcome.ended}, {outcome.seconds:g} s {_short(outcome)}", flush=True)
        Path(options.json).write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print(f"\n{table(outcomes)}")
    if any(outcome.ended in ("failed", "too slow") for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
