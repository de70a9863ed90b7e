"""The promise, with real processes: any number of ranks under any plan gives what one device gives."""

import pytest
import torch

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks


def train(name, rows, mode, options, steps=5, dtype=torch.float64, lr=1e-2):
    """Losses, gradients of the last step, parameters and buffers after some AdamW steps."""
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    world = sw.init()
    sw.set_seed(1)
    make, loss_fn, batch_of = NETWORKS[name]
    model = make()
    parallel = sw.parallelize(model, loss_fn, batch_of(rows), mode, batch="global", **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        result = parallel(batch_of(rows, seed=step))
        loss = result[0] if isinstance(result, tuple) else result
        optimizer.zero_grad()
        loss.backward()
        gradients = {n: full(p.grad) for n, p in parallel.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    assert world.size == parallel.plan.mesh.size
    return losses, gradients, {n: t.clone() for n, t in parallel.full_state_dict().items()}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def deviation(ours, reference):
    """The design's measure: against the largest entry of the tensor, or of its kind in the model."""
    largest = max(float(t.abs().max()) for t in reference.values() if t.is_floating_point())
    return max(
        float((ours[n].double() - t.double()).abs().max()) / max(largest, float(t.abs().max()), 1e-300)
        for n, t in reference.items()
    )


@pytest.fixture(scope="module")
def reference():
    found = {}

    def get(name, rows):
        if (name, rows) not in found:
            [found[name, rows]] = run_ranks(1, train, name, rows, "single", {})
        return found[name, rows]

    return get


CASES = [
    ("perceptron", 2, "data", {}),
    ("perceptron", 6, "auto", {}),
    ("perceptron", 8, "auto", {"search": "propagation"}),
    ("resnet", 3, "data", {}),
    ("resnet", 4, "auto", {"search": "propagation"}),
    ("transformer", 2, "auto", {}),
    ("transformer", 4, "data", {}),
    ("transformer", 4, "auto", {"mesh": "dp=2,tp=2", "search": "propagation"}),
]


@pytest.mark.parametrize(("name", "ranks", "mode", "options"), CASES)
def test_any_plan_gives_what_one_device_gives(name, ranks, mode, options, reference):
    losses, gradients, state = reference(name, 24)
    for theirs in run_ranks(ranks, train, name, 24, mode, options, timeout=110):
        assert theirs[0] == pytest.approx(losses, rel=1e-10)
        assert deviation(theirs[1], gradients) < 1e-10
        assert deviation(theirs[2], state) < 1e-10
