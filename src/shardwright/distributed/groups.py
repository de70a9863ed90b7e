"""Ranks and groups of ranks, in the manner of MindSpore's communication interface, on every backend.

A group is what `create_group` returns, a process group of torch, so that every collective of torch takes it;
None is the group of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist

from shardwright.common.torch_private import new_group_of_members
from shardwright.distributed.control import collective_timeout, finish_queued
from shardwright.distributed.gloo_threads import calm_receivers
from shardwright.distributed.world import current_world
from shardwright.errors import UsageError

Group = dist.ProcessGroup
_NOT_A_MEMBER = cast(Group, dist.GroupMember.NON_GROUP_MEMBER)  # what torch's own collectives skip


def get_rank(group: Group | None = None) -> int:
    """The rank of this process in ``group``, counted from 0.

    Raises `UsageError` when this process is no member, and, as all functions here, `WorldError` before ``sw.init()``.
    """
    return _members(group).index(current_world().rank)


def get_group_size(group: Group | None = None) -> int:
    """The number of ranks in ``group``; raises `UsageError` when this process is no member."""
    return len(_members(group))


def get_local_rank(group: Group | None = None) -> int:
    """The place of this process among the members of ``group`` that run on this host.

    Raises `UsageError` when this process is no member.
    """
    world = current_world()
    return world.local_rank if group is None else _local_members(group).index(world.rank)


def get_local_size(group: Group | None = None) -> int:
    """The number of members of ``group`` that run on this host; raises `UsageError` when this process is no member."""
    return current_world().local_size if group is None else len(_local_members(group))


def get_world_rank_from_group_rank(group: Group | None, group_rank: int) -> int:
    """The rank in the world of the member that has rank ``group_rank`` in ``group``.

    Raises `UsageError` when the group has no such rank, or this process is no member.
    """
    members = _members(group)
    if not 0 <= group_rank < len(members):
        raise UsageError(
            f"group rank {group_rank} does not exist: the group of ranks {members} has the group ranks 0 to "
            f"{len(members) - 1}"
        )
    return members[group_rank]


def get_group_rank_from_world_rank(world_rank: int, group: Group | None) -> int:
    """The rank in ``group`` of the process that has rank ``world_rank`` in the world.

    Raises `UsageError` when that process, or this one, is no member.
    """
    members = _members(group)
    if world_rank not in members:
        raise UsageError(f"rank {world_rank} of the world is no member of the group of ranks {members}")
    return members.index(world_rank)


def create_group(ranks: Sequence[int], rank_ids: Sequence[int] | None = None) -> Group:
    """A group of these ranks of the world, whose group ranks follow their order in the world.

    Only the members need to call; all of them must, in the same order where several groups are made. To other
    processes it returns a value that every function of groups, torch's collectives included, knows as "not a member".
    Raises `UsageError` when the ranks are not distinct ranks of the world, or a name is given as MindSpore's function
    of this name takes one, which has the ``rank_ids`` behind it: a group has none here.
    """
    if isinstance(ranks, str) or rank_ids is not None:
        chosen = list(ranks if rank_ids is None else rank_ids)
        raise UsageError(
            f"create_group({ranks!r}, ...) gives a name, as MindSpore's does, and groups have none here; type group = "
            f"sw.create_group({chosen if rank_ids is not None else '[0, 1]'}), and pass the group where the name stood"
        )
    world = current_world()
    chosen = sorted(ranks)
    if not chosen or len(set(chosen)) != len(chosen) or chosen[0] < 0 or chosen[-1] >= world.size:
        raise UsageError(
            f"create_group got the ranks {list(ranks)}; expected distinct ranks from 0 to {world.size - 1}"
        )
    if world.rank in chosen:
        finish_queued()
    group = new_group_of_members(chosen, collective_timeout())
    calm_receivers()
    if group is None:  # torch's answer to the others, which everywhere else means the group of all ranks
        return _NOT_A_MEMBER
    dist.barrier(group)  # a member that ended now, with the store perhaps, would leave others unconnected
    return group


def destroy_group(group: Group) -> None:
    """Give up a group that `create_group` made; every member must call.

    Raises `UsageError` for the group of all ranks, which lives until the end, or when this process is no member.
    """
    if group is None or group is dist.group.WORLD:
        raise UsageError("the group of all ranks cannot be destroyed; pass a group that sw.create_group() returned")
    _members(group)
    dist.destroy_process_group(group)


def _members(group: Group | None) -> list[int]:
    """The world ranks of the members in group order; torch knows them for groups of this process alone."""
    world = current_world()
    if group is None:
        return list(range(world.size))
    if group is _NOT_A_MEMBER:
        raise UsageError(f"rank {world.rank} is not a member of this group; only its members may ask about it")
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{group!r} is no group that exists; pass what sw.create_group() returned, and not after sw.destroy_group()"
        ) from error


def _local_members(group: Group) -> list[int]:
    world = current_world()
    return [rank for rank in _members(group) if world.hosts[rank] == world.hosts[world.rank]]
