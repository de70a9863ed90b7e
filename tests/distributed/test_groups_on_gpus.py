"""What groups and objects do where NCCL moves the data, seen without a GPU: on a process group that only pretends."""

import os
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import shardwright as sw
from pretended import pretended
from ranks import run_ranks
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import communicator_over
from shardwright.distributed.agreement import from_rank_zero
from shardwright.distributed.lockstep import Lockstep
from shardwright.distributed.ranks import ranks_by_collectives


def test_a_group_of_some_ranks_takes_nothing_from_the_group_of_all(monkeypatch):
    """torch would split it off the communicator of all, to which those that are no members never come."""
    sources = []
    monkeypatch.setattr(distributed_c10d, "_get_split_source", lambda group: sources.append(group))
    monkeypatch.setattr(dist, "barrier", lambda group: None)  # which would need the GPU
    with pretended(1, 4) as world:
        world.bound_device_id = torch.device("cuda:0")
        group = sw.create_group([1, 3])
        assert sw.get_group_size(group) == 2
        assert group.bound_device_id == torch.device("cuda:0")  # which it needs for its own communicator
        assert world.bound_device_id == torch.device("cuda:0")
        assert sources == []


def test_a_gpu_has_done_what_it_was_asked_before_groups_are_made(monkeypatch):
    """New shapes, evaluations and models make groups in mid-training, when collectives of others are under way."""
    seen, new_group = [], dist.new_group
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("synchronized"))
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: seen.append(ranks) or new_group(ranks, **how))
    with pretended(0, 4):
        sw.init()
        comm = communicator_over(Mesh.of(a=2, b=2))
        comm.prepare([("a",), ("b",)])
        assert seen == ["synchronized", [0, 2], [1, 3], [0, 1], [2, 3]]
        comm.prepare([("b",), ("a",)])
        assert len(seen) == 5, "what is there already costs nothing"
        sw.create_group([0, 1])
        assert seen[5:] == ["synchronized", [0, 1]]


def plan_longer_than_the_timeout():
    sw.init("gloo", timeout=60)
    distributed_c10d._set_pg_timeout(timedelta(seconds=10))  # of the collectives alone
    return from_rank_zero(ranks_by_collectives("making the plan"), lambda: time.sleep(12) or "plan")


@pytest.mark.slow
def test_a_long_search_on_rank_0_ends_no_connection():
    assert run_ranks(2, plan_longer_than_the_timeout) == ["plan", "plan"]


def rank_zero_ends():
    world = sw.init()
    dist.barrier()  # the other one has met this one, too
    if world.rank == 0:
        os._exit(0)
    planning = ranks_by_collectives("making the plan")
    try:
        return from_rank_zero(planning, lambda: "plan")
    except sw.errors.WorldError as error:
        return str(error)


def test_who_waits_for_a_rank_0_that_has_ended_is_told():
    assert run_ranks(2, rank_zero_ends, dying=(0,))[1] == "rank 0 has ended, or whoever serves the store of the job"


def test_a_group_of_two_backends_is_waited_for_as_each_of_them_does(monkeypatch):
    """NCCL ends its communicator where a wait has a time limit; gloo must have one to tell who does not come."""
    monkeypatch.setattr("shardwright.distributed.lockstep.dist.get_backend", lambda group: "cpu:gloo,cuda:nccl")
    found = []

    class Work:
        def wait(self, *limits):
            found.append(len(limits))

    for device in ("cpu", "cuda"):
        tensor = SimpleNamespace(device=torch.device(device))
        Lockstep().run(lambda _, group, async_op: found.append(async_op) or Work(), tensor, group="group")
    assert found == [True, 1, False, 0]
