"""Accumulated batches of different sizes, whose plans reduce gradients differently, give one device's gradients."""

import pytest
import torch

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks

SIZES = [(4, 4), (4, 1), (1, 4), (4, 1, 2), (1, 1), (4, 4, 1)]


def gradients(network, mode, options):
    """For each of the sizes, twice in a row, what the backwards leave."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(3)
    make, loss_fn, batch_of = NETWORKS[network]
    parallel = sw.parallelize(make(), loss_fn, batch_of(4), mode, batch="global", **options)
    found = []
    for sizes in SIZES * 2:
        for parameter in parallel.parameters():
            parameter.grad = None
        for at, rows in enumerate(sizes):
            batch = batch_of(rows, at)
            if at < len(sizes) - 1:
                with parallel.accumulate():
                    result = parallel(batch)
                    (result[0] if isinstance(result, tuple) else result).backward()
            else:
                result = parallel(batch)
                (result[0] if isinstance(result, tuple) else result).backward()
        whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parallel.parameters()]
        found.append([gradient.clone() for gradient in whole])
    return found


TENSOR = ("semi-auto", {"pins": {"layers.0": ((1, 1), (2, 1), None)}, "mesh": "tp=2"})


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        pytest.param(3, ("data", {}), id="data", marks=pytest.mark.slow),
        pytest.param(2, TENSOR, id="tensor", marks=pytest.mark.slow),
    ],
)
def test_the_last_batch_may_be_of_another_plan(ranks, how):
    [expected] = run_ranks(1, gradients, "perceptron", "single", {})
    for theirs in run_ranks(ranks, gradients, "perceptron", *how):
        for sizes, ours, other in zip(SIZES * 2, expected, theirs, strict=True):
            for a, b in zip(ours, other, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12, msg=lambda m, s=sizes: f"{s}: {m}")
