"""Ranks that save or load together: who they are, and one error for all where one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwright.errors import CheckpointError, ShardwrightError
from shardwright.world.ranks import Lost, OneRank, ProcessRanks, Ranks, alone

T = TypeVar("T")

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def all_ranks() -> Ranks:
    """The ranks of the default process group, or this process alone.

    Their messages go by gloo, also where collectives go by NCCL: the first call there makes a group, on all ranks.
    """
    if alone():
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
    answer = _told(do)
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


def from_rank_zero(ranks: Ranks, do: Callable[[], T]) -> T:
    """What ``do()`` returns on rank 0, on every rank; where it fails there, all raise its error."""
    answer = ranks.broadcast(_told(do) if ranks.rank == 0 else None)
    if answer.failure is not None:
        raise answer.failure
    result: T = answer.result
    return result


def attempt(do: Callable[[], Any]) -> tuple[str | None, Any]:
    """What went wrong in words, or None, and what came out."""
    try:
        return None, do()
    except Exception as error:  # a failure that is not told would leave the other ranks waiting
        return _in_words(error), None


@dataclass(frozen=True)
class _Told:
    """How a call ended, in a form that travels."""

    failure: Exception | None = None
    result: Any = None


def _told(do: Callable[[], Any]) -> _Told:
    try:
        return _Told(None, do())
    except ShardwrightError as error:
        return _Told(type(error)(*error.args))
    except Exception as error:
        return _Told(CheckpointError(_in_words(error)))


def _in_words(error: Exception) -> str:
    if isinstance(error, ShardwrightError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {error}"
