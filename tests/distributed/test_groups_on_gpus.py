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
from shardwright.distributed import control, ranks
from shardwright.distributed.agreement import from_all_ranks, from_rank_zero
from shardwright.distributed.backends import table
from shardwright.distributed.lockstep import Lockstep
from shardwright.distributed.ranks import ranks_by_collectives
from shardwright.runtime.placing.members import agree_on_weights
from shardwright.runtime.programs.inputs import SizeExchange


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


def beside_data_on_gpus():
    """The world believes that its own backend moves nothing of the CPU, as NCCL does not."""
    table.BACKENDS = {**table.BACKENDS, "gloo": table.Backend(name="gloo", moves=("cuda",))}
    sw.init("gloo")
    world, used = dist.group.WORLD, set()
    beside = control.control_group()
    assert beside is not world
    for name in ("broadcast", "all_gather_object", "gather_object", "broadcast_object_list", "all_gather"):
        whole = getattr(dist, name)

        def told(*args, whole=whole, name=name, group=None, **keywords):
            used.add((name, group is beside))
            return whole(*args, group=group, **keywords)

        setattr(dist, name, told)
    planning = ranks_by_collectives("making the plan")
    answers = from_all_ranks(dist.get_rank()), from_rank_zero(planning, lambda: "plan"), planning.gather("x")
    model = torch.nn.Linear(2, 2)
    agree_on_weights(model)  # where it still lies in the memory of the host
    height = 2 + dist.get_rank()
    sizes, tensors = SizeExchange(Lockstep()), [torch.zeros(height, 3)]
    rows = sizes.rows(sizes.of_all_ranks(tensors, height, "key", []), tensors, [])
    return answers, rows.all_ranks, used


def test_objects_and_sizes_have_a_group_of_the_cpu_beside_the_data():
    for rank, (answers, rows, used) in enumerate(run_ranks(2, beside_data_on_gpus)):
        assert answers == ([0, 1], "plan", None if rank else ["x", "x"])
        assert rows == ((0, 2), (2, 5))
        assert {group for _, group in used} == {True}
        assert {name for name, _ in used} >= {
            "all_gather_object",
            "gather_object",
            "broadcast_object_list",
            "broadcast",
        }


def no_group_beside():
    sw.init()
    return control.control_group() is dist.group.WORLD, len(distributed_c10d._world.pg_map)


def test_gloo_needs_no_group_beside_itself():
    assert run_ranks(2, no_group_beside) == [(True, 1)] * 2


def plan_longer_than_the_timeout():
    sw.init("gloo", timeout=60)
    distributed_c10d._set_pg_timeout(timedelta(seconds=10))  # of the collectives alone
    return from_rank_zero(ranks_by_collectives("making the plan"), lambda: time.sleep(12) or "plan")


@pytest.mark.slow
def test_a_long_search_on_rank_0_ends_no_connection():
    assert run_ranks(2, plan_longer_than_the_timeout) == ["plan", "plan"]


def searched_while_another_waits(folder):
    """Whether rank 1, when it waited for what rank 0 makes, was in no collective, whose time goes by."""
    sw.init("gloo")
    waits, collective, told = folder / "waits", folder / "collective", dist.broadcast_object_list
    if dist.get_rank():
        ranks.time = SimpleNamespace(sleep=lambda seconds: waits.touch() or time.sleep(seconds))
        dist.broadcast_object_list = lambda *args, **how: collective.touch() or told(*args, **how)

    def search():
        until_s = time.monotonic() + 60
        while not waits.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        return waits.exists() and not collective.exists()

    return from_rank_zero(ranks_by_collectives("making the plan"), search), collective.exists()


def test_who_waits_for_a_long_search_on_rank_0_is_in_no_collective(tmp_path):
    assert run_ranks(2, searched_while_another_waits, tmp_path)[1] == (True, True)


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
