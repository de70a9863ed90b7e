"""What batches are told apart by: whatever makes another graph, and nothing else."""

import pytest
import torch
from torch import nn

from shardwright.data.loading.batch import Batch
from shardwright.runtime.graphs.batch_key import Keys, look_at
from shardwright.runtime.graphs.captures import Captures

X = torch.ones(4, 3)
KINDS = [
    X, (X,), [X], {"x": X}, {"y": X}, (X, X), {"x": [X, X]}, X.double(), X[None], (X, 1), (X, 1.0), (X, True), (X, 0.0),
    (X, -0.0), (X, None), (X, "a"), {"x": X, "y": X}, {"y": X, "x": X},
]  # fmt: skip


def test_batches_look_as_different_as_their_keys():
    keys = Keys(Captures(nn.Linear(3, 2), lambda model, batch: 0, {}))
    captures = Captures(nn.Linear(3, 2), lambda model, batch: 0, {})
    for batch in (*KINDS, *KINDS):
        look = look_at(batch)
        assert look is not None
        assert keys.of("training", batch, look) == captures.key("training", batch)
    forms = [look_at(batch).form for batch in KINDS]
    assert len(set(forms)) == len(KINDS)
    assert look_at(Batch([X, X], global_size=9, start=0, stop=4)).form == look_at((X, X)).form


def test_a_key_follows_what_is_trained_and_autocast():
    captures = Captures(nn.Linear(3, 2), lambda model, batch: 0, {})
    keys = Keys(captures)
    before = keys.of("training", X, look_at(X))
    captures.module.bias.requires_grad_(False)
    frozen = keys.of("training", X, look_at(X))
    with torch.autocast("cpu", torch.bfloat16):
        cast = keys.of("training", X, look_at(X))
    assert len({before, frozen, cast, keys.of("evaluation", X, look_at(X))}) == 4


@pytest.mark.parametrize("batch", [X.numpy(), torch.ones(2, device="meta"), nn.Parameter(X), {"x": {1, 2}}])
def test_unusual_batches_are_looked_at_more_closely(batch):
    assert look_at(batch) is None
