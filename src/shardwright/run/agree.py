"""Ranks that call the same function must mean the same; where they do not, every one of them says so."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist

from shardwright.errors import UsageError


def agree(what: dict[str, Any], problem: str | None = None) -> None:
    """Compare ``what`` between all ranks, entry by entry. Entries print as the message should show them.

    Raises:
        UsageError: on every rank, where some rank has a ``problem`` or an entry differs from rank 0's.
    """
    everyone: list[Any] = [(what, problem)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (what, problem))
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
