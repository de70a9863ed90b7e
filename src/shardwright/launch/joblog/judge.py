"""The verdict on an attempt, gathered while it ends: which failure came first on all hosts, by this host's clock.

With the first failure a short while begins in which others may turn out to have been earlier: ranks that had failed
but not yet died (each supervisor is asked for the errors that ranks have written down), and ranks whose reports come
later. Where all that is known is a lost peer, hosts that have not answered since are waited for, up to their leases: a
host that is gone is the cause of what its peers complain about.

Nothing here reads a clock, writes, or sends: what happens is told to the `Judge`, which says what is to be done.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.launch.host.protocol import Exited
from shardwright.launch.joblog.failure import TRACEBACK_LINES, RankEnd, describe_ranks, end_of, first_failure
from shardwright.launch.joblog.job import FAILED, INTERRUPTED, SUCCEEDED

SETTLE_S = 0.2
_ANSWER_S = 2.0  # from a supervisor of this host, which may have been stopped


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, with the status of its job; ``cause`` in words, where it failed."""

    status: str
    exit_code: int
    cause: str | None = None


class Judge:
    """What is known of how the ranks of an attempt end, and what follows from it.

    ``hosts`` names the host of each rank, where there are several; ``stderr_tail`` gives the end of what a rank wrote.
    Moments that are passed in (``now_s``) are of the monotonic clock, all else is in seconds since the epoch.
    """

    def __init__(
        self, ranks: int, stderr_tail: Callable[[int], bytes] = lambda rank: b"", hosts: Mapping[int, str] | None = None
    ) -> None:
        self.ranks, self.stderr_tail, self.hosts = ranks, stderr_tail, hosts or {}
        self.started: set[int] = set()
        self.ends: dict[int, RankEnd] = {}
        self.errors: dict[int, tuple[str, float]] = {}  # of ranks that may not have ended yet
        self.losses: list[RankEnd] = []
        self.cause: RankEnd | None = None
        self.ending = False  # the ranks have been told to end
        self.interrupted: int | None = None  # by the signal that began to end the ranks
        self.told_to_end: int | None = None  # by a signal, also where a failure had begun to end them
        self.not_started: str | None = None  # why the ranks could not be started
        self._settle_at_s: float | None = None
        self._waits: dict[str, float] = {}  # hosts that were asked and have not answered: until when they may

    # --- what happens

    def rank_started(self, rank: int) -> bool:
        """A rank has started. Returns whether all have started with it."""
        self.started.add(rank)
        return len(self.started) == self.ranks

    def ended(self, end: RankEnd) -> bool:
        """A rank has ended. Returns whether hosts are now to be asked for errors (`settle`)."""
        self.ends[end.rank] = end
        return end.code != 0 and self.undecided

    def interrupt(self, signum: int) -> Literal["end", "abandon", "kill", "nothing"]:
        """A signal is to end the job. Says what becomes of the ranks: they are abandoned where none has started."""
        self.told_to_end = signum
        if self.ending:
            return "kill" if signum == signal.SIGINT else "nothing"
        self.interrupted, self.ending = signum, True
        self._settle_at_s = None
        return "end" if self.started else "abandon"

    def lost(self, loss: RankEnd, ranks: Iterable[int]) -> Literal["settle", "not started", "say", "nothing"]:
        """The host of these ranks is lost. Says what is to be done: with "say", no more than to say so."""
        if self.interrupted is not None or self.cause is not None:
            abandoned = self.interrupted is not None and not self.started
            return "say" if self.hosts and not abandoned else "nothing"
        if not self.started.intersection(ranks):
            return "not started"
        self.losses.append(loss)
        self.answered(loss.host, {})
        return "settle"

    def settle(self, asked: Iterable[tuple[str, float | None]], now_s: float) -> None:
        """The first failure has come. ``asked`` are the hosts that were asked for errors, with their leases."""
        self._settle_at_s = now_s + SETTLE_S
        self._waits = {name: now_s + (_ANSWER_S if lease_s is None else lease_s) for name, lease_s in asked}

    def answered(self, host: str, errors: Mapping[int, tuple[str, float]]) -> None:
        """A host has told what its ranks have written down as their errors; a host that is lost never will."""
        self.errors |= errors
        self._waits.pop(host, None)

    # --- what follows

    @property
    def undecided(self) -> bool:
        """Whether nothing has begun to end the job."""
        return not self.ending and self._settle_at_s is None and self.cause is None

    def wait_s(self, now_s: float) -> float | None:
        """How long it is until it may be time to judge."""
        return max(0.0, self._settle_at_s - now_s) if self._settle_at_s is not None else None

    def first(self, now_s: float, gone: Collection[int] = ()) -> RankEnd | None:
        """The cause, if it is time to name it. From the ranks in ``gone`` nothing more will come."""
        all_ended = len(self.ends.keys() | gone) == self.ranks
        if self.ending or self.cause is not None or self._settle_at_s is None:
            return None
        if now_s < self._settle_at_s and not all_ended:
            return None
        dying = [
            RankEnd(rank, 1, time_s, stderr_tail=self.stderr_tail(rank), error=text, host=self.hosts.get(rank, ""))
            for rank, (text, time_s) in self.errors.items()
            if rank not in self.ends
        ]
        cause = first_failure([*self.ends.values(), *dying, *self.losses])
        awaited = [until_s for until_s in self._waits.values() if until_s > now_s]
        if cause.is_echo and awaited and not all_ended:
            self._settle_at_s = now_s + SETTLE_S
            return None
        self.blame(cause)
        return cause

    def blame(self, cause: RankEnd) -> None:
        """Make this the cause: from now on the ranks are told to end."""
        self.cause, self.ending = cause, True
        self._settle_at_s = None

    def headline(self, cause: RankEnd) -> str:
        if cause.loss is not None:
            return cause.loss
        where = f" on {cause.host}" if cause.host else ""
        return f"rank {cause.rank}{where} failed first: {cause.cause()}"

    def details(
        self, cause: RankEnd, log: Callable[[int, str], str], stdout_tail: Callable[[int], bytes] = lambda rank: b""
    ) -> list[str]:
        """Lines beside the headline: the end of the traceback, or without one of all that was written, who returned
        early, who failed afterwards.
        """
        lines = []
        if cause.rank >= 0:
            errors = cause.last_lines()
            printed = [] if cause.has_traceback else end_of(stdout_tail(cause.rank), TRACEBACK_LINES)
            for stream, said in (("stderr", errors), ("stdout", printed)):
                if said or (stream == "stderr" and not printed):
                    lines += [f"    {line.decode(errors='replace')}" for line in said]
                    lines.append(f"its log: {log(cause.rank, stream)}")
            lines += cause.remedy()
        for end in sorted(self.ends.values(), key=lambda end: end.time_s):
            if end.code == 0:
                before_s = cause.time_s - end.time_s
                lines.append(
                    f"rank {end.rank} returned 0, {abs(before_s):.3f} s {'before' if before_s > 0 else 'after'}"
                )
        echoes = [end.rank for end in self.ends.values() if end.code != 0 and end is not cause]
        if echoes:
            lines.append(f"after it failed {describe_ranks(echoes)}")
        lines += [loss.loss for loss in self.losses if loss is not cause and loss.loss is not None]
        return lines

    def outcome(self) -> Outcome:
        """How the attempt has ended, once no host has anything more to tell."""
        if self.cause is not None:
            return Outcome(FAILED, self._exit_code(self.cause), self.headline(self.cause))
        if self.interrupted is not None:
            return Outcome(INTERRUPTED, 128 + self.interrupted)
        if self.not_started is not None:
            return Outcome(FAILED, 1, self.not_started)
        return Outcome(SUCCEEDED, 0)

    def _exit_code(self, cause: RankEnd) -> int:
        """As the rank itself ended, where it did so by itself."""
        end = self.ends.get(cause.rank, cause)
        return (cause if end.signalled or end.code == 0 else end).exit_code


def rank_end(event: Exited, ahead_s: float, stderr_tail: bytes, host: str) -> RankEnd:
    """How a rank ended, by our clock, which that of its host is ahead of."""
    end = RankEnd(
        event.rank, event.code, event.time_s - ahead_s, signalled=event.signalled, out_of_memory=event.out_of_memory,
        stderr_tail=stderr_tail, host=host,
    )  # fmt: skip
    if event.error is None:
        return end
    text, happened_s = event.error
    return replace(end, error=text, time_s=min(end.time_s, happened_s - ahead_s))
