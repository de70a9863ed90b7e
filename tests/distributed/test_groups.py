"""Groups of ranks answer on every member, and say so to everybody else."""

import os

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from ranks import run_ranks
from shardwright.common.torch_private import job_store
from shardwright.compiler.mesh.groups import SharedGroups
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.distributed.backends.shm_group import ShmGroup
from shardwright.distributed.control import group_for_messages
from shardwright.errors import UsageError, WorldError


def said_by(function, *arguments):
    try:
        return function(*arguments)
    except UsageError as error:
        return str(error)


def on_two_hosts():
    """Six ranks of which Slurm says that they run on two hosts, three on each."""
    rank = int(os.environ["RANK"])
    slurm = {"PROCID": rank, "LOCALID": rank % 3, "NODEID": rank // 3, "NTASKS": 6, "JOB_ID": 7,
             "STEP_NODELIST": "node[1-2]", "TASKS_PER_NODE": "3(x2)"}  # fmt: skip
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    os.environ.update({f"SLURM_{name}": str(value) for name, value in slurm.items()})
    world = sw.init(timeout=60)
    ranks = [4, 1, 3]
    group = sw.create_group(ranks)
    if rank not in ranks:
        dist.barrier()  # rank 0 serves the store on which the members meet
        return str(world), said_by(sw.get_rank, group), said_by(sw.get_group_size, group)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    answers = (
        sw.get_rank(group), sw.get_group_size(group), sw.get_local_rank(group), sw.get_local_size(group),
        [sw.get_world_rank_from_group_rank(group, r) for r in range(3)],
        [sw.get_group_rank_from_world_rank(r, group) for r in (1, 3, 4)], total.item(),
    )  # fmt: skip
    wrong = said_by(sw.get_world_rank_from_group_rank, group, 3), said_by(sw.get_group_rank_from_world_rank, 0, group)
    everyone = sw.get_rank(), sw.get_group_size(), sw.get_local_rank(), sw.get_local_size()
    dist.barrier()
    sw.destroy_group(group)
    return answers, wrong, everyone, said_by(sw.get_rank, group)


def test_a_group_over_two_hosts():
    results = run_ranks(6, on_two_hosts)
    not_a_member = "rank {} is not a member of this group; only its members may ask about it"
    for rank in (0, 2, 5):
        assert results[rank] == (
            f"rank {rank} of 6 (local rank {rank % 3} of 3 on node{1 + rank // 3}), cpu, gloo",
            not_a_member.format(rank),
            not_a_member.format(rank),
        )
    for rank, group_rank, local_rank, local_size in ((1, 0, 0, 1), (3, 1, 0, 2), (4, 2, 1, 2)):
        answers, wrong, everyone, destroyed = results[rank]
        assert answers == (group_rank, 3, local_rank, local_size, [1, 3, 4], [0, 1, 2], 8.0)
        assert wrong == (
            "group rank 3 does not exist: the group of ranks [1, 3, 4] has the group ranks 0 to 2",
            "rank 0 of the world is no member of the group of ranks [1, 3, 4]",
        )
        assert everyone == (rank, 6, rank % 3, 3)
        assert "is no group that exists" in destroyed


def misuse():
    sw.init(timeout=60)
    refused = [said_by(sw.create_group, ranks) for ranks in ([], [0, 0], [0, 2], [-1])]
    return [
        *refused,
        said_by(sw.destroy_group, None),
        said_by(sw.create_group, "g", [0, 1]),
        said_by(sw.create_group, "g"),
    ]


def test_groups_that_make_no_sense():
    said = run_ranks(2, misuse)[0]
    for message, ranks in zip(said, ("[]", "[0, 0]", "[0, 2]", "[-1]"), strict=False):
        assert message == f"create_group got the ranks {ranks}; expected distinct ranks from 0 to 1"
    assert said[4] == "the group of all ranks cannot be destroyed; pass a group that sw.create_group() returned"
    assert (
        said[5]
        == said[6]
        == (
            "create_group('g', ...) gives a name, as MindSpore's does, and groups have none here; type group = "
            "sw.create_group([0, 1]), and pass the group where the name stood"
        )
    )


def test_there_are_no_ranks_before_init():
    with pytest.raises(WorldError, match=r"there is no world yet; call sw.init\(\) first"):
        sw.get_rank()


def one_after_the_other():
    """Rank 1 has one group more than its peers when they meet again; groups end and come again."""
    sw.init(timeout=60)
    rank, sums = sw.get_rank(), []
    for ranks in ([0, 1], [1, 2], [0, 1], [0, 1, 2], [1, 2]):
        group = sw.create_group(ranks)
        if rank in ranks:
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            sums.append(total.item())
            if ranks != [1, 2]:
                sw.destroy_group(group)
    dist.barrier()  # rank 0 serves the store on which the members meet
    return sums


def test_groups_of_the_same_ranks_one_after_the_other():
    assert run_ranks(3, one_after_the_other) == [[1.0, 1.0, 3.0], [1.0, 3.0, 1.0, 3.0, 3.0], [3.0, 3.0, 3.0]]


def limits_of_groups(backend):
    """The timeouts of every kind of group that is made beside the one of all ranks, in seconds."""
    sw.init(backend, timeout=77)
    mesh = Mesh.of(a=2, b=1)
    made = [sw.create_group([0, 1]), *SharedGroups.of_world().take(mesh, [("b",)]), group_for_messages()]
    of_gloo = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in made}
    of_shm = {group.queue.timeout_s for group in made if isinstance(group, ShmGroup)}
    return len(made), of_gloo | of_shm


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_timeout_reaches_every_group(backend):
    assert run_ranks(2, limits_of_groups, backend) == [(3, {77.0})] * 2


def left_alone_in_a_group():
    """The error of a collective of a new group to which rank 1 does not come, in the world that the script has made."""
    dist.init_process_group("gloo")
    sw.init(timeout=4)
    group = sw.create_group([0, 1])
    if dist.get_rank() == 1:
        job_store().get("rank 0 has seen it")
        return ""
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as error:
        return str(error)
    finally:
        job_store().set("rank 0 has seen it", "")


@pytest.mark.slow
def test_a_collective_of_a_new_group_ends_with_the_timeout():
    assert "4000ms" in run_ranks(2, left_alone_in_a_group, timeout=60)[0]
