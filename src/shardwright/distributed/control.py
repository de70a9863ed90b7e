"""The CPU groups of all ranks for control messages, beside the group that moves their data.

One is for objects, sizes and words, which lie in the memory of the CPU, and one for messages.
"""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardwright.common.torch_private import unbound
from shardwright.distributed.backends.table import GLOO, backend_moving, moves
from shardwright.distributed.gloo_threads import calm_receivers

# The group for messages beside each default group whose own backend moves no messages of the CPU. Cached by the default
# group itself, with which its backend comes and goes.
_beside: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
# By the default group, for which it was given; torch gives other groups its own default.
_timeouts: WeakKeyDictionary[dist.ProcessGroup, timedelta] = WeakKeyDictionary()


def bound_collectives(timeout: timedelta) -> None:
    """Bound the collectives of every group that is made beside the default group from now on."""
    _timeouts[world_group()] = timeout


def collective_timeout() -> timedelta | None:
    """Return what bounds the collectives of a new group; None for torch's own default."""
    return _timeouts.get(world_group())


def world_group() -> dist.ProcessGroup:
    """The group of all ranks, which there is from `sw.init` on."""
    world = dist.group.WORLD
    assert world is not None
    return world


def control_group() -> dist.ProcessGroup:
    """The group of all ranks that moves what lies in the memory of the CPU, also while their devices are busy.

    It is the default group where the backend of that moves such tensors. Else it is made by the first call, which all
    ranks make together; `sw.init` makes it ahead.
    """
    return world_group() if moves("cpu", str(dist.get_backend())) else _group_beside()


def group_moving(device: torch.device) -> dist.ProcessGroup:
    """The group of all ranks whose backend moves tensors of ``device``."""
    return world_group() if moves(device.type, str(dist.get_backend())) else control_group()


def message_group() -> dist.ProcessGroup:
    """The group of all ranks that sends messages; where there is none, the first call makes one, on all ranks."""
    return world_group() if backend_moving("cpu", str(dist.get_backend())).sends_messages else _group_beside()


def group_for_messages() -> dist.ProcessGroup:
    """A new group of all ranks that sends messages; all make it together."""
    finish_queued()
    with unbound():
        group: dist.ProcessGroup = dist.new_group(timeout=collective_timeout(), backend=GLOO.registered)
    calm_receivers()
    return group


def finish_queued() -> None:
    """Wait until this rank's GPU has done all enqueued work, before a group is made.

    A group of NCCL may be split off the one of all ranks, in which nothing may be under way then; and its memory is
    asked for where other ranks' collectives may wait for this one.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _group_beside() -> dist.ProcessGroup:
    world = world_group()
    if world not in _beside:
        _beside[world] = group_for_messages()
    return _beside[world]
