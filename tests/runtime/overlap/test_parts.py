"""Ranks ask for each other's sizes and compute on; a size that none expects is met before anything is sent."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from ranks import run_ranks
from shardwright.common.pulse import own_pulse
from shardwright.runtime import captured
from shardwright.runtime.parts import Asked, Parts
from shardwright.runtime.programs import programs
from shardwright.runtime.programs.batches import FIRST

# What the two ranks pass, step by step.
SIZES = [*[(4, 4)] * FIRST, (4, 4), (4, 3), (4, 4), (4, 3), (3, 4), (4, 4)]


def asking(meanwhile):
    """At the beginning of a step, as on GPUs, or with the first collective."""
    captured.Parts = lambda lockstep, _: Parts(lockstep, meanwhile)


class Products(TorchDispatchMode):
    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.events.append("product")
        return function(*args, **(kwargs or {}))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def part_of(batch, rank, sizes):
    start = sum(sizes[:rank])
    return [t[start : start + sizes[rank]] for t in batch]


def with_other_sizes(meanwhile):
    """How far losses, gradients and statistics are from plain PyTorch's, how often programs ran, and events by step."""
    torch.set_num_threads(1)
    asking(meanwhile)
    torch.set_default_dtype(torch.float64)
    rank = sw.init().rank
    sw.set_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    batches = [(torch.randn(sum(sizes), 6), torch.randint(3, (sum(sizes),))) for sizes in SIZES]
    parallel = sw.parallelize(model, loss_fn, part_of(batches[0], rank, SIZES[0]), "data", batch="local")
    told, confirm, rows_of, apart = [], Asked.confirm, Asked.rows, 0.0

    def confirming(self, come, added, into):
        told[-1].append("asked")
        gathered = confirm(self, come, added, into)
        told[-1].append("gathered, too" if gathered else "as expected")
        return gathered

    def waiting(self, added=None):
        if self._answer is None and self.expected is not None:
            assert b"all_gather" in bytes(own_pulse()._memory), "a report of a hang says what a rank waits for"
        return rows_of(self, added)

    Asked.confirm, Asked.rows = confirming, waiting
    for batch, sizes in zip(batches, SIZES, strict=True):
        told.append([])
        with Products(told[-1]):
            loss = parallel(part_of(batch, rank, sizes))
        expected = loss_fn(plain, batch)
        for each, of in ((loss, parallel), (expected, plain)):
            of.zero_grad()
            each.backward()
        pairs = [(loss, expected)]
        pairs += [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
        pairs += zip(model.buffers(), plain.buffers(), strict=True)
        apart = max(apart, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return apart, sum(execution.runs["reduced"] for execution in parallel.executions()), told, own_pulse()._collectives


@pytest.mark.parametrize(("meanwhile", "expected"), [(True, "as expected"), (False, "gathered, too")])
def test_parts_of_any_size_are_right_and_equal_ones_are_not_waited_for(meanwhile, expected):
    found = run_ranks(2, with_other_sizes, meanwhile)
    assert found[0][-1] == found[1][-1], "a collective that was not begun counts in no report of a hang"
    for rank, (apart, runs, told, _) in enumerate(found):
        assert apart < 1e-12
        assert runs == len(SIZES), "what was thrown away does not count"
        assert "asked" not in told[0]
        assert told[1][0] == "asked", "in the first calls ranks compare what they hold before they compute"
        as_before, other, again, *_ = told[FIRST:]
        assert as_before == ["product", "asked", expected, "product"], "the first layer is computed meanwhile"
        assert other[:3] == ["product", "asked", "product"] if rank == 0 else "asked" not in other
        # Rank 1 expects what comes, and rank 0 something else: what both have added is thrown away.
        assert again == ["product", "asked", *(["as expected"] if rank else ["product"]), "product"]


def with_few_programs(meanwhile):
    """Rank 0 expects the first program while rank 1 has nothing to expect, and one of the two has to go."""
    torch.set_num_threads(1)
    asking(meanwhile)
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


@pytest.mark.parametrize("meanwhile", [True, False])
def test_ranks_forget_the_same_programs_whatever_they_expected(meanwhile):
    (first, graphs), (second, _) = run_ranks(2, with_few_programs, meanwhile)
    assert first == second
    assert graphs <= 3, "of the programs that are there, and of the first plan"
    assert (first[0], first[1]) == (first[3], first[4])
