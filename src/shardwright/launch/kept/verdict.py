"""The verdict on a job, gathered while it ends: which failure came first on all hosts, by this host's clock.

With the first failure a short while begins in which others may turn out to have been earlier: ranks that had failed
but not yet died (each supervisor is asked for the errors that ranks have written down), and ranks whose reports come
later. Where all that is known is a lost peer, hosts that have not answered since are waited for, up to their leases: a
host that is gone is the cause of what its peers complain about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from shardwright.launch.host.protocol import Exited
from shardwright.launch.kept.failure import RankEnd, describe_ranks, first_failure

SETTLE_S = 0.2
_ANSWER_S = 2.0  # from a supervisor of this host, which may have been stopped


class Verdict:
    """``stderr_tail`` gives the end of what a rank wrote. Times are this host's, in seconds since the epoch."""

    def __init__(self, stderr_tail: Callable[[int], bytes]) -> None:
        self.stderr_tail = stderr_tail
        self.ends: dict[int, RankEnd] = {}
        self.errors: dict[int, tuple[str, float]] = {}  # of ranks that may not have ended yet
        self.losses: list[RankEnd] = []
        self.cause: RankEnd | None = None
        self.settle_at_s: float | None = None
        self._waits: dict[str, float] = {}  # hosts that were asked and have not answered: until when they may

    @property
    def settling(self) -> bool:
        return self.settle_at_s is not None

    def settle(self, asked: Iterable[tuple[str, float | None]]) -> None:
        """The first failure has come. ``asked`` are the hosts that were asked for errors, with their leases."""
        now_s = time.monotonic()
        self.settle_at_s = now_s + SETTLE_S
        self._waits = {name: now_s + (_ANSWER_S if lease_s is None else lease_s) for name, lease_s in asked}

    def answered(self, name: str, errors: dict[int, tuple[str, float]]) -> None:
        """Also for a host that is lost and will never answer."""
        self.errors |= errors
        self._waits.pop(name, None)

    def forget(self) -> None:
        """Something else ends the job."""
        self.settle_at_s = None

    def wait_s(self) -> float | None:
        """Until it may be time to judge."""
        return max(0.0, self.settle_at_s - time.monotonic()) if self.settle_at_s is not None else None

    def first(self, hosts: dict[int, str], *, all_ended: bool) -> RankEnd | None:
        """The cause, if it is time to name it. ``hosts`` names the host of each rank."""
        now_s = time.monotonic()
        if self.settle_at_s is None or (now_s < self.settle_at_s and not all_ended):
            return None
        dying = [
            RankEnd(rank, 1, time_s, stderr_tail=self.stderr_tail(rank), error=text, host=hosts.get(rank, ""))
            for rank, (text, time_s) in self.errors.items()
            if rank not in self.ends
        ]
        cause = first_failure([*self.ends.values(), *dying, *self.losses])
        awaited = [until_s for until_s in self._waits.values() if until_s > now_s]
        if cause.is_echo and awaited and not all_ended:
            self.settle_at_s = now_s + SETTLE_S
            return None
        self.settle_at_s = None
        self.cause = cause
        return cause

    def headline(self, cause: RankEnd) -> str:
        if cause.loss is not None:
            return cause.loss
        where = f" on {cause.host}" if cause.host else ""
        return f"rank {cause.rank}{where} failed first: {cause.cause()}"

    def details(self, cause: RankEnd, log: Callable[[int], str]) -> list[str]:
        """Lines beside the headline: the end of the traceback, who returned early, who failed afterwards."""
        lines = []
        if cause.rank >= 0:
            lines += [f"    {line.decode(errors='replace')}" for line in cause.last_lines()]
            lines.append(f"its log: {log(cause.rank)}")
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

    def exit_code(self) -> int:
        """Of the job, once there is a cause: as the rank itself ended, where it did so by itself."""
        assert self.cause is not None
        end = self.ends.get(self.cause.rank, self.cause)
        return (self.cause if end.signalled or end.code == 0 else end).exit_code


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
