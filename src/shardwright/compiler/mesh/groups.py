"""The process groups of a world, one for each set of ranks, whoever communicates over it.

Programs and the DTensors of optimizers and checkpoints share them. On GPUs a group takes memory and threads, and
collectives of two groups of the same ranks could wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwright.compiler.mesh.mesh import Mesh
from shardwright.distributed.control import collective_timeout, finish_queued, world_group
from shardwright.distributed.gloo_threads import calm_receivers

Axes = tuple[str, ...]


@dataclass
class _Made:
    group: dist.ProcessGroup
    users: int = 0


class SharedGroups:
    """The groups that this rank has in one world, beside the group of all ranks."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        # Cached by the members and the number of the group of these, in the one world that all are of.
        self._made: dict[tuple[tuple[int, ...], int], _Made] = {}

    @staticmethod
    def of_world() -> SharedGroups:
        """Those of the world that there is now."""
        world = world_group()
        if world not in _of_worlds:
            _of_worlds[world] = SharedGroups()
        return _of_worlds[world]

    def take(self, mesh: Mesh, axes_sets: Sequence[Axes], number: int = 0) -> list[dist.ProcessGroup]:
        """This rank's group along each of these sets of axes, to be used until it is given back.

        All ranks call it together, with the same sets in one order. A group of these is there on all ranks or on none,
        since the ranks of one of them tell how all others are divided. Groups of one ``number`` are shared; those of
        another have the same ranks, and an order of their own in which they communicate.
        """
        if any(self._is_missing(mesh, axes, number) for axes in axes_sets):
            finish_queued()
        return [self._taken(mesh, axes, number) for axes in axes_sets]

    def give_back(self, mesh: Mesh, axes_sets: Iterable[Axes], number: int = 0) -> None:
        """Use them no more; what nobody else uses is destroyed. All ranks call it, after the last collective."""
        for axes in axes_sets:
            key = mesh.group(self._rank, axes), number
            if key in self._made:
                made = self._made[key]
                made.users -= 1
                if not made.users:
                    del self._made[key]
                    if dist.is_initialized() and _of_worlds.get(world_group()) is self:  # else they have ended with it
                        finish_queued()
                        dist.destroy_process_group(made.group)

    def _is_missing(self, mesh: Mesh, axes: Axes, number: int) -> bool:
        is_world = mesh.extent(axes) == mesh.size and number == 0
        return not is_world and (mesh.group(self._rank, axes), number) not in self._made

    def _taken(self, mesh: Mesh, axes: Axes, number: int) -> dist.ProcessGroup:
        if mesh.extent(axes) == mesh.size and number == 0:
            return world_group()
        if self._is_missing(mesh, axes, number):
            # Every rank makes every group along the axes, in one order, as c10d demands.
            timeout = collective_timeout()
            groups = {members: dist.new_group(list(members), timeout=timeout) for members in mesh.groups(axes)}
            mine = mesh.group(self._rank, axes)
            self._made[mine, number] = _Made(groups[mine])
            calm_receivers()
        made = self._made[mesh.group(self._rank, axes), number]
        made.users += 1
        return made.group


# Cached by the world, which a new one does not share, also of the same ranks.
_of_worlds: WeakKeyDictionary[dist.ProcessGroup, SharedGroups] = WeakKeyDictionary()
