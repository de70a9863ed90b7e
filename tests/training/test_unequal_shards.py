"""Loaders over shards of unequal length are named as what they are, wherever the shorter one ends."""

import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import UsageError


def batches(count):
    return [torch.ones(1, 2) for _ in range(count)]


def branching(model, x):
    y = model(x)
    return (y if float(y.detach().sum()) > 1e9 else y * 1).square().mean()  # what cannot be captured


def refusal(backend, what, mode):
    """What a run says of which rank 1 has fewer batches, and how often rank 0 has stepped."""
    torch.set_num_threads(1)
    world = sw.init(backend)
    sw.set_seed(1)
    more, fewer = (4, 2) if what == "accumulating" else (3, 2)
    own = batches(fewer if world.rank else more)
    parallel = sw.parallelize(
        nn.Linear(2, 2), branching if mode == "fallback" else lambda m, x: m(x).square().mean(), own[0],
        "data" if mode == "fallback" else mode, batch="local",
    )  # fmt: skip
    accumulate = 2 if what == "accumulating" else 1
    trainer = sw.Trainer(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), accumulate=accumulate)
    try:
        if what == "evaluating":
            trainer.fit(batches(2), validate=own)
        else:
            trainer.fit(own, epochs=2)
    except UsageError as error:
        return str(error), trainer.steps


@pytest.mark.filterwarnings("ignore::shardwright.runtime.parallel.EagerFallback")
@pytest.mark.parametrize(
    ("backend", "what", "mode"),
    [
        ("gloo", "accumulating", "data"),
        ("shm", "evaluating", "auto"),
        ("shm", "training", "fallback"),
        *(pytest.param(backend, "training", "data", marks=pytest.mark.slow) for backend in ("gloo", "shm")),
    ],
)
def test_the_rank_that_has_no_more_batches_is_named(backend, what, mode):
    (said, _), (also, steps) = run_ranks(2, refusal, backend, what, mode)
    assert said == also
    assert "the model alike: rank 0 makes another, rank 1 has no more batches after " in said
    assert "(drop_last=True in loaders of unequal length, or take batches from sw.loader)" in said
    assert steps == (1 if what == "accumulating" else 2)
