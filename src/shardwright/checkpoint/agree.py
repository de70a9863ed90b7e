"""Ranks that save or load together: who they are, and one error for all where one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwright.checkpoint.ranks import Lost, OneRank, ProcessRanks, Ranks
from shardwright.errors import CheckpointError, ShardwrightError

T = TypeVar("T")

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def all_ranks() -> Ranks:
    """The ranks of the default process group, or this process alone.

    Their messages go by gloo, also where collectives go by NCCL: the first call there makes a group, on all ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return OneRank()
    if "gloo" in str(dist.get_backend()):
        return ProcessRanks()
    world = dist.group.WORLD
    assert world is not None
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    return ProcessRanks(_groups[world])


def together(ranks: Ranks, do: Callable[[], T]) -> T:
    """What ``do()`` returns on each rank; where it fails on some rank, all raise the first one's error."""
    answer = told(do)
    failures = ranks.gather(answer.failure)
    failure = None
    for rank, found in enumerate(failures or ()):
        if isinstance(found, Lost):
            found = CheckpointError(f"rank {rank} {found}")
        failure = failure or found
    failure = ranks.broadcast(failure)
    if failure is not None:
        raise failure
    if answer.failure is not None:
        raise answer.failure
    result: T = answer.result
    return result


@dataclass(frozen=True)
class Told:
    """How a call ended, in a form that travels."""

    failure: Exception | None = None
    result: Any = None


def told(do: Callable[[], Any]) -> Told:
    try:
        return Told(None, do())
    except ShardwrightError as error:
        return Told(type(error)(*error.args))
    except Exception as error:
        return Told(CheckpointError(f"{type(error).__name__}: {error}"))


def untold(told: Told) -> Any:
    if told.failure is not None:
        raise told.failure
    return told.result
