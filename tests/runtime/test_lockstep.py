"""Ranks that do not pass the same batches, or not as many, are told so: all of them, and before long."""

import gc
import os
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import free_port, run_ranks
from shardwright.distributed.lockstep import Lockstep
from shardwright.errors import ShardwrightError


class Mean(nn.Module):
    temperature = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x.mean(1)).square() / self.temperature


class Looking(Mean):
    def forward(self, x):
        return super().forward(x) if x.isfinite().all() else x


def loss_of(model, x):
    return model(x).mean()


def batch_of(rows, length=3):
    return torch.ones(rows, length, 4)


def shorter(parallel, rank):
    parallel(batch_of(8 - 2 * rank)).backward()


def of_two_sizes(parallel, rank):
    parallel(batch_of(4 + 4 * rank)).backward()


def of_two_lengths(parallel, rank):
    parallel(batch_of(4, 3 + rank)).backward()


def to_predict(parallel, rank):
    parallel(batch_of(4)) if rank else parallel.eval()(batch_of(4))


def fewer(parallel, rank):
    parallel.close() if rank else parallel(batch_of(8)).backward()


def no_tensor(parallel, rank):
    parallel([batch_of(8), batch_of(8).numpy()][rank])


def of_two_values(parallel, rank):
    parallel.module.temperature = 1.0 + rank
    parallel(batch_of(8)).backward()


def said(do):
    try:
        return str(do())
    except (ShardwrightError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def odd(how, batch, model):
    warnings.simplefilter("ignore")
    rank = sw.init().rank
    sw.set_seed(0)
    parallel = sw.parallelize(model(), loss_of, batch_of(8), "data", batch=batch)
    for _ in range(2):
        for rows in (4, 8):  # both sizes are known
            parallel(batch_of(rows)).backward()
    return said(lambda: how(parallel, rank))


ALIKE = "UsageError: ranks do not come to call 5 of the model alike: rank 0 passes a batch of float32[8, 3, 4], rank 1 "
SIZES = "UsageError: every rank passes the same whole batch, or its part of the same, but rank 0's has 4 samples and"
PARTS = "UsageError: the parts of the batch do not fit together: rank 0 passed float32[4, 3, 4], rank 1 passed "
CASES = [
    (shorter, "global", Mean, f"{ALIKE}passes a batch of float32[6, 3, 4]; all ranks must"),
    (of_two_values, "global", Mean, f"{ALIKE}passes a batch of float32[8, 3, 4] with model.temperature = 2.0;"),
    (fewer, "global", Mean, f"{ALIKE}has ended after 4 calls; all ranks must make the same calls, as often"),
    (no_tensor, "global", Mean, "WorldError: rank 1 failed in call 5 of the model: UsageError: batch is a ndarray"),
    (of_two_lengths, "local", Mean, f"{PARTS}float32[4, 4, 4];"),
    (to_predict, "local", Mean, f"{PARTS}float32[4, 3, 4];"),
    (of_two_sizes, "global", Looking, f"{SIZES} rank 1's 8;"),
    (
        fewer,
        "local",
        Looking,
        ALIKE.replace("passes a batch of float32[8, 3, 4]", "makes another") + "has ended after 4",
    ),
]
OF_ITSELF = {fewer: "None", no_tensor: "UsageError: batch is a ndarray, of which a program would"}  # on rank 1
EACH = [pytest.param(*case, marks=pytest.mark.slow if at else ()) for at, case in enumerate(CASES)]


@pytest.mark.parametrize(("how", "batch", "model", "text"), EACH)
def test_all_ranks_learn_that_one_has_another_batch(how, batch, model, text):
    first, second = run_ranks(2, odd, how, batch, model)
    assert first.startswith(text), first
    if how in OF_ITSELF:
        assert second.startswith(OF_ITSELF[how]), second
    else:
        assert second == first


SCRIPT = """
import sys, torch, shardwright as sw
rank = sw.init().rank
model, batch = torch.nn.Linear(4, 1), torch.ones(4, 4)
parallel = sw.parallelize(model, lambda model, x: model(x).square().mean(), batch, "data", batch="global")
for _ in range(3 + (rank != int(sys.argv[1]))):
    parallel(batch).backward()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_that_ends_before_the_others_is_named():
    """Rank 0 serves the store by which the other one learns of it."""
    ranks, early = [], 0
    with free_port() as port:
        for rank in range(2):
            told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            environment = (
                os.environ | told | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            )
            command = [sys.executable, "-c", SCRIPT, str(early)]
            ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        said = [rank.communicate(timeout=250)[1] for rank in ranks]
    assert ranks[early].returncode == 0, said[early]
    assert ranks[1 - early].returncode == 1
    assert "UsageError: ranks do not come to call 4 of the model alike: rank 0 " in said[1 - early], said[1 - early]
    assert f"rank {early} has ended after 3 calls" in said[1 - early]


def kept():
    """Whether there is a model's lockstep when the model is gone, and when the world is, too."""
    sw.init()
    made, found = weakref.ref(Lockstep.of_all_ranks()), []
    for end in (lambda: None, torch.distributed.destroy_process_group):
        end()
        gc.collect()
        found.append(made() is not None)
    return found


def test_ranks_serve_those_whose_models_live_longer():
    """Where a run is interrupted, chance decides when a model goes; rank 0 left at once, and its store with it."""
    assert run_ranks(2, kept) == [[True, False]] * 2
