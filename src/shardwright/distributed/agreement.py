"""Agreement of ranks: gather what each has, compare, share what rank 0 makes, and raise one error on all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from shardwright.common.system_errors import in_words
from shardwright.distributed.control import control_group
from shardwright.distributed.ranks import Lost, Ranks, alone
from shardwright.errors import ShardwrightError, UsageError

T = TypeVar("T")


def from_all_ranks(mine: T) -> list[T]:
    """Return what each rank has, in rank order; all ranks call it. A process without others has its own alone."""
    if alone():
        return [mine]
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=control_group())
    return everyone


def agree(caller: str, what: dict[str, Any], problem: str | None = None) -> None:
    """Compare ``what`` between all ranks, entry by entry. Entries print as the message should show them.

    ``caller`` is what a user has called, "parallelize".

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
                    f"all ranks must call {caller} with the same arguments"
                )


def refuse_unlike(ranks: Ranks, name: str, value: Any, remedy: str) -> None:
    """Raise `UsageError` on every rank where some rank has another value than rank 0; all call it together."""
    everyone: list[Any] = ranks.gather(value) or []

    def compare() -> None:
        for rank, theirs in enumerate(everyone):
            if isinstance(theirs, Lost):
                raise ranks.purpose.lost(rank, theirs)
            if theirs != everyone[0]:
                raise UsageError(
                    f"ranks disagree about {name}: rank 0 has {everyone[0]!r}, rank {rank} has {theirs!r}; {remedy}"
                )

    from_rank_zero(ranks, compare)


def from_rank_zero(ranks: Ranks, make: Callable[[], T]) -> T:
    """Return what ``make()`` returns on rank 0, on every rank; where it fails there, all raise its error."""
    failure, result = ranks.broadcast(_outcome(ranks, make) if ranks.rank == 0 else None)
    if failure is not None:
        raise failure
    return cast(T, result)


def together(ranks: Ranks, do: Callable[[], T]) -> T:
    """Return what ``do()`` returns on each rank; where it fails on some rank, all raise the first one's error."""
    own, result = _outcome(ranks, do)
    failures = [
        ranks.purpose.lost(rank, answer) if isinstance(answer, Lost) else answer
        for rank, answer in enumerate(ranks.gather(own) or ())
    ]
    if failure := ranks.broadcast(next((failure for failure in failures if failure is not None), None)) or own:
        raise failure
    return cast(T, result)


def attempt(do: Callable[[], Any]) -> tuple[str | None, Any]:
    """Return what went wrong in words, or None, and what came out."""
    try:
        return None, do()
    except Exception as error:  # a failure that is not told would leave the other ranks waiting
        return _in_words(error), None


def _outcome(ranks: Ranks, do: Callable[[], Any]) -> tuple[Exception | None, Any]:
    """Return the error of a call in a form that can be sent, or None, and what came out."""
    try:
        return None, do()
    except Exception as error:
        ours = isinstance(error, ShardwrightError)
        if ranks.size == 1 and (ours or ranks.purpose.error is None):
            raise
        return (type(error)(*error.args) if ours else ranks.purpose.failed(ranks.rank, _in_words(error))), None


def _in_words(error: Exception) -> str:
    if isinstance(error, ShardwrightError):
        return str(error)
    if isinstance(error, OSError):
        return in_words(error)
    return f"{type(error).__name__}: {error}"
