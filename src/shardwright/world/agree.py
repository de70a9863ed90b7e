"""What every rank has, on all of them; and that ranks which call the same function mean the same, or all say so."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import torch.distributed as dist

from shardwright.errors import UsageError
from shardwright.world.ranks import alone

T = TypeVar("T")


def from_all_ranks(mine: T) -> list[T]:
    """What each rank has, in rank order; all ranks call it together. A process without others has its own alone."""
    if alone():
        return [mine]
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def agree(what: dict[str, Any], problem: str | None = None) -> None:
    """Compare ``what`` between all ranks, entry by entry. Entries print as the message should show them.

    Raises:
        UsageError: on every rank, where some rank has a ``problem`` or an entry differs from rank 0's.
    """
    everyone = from_all_ranks((what, problem))
    problems = Counter(theirs for _, theirs in everyone if theirs)
    if problems:
        text, count = problems.most_common(1)[0]
        where = "" if count == len(everyone) else f"rank {[theirs for _, theirs in everyone].index(text)}: "
        raise UsageError(where + text)
    for rank, (theirs, _) in enumerate(everyone):
        for name, value in everyone[0][0].items():
            if theirs.get(name) != value:
                raise UsageError(
                    f"ranks disagree about {name}: rank 0 has {value}, rank {rank} has {theirs.get(name)}; "
                    "all ranks must call parallelize with the same arguments"
                )
