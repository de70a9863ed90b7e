"""Models of transformers at their published sizes, captured and planned on the meta device, on this machine alone.

    python benchmarks/plan_models.py [--only llama_8b ...] [--devices 64 1024 | --mesh 8 8,8] [--memory 80GiB]
        [--dtype float32] [--batch 192] [--layers 2] [--search exact] [--stages]

Each model trains with AdamW, in bfloat16 unless ``--dtype`` says otherwise, at the prices of H100s, 8 on a host.
``--devices N`` searches all meshes, as `shardwright plan --devices N` does; ``--mesh`` names one, by the sizes of its
axes. With ``--stages`` pipelines are looked for, too, as `--mesh pp=auto` does. ``--memory`` is what each device may
hold; *holds* is what it does. Each case runs in a process of its own, whose peak is *peak*. *Planning* is seconds on
the clock and *processor* those of all cores, which other programs lengthen less. *MFU* counts the flops of forward
and backward, without recomputation, at the peak of the data sheet. *Alike* is what the step would take less if no
device computed what another one does too, as a share of it.

The last line has the longest planning and the largest gap of all cases.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Published:
    """A class of transformers, its configuration where it is not the usual one, and the global batch.

    Args:
        length: tokens of a row; 0 where a row is an image.
    """

    kind: str
    rows: int
    length: int
    config: Mapping[str, Any]

    def batch(self, rows: int | None) -> dict[str, Any]:
        """Return a global batch of so many rows, or of as many as usual."""
        import torch

        rows = rows or self.rows
        if not self.length:
            return {"pixel_values": torch.zeros(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.long)}
        ids = torch.zeros(rows, self.length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    @property
    def filled(self) -> frozenset[tuple[int, int]]:
        """What is known of a batch on the meta device: the mask, its second tensor, hides nothing."""
        return frozenset([(1, 1)] if self.length else [])


def _llama(rows: int, length: int, width: int, hidden: int, layers: int, heads: int) -> Published:
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8}
    config = {"vocab_size": 128256, "max_position_embeddings": 131072, **sizes}
    return Published("LlamaForCausalLM", rows, length, config)


def _encoder(layers: int, **more: int) -> dict[str, int]:
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    return {**sizes, "num_hidden_layers": layers, **more}


MODELS: Mapping[str, Published] = {
    "llama_8b": _llama(64, 2048, 4096, 14336, 32, 32),
    "llama_8b_128k": _llama(1, 131072, 4096, 14336, 32, 32),
    "llama_70b": _llama(256, 4096, 8192, 28672, 80, 64),
    "llama_405b": _llama(1024, 4096, 16384, 53248, 126, 128),
    "mixtral_8x7b": Published("MixtralForCausalLM", 64, 2048, {"num_hidden_layers": 32}),
    "mixtral_8x22b": Published(
        "MixtralForCausalLM", 64, 4096,
        {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48,
         "num_key_value_heads": 8, "vocab_size": 32768},
    ),
    "t5_3b": Published(
        "T5ForConditionalGeneration", 192, 512,
        {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32,
         "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "gpt2_xl": Published("GPT2LMHeadModel", 192, 1024, {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "bert_l": Published("BertForMaskedLM", 192, 512, _encoder(24)),
    "vit_l": Published("ViTForImageClassification", 1024, 0, _encoder(24, num_labels=1000)),
    "resnet_152": Published(
        "ResNetForImageClassification", 1024, 0,
        {"depths": [3, 8, 36, 3], "layer_type": "bottleneck", "num_labels": 1000},
    ),
}  # fmt: skip


def _loss(model: Any, batch: dict[str, Any]) -> Any:
    return model(**batch).loss


# What configurations call the number of layers.
DEPTHS = ("n_layer", "num_hidden_layers", "num_layers")


@dataclass(frozen=True)
class Case:
    """A model and how it is planned: on all meshes of so many devices, or on one; None is the usual."""

    model: str
    devices: int | None = None
    mesh: str | None = None
    memory: str | None = None
    dtype: str = "bfloat16"
    batch: int | None = None
    layers: int | None = None
    search: str | None = None
    stages: bool = False


def captured(case: Case) -> Any:
    """Return the graph of a step of the model, without memory for any of its numbers."""
    import torch
    import transformers

    from shardwright.compiler.capture.step import captured_step

    published = MODELS[case.model]
    cls = getattr(transformers, published.kind)
    given = dict(published.config)
    if case.layers is not None:
        given |= {key: case.layers for key in DEPTHS if key in given}
        given |= {"depths": [case.layers] * len(given["depths"])} if "depths" in given else {}
    config = cls.config_class(**given)
    config.use_cache = False
    dtype = getattr(torch, case.dtype)
    with torch.device("meta"):
        batch = published.batch(case.batch)
        batch = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in batch.items()}
        model = cls(config).to(dtype).train()
    return captured_step(model, _loss, batch, {}, filled=published.filled)


def planned(case: Case) -> dict[str, Any]:
    """Return the figures of one case, in this process."""
    import transformers  # noqa: F401  # whose import is no part of a capture

    from shardwright.compiler.capture import step  # noqa: F401
    from shardwright.compiler.mesh.mesh import Mesh
    from shardwright.compiler.plan.make import make_plan
    from shardwright.compiler.plan.pricing.hardware import read_hardware
    from shardwright.compiler.plan.request import PlanRequest, read_memory
    from shardwright.compiler.report.plans.summary import plan_summary

    start = time.perf_counter()
    capture = captured(case)
    capture_s = time.perf_counter() - start
    sizes = case.mesh.split(",") if case.mesh else [str(case.devices)]
    mesh = (
        Mesh.of(**{f"a{i}": int(size) for i, size in enumerate(sizes)}) if case.mesh else Mesh.of(ranks=int(sizes[0]))
    )
    hardware, limit = read_hardware("h100"), None if case.memory is None else read_memory(case.memory)
    request = PlanRequest(
        mesh,
        "auto",
        case.search,
        "split",
        hardware,
        memory=limit,
        search_stages=case.stages,  # type: ignore[arg-type]
    )
    start, processor_start = time.perf_counter(), time.process_time()
    plan = make_plan(capture, request)
    planning_s, processor_s = time.perf_counter() - start, time.process_time() - processor_start
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    summary = plan_summary(plan, hardware)
    done = summary.throughput
    return {
        "mesh": str(plan.shown_mesh),
        "operators": len(capture.nodes),
        "capture_s": capture_s,
        "planning_s": planning_s,
        "processor_s": processor_s,
        "peak_gib": peak_gib,
        "step_s": summary.step_s,
        "per_s": done.tokens_s or done.rows_s,
        "devices": summary.devices,
        "mfu": done.utilisation,
        "gap": plan.gap,
        "alike": summary.replicated_s / summary.step_s,
        "holds_gib": plan.held.total / 2**30,
        "without_rule": len(plan.graph.unlisted),
        "tried": [str(tried) for tried in plan.tried],
    }


COLUMNS = (
    "model", "mesh", "operators", "capture, s", "planning, s", "processor, s", "peak, GiB", "gap", "step, ms",
    "tokens/s or images/s", "a device", "MFU", "holds, GiB", "alike", "no rule",
)  # fmt: skip


def _row(name: str, of: Mapping[str, Any]) -> str:
    gap = "–" if of["gap"] is None else f"{of['gap']:.2%}"
    cells = [
        name, of["mesh"], f"{of['operators']:,}", f"{of['capture_s']:.1f}", f"{of['planning_s']:.1f}",
        f"{of['processor_s']:.1f}", f"{of['peak_gib']:.2f}", gap, f"{of['step_s'] * 1e3:.1f}",
        f"{of['per_s']:,.0f}", f"{of['per_s'] / of['devices']:,.0f}", f"{of['mfu']:.1%}", f"{of['holds_gib']:.1f}",
        f"{of['alike']:.2%}", str(of["without_rule"]),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _in_own_process(case: Case) -> dict[str, Any] | str:
    """Return the figures of a case, or the last line of what it said where it failed."""
    done = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps(asdict(case))],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _cases(given: argparse.Namespace) -> list[Case]:
    alike = {field.name: getattr(given, field.name) for field in fields(Case) if hasattr(given, field.name)}
    wheres = [{"mesh": mesh, "devices": None} for mesh in given.mesh or []]
    wheres += [{"devices": devices, "mesh": None} for devices in given.devices or ([] if given.mesh else [8, 64])]
    return [Case(**{**alike, **where, "model": name}) for name in given.only for where in wheres]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS), help="Without it, all.")
    parser.add_argument("--devices", nargs="+", type=int, help="How many; all meshes are searched. Usually 8 and 64.")
    parser.add_argument("--mesh", nargs="+", help="The sizes of the axes of the one mesh that is searched.")
    parser.add_argument("--memory", help="How much each device may hold.")
    parser.add_argument("--dtype", default="bfloat16", help="Of the parameters and of what is computed.")
    parser.add_argument("--batch", type=int, help="Rows of the global batch, in place of the usual ones.")
    parser.add_argument("--layers", type=int, help="So many of each model, in place of all.")
    parser.add_argument("--stages", action="store_true", help="Look for the quickest number of pipeline stages, too.")
    parser.add_argument("--search", help="In place of the usual one.")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = _parser()
    given = parser.parse_args()
    if given.case:
        warnings.simplefilter("ignore")
        print(json.dumps(planned(Case(**json.loads(given.case)))))
        return
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        parser.error(f"{sys.executable} has no {' and no '.join(missing)}; type: make setup && . .venv/bin/activate")
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    found = []
    for case in _cases(given):
        of = _in_own_process(case)
        if isinstance(of, str):
            print(f"| {case.model} | {case.mesh or case.devices} | {of[:300]} |", flush=True)
            continue
        found.append(of)
        print(_row(case.model, of), flush=True)
        print(*(f"  {tried}\n" for tried in of["tried"]), sep="", end="", flush=True)
    if not found:
        sys.exit("no case has a plan")
    planning_s, gaps = max(of["planning_s"] for of in found), [of["gap"] for of in found]
    print(f"planning {planning_s:.1f} s, gap {'unknown' if None in gaps else f'{100 * max(gaps):.2f} %'}")


if __name__ == "__main__":
    main()
