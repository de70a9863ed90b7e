"""Models of transformers at their published sizes, captured and planned on the meta device, on this machine alone.

    python benchmarks/plan_models.py [--models gpt2-xl ...] [--layers 2] [--dtype bfloat16] [--mesh 8 8,8]
        [--search exact] [--memory 80GiB]

The global batch has 192 rows, which 8, 64 and 6 devices divide, at the prices of H100s; AdamW holds its states, and
``--memory`` is what each device may hold. *Holds* is what it does. Each case runs in a process of its own; *capture*
and *search* are seconds of the processor, which other programs lengthen less. *Alike* is what the step would take less
if no device computed what another one does too, as a share of it.
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
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROWS = 192
ROOT = Path(__file__).parents[1]
Batch = dict[str, Any]


def _words(length: int) -> Callable[[], Batch]:
    def batch() -> Batch:
        import torch

        ids = torch.zeros(ROWS, length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    return batch


def _pixels() -> Batch:
    import torch

    return {"pixel_values": torch.zeros(ROWS, 3, 224, 224), "labels": torch.zeros(ROWS, dtype=torch.long)}


# By name: the class, its configuration where it is not the usual one, and a batch.
MODELS: Mapping[str, tuple[str, dict[str, Any], Callable[[], Batch]]] = {
    "gpt2-xl": ("GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, _words(1024)),
    "llama-3-8b": (
        "LlamaForCausalLM",
        {
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        },
        _words(1024),
    ),
    "bert-large": (
        "BertForMaskedLM",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        _words(512),
    ),
    "vit-large": (
        "ViTForImageClassification",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
         "num_labels": 1000},
        _pixels,
    ),
    "t5-3b": (
        "T5ForConditionalGeneration",
        {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32,
         "decoder_start_token_id": 0, "pad_token_id": 0},
        _words(512),
    ),
    "resnet-152": (
        "ResNetForImageClassification",
        {"depths": [3, 8, 36, 3], "layer_type": "bottleneck", "num_labels": 1000},
        _pixels,
    ),
    "mixtral-8x7b": (
        "MixtralForCausalLM",
        {
            "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        _words(1024),
    ),
}  # fmt: skip


def _loss(model: Any, batch: Batch) -> Any:
    return model(**batch).loss


# What configurations call the number of layers.
DEPTHS = ("n_layer", "num_hidden_layers", "num_layers")


def captured(name: str, layers: int | None = None, dtype: str = "float32") -> Any:
    """The graph of a step of the model, without memory for any of its numbers; of so many layers, or all of them."""
    import torch
    import transformers

    from shardwright.compiler.capture.step import captured_step

    kind, given, batch = MODELS[name]
    cls = getattr(transformers, kind)
    if layers is not None:
        given = {**given, **{key: layers for key in DEPTHS if key in given}}
        given |= {"depths": [layers] * len(given["depths"])} if "depths" in given else {}
    config = cls.config_class(**given)
    config.use_cache = False
    kept = getattr(torch, dtype)
    with torch.device("meta"):
        given = {key: tensor.to(kept) if tensor.is_floating_point() else tensor for key, tensor in batch().items()}
        return captured_step(cls(config).to(kept), _loss, given, {})


def one_case(
    name: str, layers: int | None, mesh: str, search: str, memory: str | None, dtype: str = "float32"
) -> dict[str, float]:
    """What one case takes, in this process."""
    from shardwright.compiler.mesh.mesh import Mesh
    from shardwright.compiler.plan.make import make_plan
    from shardwright.compiler.plan.pricing.hardware import read_hardware
    from shardwright.compiler.plan.request import PlanRequest, read_memory
    from shardwright.compiler.report.plans.summary import plan_summary

    start = time.process_time()
    capture = captured(name, layers, dtype)
    capture_s = time.process_time() - start
    axes = Mesh.of(**{f"a{i}": int(size) for i, size in enumerate(mesh.split(","))})
    hardware = read_hardware("h100")
    start = time.process_time()
    limit = None if memory is None else read_memory(memory)
    plan = make_plan(capture, PlanRequest(axes, "auto", search, "split", hardware, memory=limit))  # type: ignore[arg-type]
    search_s = time.process_time() - start
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    summary = plan_summary(plan, hardware)
    assert summary.certificate is not None
    return {
        "operators": len(capture.nodes),
        "capture_s": capture_s,
        "search_s": search_s,
        "peak_gib": peak_gib,
        "step_s": summary.step_s,
        "gap": summary.certificate.gap,
        "alike": summary.replicated_s / summary.step_s,
        "holds_gib": plan.held.total / 2**30,
        "without_rule": len(plan.graph.unlisted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--layers", type=int, help="So many of each model, in place of all.")
    parser.add_argument("--dtype", default="float32", help="Of the parameters and of what is computed.")
    parser.add_argument("--mesh", nargs="+", default=["8", "8,8", "6"])
    parser.add_argument("--search", default="exact")
    parser.add_argument("--memory")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        warnings.simplefilter("ignore")
        case = given.models[0], given.layers, given.mesh[0], given.search, given.memory, given.dtype
        print(json.dumps(one_case(*case)))
        return
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        parser.error(f"{sys.executable} has no {' and no '.join(missing)}; type: make setup && . .venv/bin/activate")
    columns = [
        "model",
        "mesh",
        "operators",
        "capture, s",
        "search, s",
        "peak, GiB",
        "step, ms",
        "gap",
        "holds, GiB",
        "alike",
        "no rule",
    ]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for name in given.models:
        for mesh in given.mesh:
            command = [sys.executable, __file__, "--case", "--models", name, "--mesh", mesh, "--search", given.search]
            command += ["--dtype", given.dtype, *(["--memory", given.memory] if given.memory else [])]
            command += ["--layers", str(given.layers)] if given.layers else []
            done = subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}
            )
            head = f"| {name} | {mesh.replace(',', '×')} |"
            if done.returncode:
                print(head, done.stderr.strip().splitlines()[-1][:200], "|", flush=True)
                continue
            of = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{head} {of['operators']:,} | {of['capture_s']:.1f} | {of['search_s']:.2f} | {of['peak_gib']:.2f} | "
                f"{of['step_s'] * 1e3:.1f} | {of['gap']:.3%} | {of['holds_gib']:.1f} | "
                f"{of['alike']:.2%} | {of['without_rule']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
