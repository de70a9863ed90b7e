"""The CPU time of a capture, beside what `torch.export.export(strict=False)` takes for the same step.

    python benchmarks/capture.py [--models perceptron resnet18 gpt gpt2-xl] [--rounds 5] [--before ../before/src]

Both take turns in one process per model, the first round apart: it finds out what later ones know. Medians of CPU
seconds and of the ratios of each round. GPT has 4 layers of width 1024; GPT-2 XL is that of `transformers`; both are on
the meta device. ``--before`` names the sources of another checkout, whose captures are timed in a process of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

CASE = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch.nn import functional as F
from shardwright.compiler.capture.capture import capture

torch.set_num_threads(1)
name, rounds = sys.argv[1], int(sys.argv[2])


def classes(size, *shape):
    return torch.zeros(size, *shape), torch.zeros(size, dtype=torch.long)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def language(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


if name == "perceptron":
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    batch = classes(16, 64)
elif name == "resnet18":
    from shardwright.training.zoo import resnet18
    model, batch = resnet18(), classes(16, 3, 32, 32)
elif name == "mobilenet-v2":
    import transformers
    config = transformers.CONFIG_MAPPING["mobilenet_v2"](num_labels=10)
    model = transformers.AutoModelForImageClassification.from_config(config).train()
    batch = classes(4, 3, 64, 64)
    loss_fn = lambda model, batch: model(pixel_values=batch[0], labels=batch[1]).loss
else:
    torch.set_default_device("meta")
    words = torch.zeros(8, 1024, dtype=torch.long)
    batch = words, words
    if name == "gpt":
        from shardwright.training.zoo import GPT
        model, loss_fn = GPT(50304, width=1024, heads=16, layers=4, sequence_length=1024, dropout=0.1), language
    else:
        import transformers
        large = dict(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8,
        )
        kind, given = {
            "gpt2-xl": ("gpt2", dict(n_embd=1600, n_layer=48, n_head=25)), "llama3-8b": ("llama", large)
        }[name]
        config = transformers.CONFIG_MAPPING[kind](**given)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        loss_fn = lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss
    torch.set_default_device("cpu")


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, *batch):
        return loss_fn(self.model, batch)


def timed(function):
    start = time.process_time()
    function()
    return time.process_time() - start


step = Step()
found = []
for _ in range(rounds + 1):
    theirs = timed(lambda: torch.export.export(step, batch, strict=False))
    found.append([timed(lambda: capture(model, loss_fn, batch)), theirs])
print(json.dumps(found))
"""
ROOT = Path(__file__).parents[1]


def rounds_of(name: str, rounds: int, sources: Path) -> list[list[float]]:
    """The CPU seconds of ours and of theirs, round by round, the first one first."""
    command = [sys.executable, "-c", CASE, name, str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["perceptron", "resnet18", "gpt", "gpt2-xl"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="The sources of another checkout.")
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}")
    print("| model | sources | first, s | ours, s | torch.export, s | median ratio | lowest to highest |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for name in given.models:
        for label, sources in (("now", ROOT / "src"), ("before", given.before)):
            if sources is None:
                continue
            (first, _), *found = rounds_of(name, given.rounds, sources.resolve())
            ratios = sorted(ours / theirs for ours, theirs in found)
            print(
                f"| {name} | {label} | {first:.3f} | {median(o for o, _ in found):.3f} | "
                f"{median(t for _, t in found):.3f} | {median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
