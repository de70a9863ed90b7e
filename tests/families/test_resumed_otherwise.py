"""A mixture of experts goes on from what other stages, replicas and experts on devices have saved."""

import pytest
import torch
from exact_models import WORDS, mixture
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from whole import splitting_hardware

# On how many ranks each step is done, and by which mesh: each goes on from the one before.
WAYS = [
    (2, "pp=2"), (1, None), (2, "pp=2"), (4, "pp=4"), (2, "pp=2"), (2, "dp=2"), (2, "pp=2"), (2, "ep=2"), (2, "pp=2"),
    (4, "pp=2,ep=2"), (4, "pp=2,dp=2"),
]  # fmt: skip


def batch_of(step):
    words, labels = torch.randint(3, WORDS, (2, 4, 6), generator=torch.Generator().manual_seed(step))
    return words, labels.masked_fill(labels < 8, -100)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).logits.flatten(0, 1), batch[1].flatten())


def train(folder, mesh, first, last):
    """Go on from the checkpoint of step ``first``; the losses up to step ``last``, and the parameters then."""
    torch.set_num_threads(1)
    sw.init(backend="gloo")
    model = mixture("mixtral", layers=2)
    options = {"mode": "data", "mesh": mesh, "microbatches": 2 if "pp" in (mesh or "") else None}
    if "ep" in (mesh or ""):
        pins = {"*.mlp.experts": ((2, 1), (2, 1), (2, 1), (2, 1, 1, 1), (2, 1, 1))}
        options |= {"mode": "auto", "search": "propagation", "pins": pins}
    # On the usual hardware a single stage would do all that is small.
    parallel = sw.parallelize(model, loss_fn, batch_of(0), batch="global", hardware=splitting_hardware(), **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    if first:
        assert sw.checkpoint.load(folder, parallel, optimizer).step == first
    losses = []
    for step in range(first, last):
        loss = parallel(batch_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sw.checkpoint.save(folder, parallel, optimizer, step=last)
    return losses, parallel.full_state_dict()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_step_by_other_ranks_is_that_of_one_device(tmp_path):
    [(expected, state)] = run_ranks(1, train, tmp_path / "alone", None, 0, len(WAYS), timeout=400)
    for step, (ranks, mesh) in enumerate(WAYS):
        for [loss], held in run_ranks(ranks, train, tmp_path / "run", mesh, step, step + 1, timeout=400):
            assert loss == pytest.approx(expected[step], rel=0, abs=1e-10), f"{WAYS[step]} after {WAYS[step - 1]}"
            last = held
    torch.testing.assert_close(dict(last), dict(state), atol=1e-9, rtol=0)
