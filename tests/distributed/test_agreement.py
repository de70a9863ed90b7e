"""Ranks that must mean the same say so in the name of their caller, and all fail together."""

import pytest
import torch.distributed as dist

from ranks import run_ranks
from shardwright.cluster.bench.bench import run_bench
from shardwright.cluster.bench.options import BenchOptions
from shardwright.distributed.agreement import agree, from_all_ranks, from_rank_zero, together
from shardwright.distributed.ranks import OneRank, Purpose, ranks_by_collectives, ranks_by_messages
from shardwright.distributed.world import init
from shardwright.errors import CheckpointError, PlanError, UsageError
from shardwright.runtime.verification.verify import verify
from simulated_ranks import SimulatedRanks

SAVING = Purpose("saving", CheckpointError)


def said(call, *args, **keywords):
    try:
        return call(*args, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def callers_that_differ():
    world = init()
    return [
        said(verify, None, None, None, steps=1 + world.rank),
        said(run_bench, world, BenchOptions((), iters=1 + world.rank), print),
        said(agree, "parallelize", {"the mode": world.rank}),
        said(agree, "parallelize", {}, "mode='x' is unknown" if world.rank else None),
    ]


def test_ranks_that_disagree_name_what_was_called():
    verifying, benching, parallelizing, problem = callers = run_ranks(2, callers_that_differ)[0]
    assert all(text.startswith("UsageError: ") for text in callers)
    assert verifying.startswith("UsageError: ranks disagree about the arguments: rank 0 has {")
    assert verifying.endswith("; all ranks must call verify with the same arguments")
    assert benching.endswith("; all ranks must call shardwright bench with the same arguments")
    assert parallelizing.endswith(
        "the mode: rank 0 has 0, rank 1 has 1; all ranks must call parallelize with the same arguments"
    )
    assert problem == "UsageError: rank 1: mode='x' is unknown"


def refuse():
    raise PlanError("no plan exists")


def divide():
    return 1 // 0


def rank_zero_makes():
    init()
    ranks = ranks_by_collectives("making the plan")
    saving = ranks_by_messages(SAVING)
    assert (ranks.rank, ranks.size) == (saving.rank, saving.size) == (dist.get_rank(), 2)
    assert ranks.gather(ranks.rank) == (None if ranks.rank else [0, 1])
    return [
        from_rank_zero(ranks, lambda: dist.get_rank() + 10),
        *(said(from_rank_zero, each, do) for each in (ranks, saving) for do in (refuse, divide)),
        said(together, saving, lambda: dist.get_rank() and divide()),
        from_all_ranks(dist.get_rank()),
    ]


def test_what_rank_zero_makes_or_fails_to_make_comes_to_all():
    for results in run_ranks(2, rank_zero_makes):
        assert results == [
            10,
            "PlanError: no plan exists",
            "WorldError: rank 0 failed while making the plan: ZeroDivisionError: integer division or modulo by zero",
            "PlanError: no plan exists",
            "CheckpointError: ZeroDivisionError: integer division or modulo by zero",
            "CheckpointError: ZeroDivisionError: integer division or modulo by zero",
            [0, 1],
        ]


def test_a_rank_alone_raises_what_it_met():
    planning = ranks_by_collectives("making the plan")
    assert isinstance(planning, OneRank)
    with pytest.raises(ZeroDivisionError):
        from_rank_zero(planning, divide)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        from_rank_zero(ranks_by_messages(SAVING), divide)
    with pytest.raises(UsageError, match="mode"):
        agree("parallelize", {}, "mode='x' is unknown")


def test_all_raise_the_error_of_the_first_rank_that_fails():
    def call(ranks):
        return together(ranks, lambda: 1 // 0 if ranks.rank == 2 else ranks.rank)

    for error in SimulatedRanks.run(4, call):
        assert isinstance(error, CheckpointError)
        assert "ZeroDivisionError" in str(error)
    assert SimulatedRanks.run(3, lambda ranks: together(ranks, lambda: ranks.rank)) == [0, 1, 2]
