"""The promise with real processes: 2 to 8 ranks under every kind of plan, AdamW steps, float64 and float32.

`sw.verify` measures loss, gradients, buffers and parameters against one device; a sample here, each network under each
kind of plan in the slow suite. float32 runs in the same breath, by the tolerances that
`shardwright.runtime.verification.verify` states.
"""

import pytest
import torch

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from rows import slow

RANKS = (2, 3, 4, 6, 8)
PLANS = ("data", "auto", "propagation", "tensor", "grid")


def pins_of(network, n):
    """Megatron's split: one operator over its outputs, the next over its inputs."""
    return {
        "perceptron": {"layers.0": ((1, 1), (n, 1), None), "layers.2": ((1, n), (1, n), None)},
        "resnet": {"blocks.1.conv1": ((1, 1, 1, 1), (n, 1, 1, 1)), "blocks.1.conv2": ((1, n, 1, 1), (1, n, 1, 1))},
        "transformer": {"layers.*.up": ((1, 1, 1), (n, 1), None), "layers.*.down": ((1, 1, n), (1, n), None)},
    }[network]


def options_of(network, ranks, plan):
    if plan == "tensor":
        return {"mode": "semi-auto", "mesh": f"tp={ranks}", "pins": pins_of(network, ranks)}
    if plan == "grid":
        return {"mode": "semi-auto", "mesh": f"dp=2,tp={ranks // 2}", "pins": pins_of(network, ranks // 2)}
    return {"mode": "auto", "search": "propagation"} if plan == "propagation" else {"mode": plan}


def verified(network, rows, options, steps):
    torch.set_num_threads(1)
    sw.init()
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS[network]
    found = sw.verify(make(), loss_fn, [batch_of(rows, seed) for seed in range(steps)], steps=steps, **options)
    return found.ok, str(found)


# Each network under each kind of plan, on other numbers of ranks in turn.
ALL = [
    (network, 4 + 2 * (at % 3) if plan == "grid" else RANKS[(2 * at + step) % len(RANKS)], plan)
    for at, network in enumerate(NETWORKS)
    for step, plan in enumerate(PLANS)
]
# With given strategies; test_parallel.py has what a search splits.
SAMPLE = [("perceptron", 2, "tensor")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("network", "ranks", "plan"), [*SAMPLE, *slow(*ALL)])
def test_n_devices_give_what_one_device_gives(network, ranks, plan):
    steps = 2 if (network, ranks, plan) in SAMPLE else 5
    for ok, table in run_ranks(ranks, verified, network, 24, options_of(network, ranks, plan), steps, timeout=280):
        assert ok, table
