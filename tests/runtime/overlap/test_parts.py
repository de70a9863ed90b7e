"""Ranks tell each other the sizes of the parts that they pass, which may be others in each step."""

import copy
import gc

import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from ranks import run_ranks
from shardwright.common.pulse import own_pulse
from shardwright.distributed.lockstep import FIRST
from shardwright.runtime.programs import programs

# What the two ranks pass, step by step.
SIZES = [*[(4, 4)] * FIRST, (4, 4), (4, 3), (4, 4), (4, 3), (3, 4), (4, 4)]


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def part_of(batch, rank, sizes):
    start = sum(sizes[:rank])
    return [t[start : start + sizes[rank]] for t in batch]


def with_other_sizes():
    """How far losses, gradients and statistics are from plain PyTorch's, and how often programs ran."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rank = sw.init().rank
    sw.set_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    batches = [(torch.randn(sum(sizes), 6), torch.randint(3, (sum(sizes),))) for sizes in SIZES]
    parallel = sw.parallelize(model, loss_fn, part_of(batches[0], rank, SIZES[0]), "data", batch="local")
    apart = 0.0
    for batch, sizes in zip(batches, SIZES, strict=True):
        loss, expected = parallel(part_of(batch, rank, sizes)), loss_fn(plain, batch)
        for each, of in ((loss, parallel), (expected, plain)):
            of.zero_grad()
            each.backward()
        pairs = [(loss, expected)]
        pairs += [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
        pairs += zip(model.buffers(), plain.buffers(), strict=True)
        apart = max(apart, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return apart, sum(execution.runs["reduced"] for execution in parallel.executions()), own_pulse()._collectives


def test_parts_of_any_size_are_right():
    first, second = run_ranks(2, with_other_sizes)
    assert first == second, "reports of hangs compare the numbers of collectives"
    assert first[0] < 1e-12
    assert first[1] == len(SIZES)


def with_few_programs():
    """One of two programs has to go where rank 0 passes what it passed before, and rank 1 does not."""
    torch.set_num_threads(1)
    programs.MOST_PROGRAMS = 2
    rank = sw.init().rank
    parallel = sw.parallelize(nn.Linear(6, 3), loss_fn, part_of(batch_of((2, 2)), rank, (2, 2)), "data", batch="local")
    sizes = [(2, 2), (5, 5), (2, 7), (2, 2), (5, 5)]
    losses = [float(parallel(part_of(batch_of(each), rank, each))) for each in sizes]
    gc.collect()
    return losses, len(parallel._state._leaves)


def batch_of(sizes):
    torch.manual_seed(sum(sizes))
    return torch.randn(sum(sizes), 6), torch.randint(3, (sum(sizes),))


def test_ranks_forget_the_same_programs():
    (first, graphs), (second, _) = run_ranks(2, with_few_programs)
    assert first == second
    assert graphs <= 3, "of the programs that are there, and of the first plan"
    assert (first[0], first[1]) == (first[3], first[4])
