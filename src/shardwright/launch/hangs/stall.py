"""The detection of a hang: no rank has finished a step or written anything for the time of ``--stall-timeout``.

The launcher then asks the supervisors of all hosts where their ranks are. Where one of them has heard of its ranks
meanwhile, as when the line between the hosts was slow, it was no hang, and the wait begins anew.

Without ``--stall-timeout`` nobody looks at the steps of ranks. Where none has written anything for a while, a person is
told of the option, once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.launch.hangs.stacks import Observation
    from shardwright.launch.hangs.stall_verdict import Hang

STALLED_CODE = 124  # as of timeout(1)
_ANSWER_S = 12.0  # what supervisors need is bounded to less; the line to another host may be down for a lease
_SHARE = 0.75  # of the timeout: supervisors look at the pulses of their ranks eight times in it
HINT_S = 180.0
HINT = (
    f"no rank has written anything for {HINT_S / 60:g} minutes; should the job hang, `--stall-timeout SECONDS` shows "
    "where each rank is, and ends it"
)


class StallWatch:
    """The wait for signs of life of all ranks, for ``timeout_s``, which is None without ``--stall-timeout``.

    ``hears`` says whether the launcher hears what ranks write, so that their silence says something.
    """

    def __init__(self, timeout_s: float | None, hears: bool = True) -> None:
        self.timeout_s = timeout_s
        self.observations: list[Observation] = []
        self._hints = timeout_s is None and hears
        self._moved_s: float | None = None  # None until all ranks have started, and after a report
        self._reported = False
        self._waits: set[str] | None = None  # the hosts that have been asked and have not answered
        self._until_s = 0.0  # when the time to answer is over

    def moved(self) -> bool:
        """Note a sign of life of a rank. Returns whether it is the first after a report."""
        self._moved_s, self._waits = time.monotonic(), None
        again, self._reported = self._reported, False
        return again

    def reported(self) -> None:
        """Note that the hang was reported and the job goes on: nothing is asked until a rank has moved."""
        self._moved_s = self._waits = None
        self._reported = True

    @property
    def silent_hosts(self) -> list[str]:
        return sorted(self._waits or ())

    def wait_s(self) -> float | None:
        """Return the seconds until it is time to ask, to do without an answer, or to hint; None for never."""
        after_s = HINT_S if self._hints else self.timeout_s
        if after_s is None or self._moved_s is None:
            return None
        until_s = self._moved_s + after_s if self._waits is None else self._until_s
        return max(0.0, until_s - time.monotonic())

    def should_ask(self) -> bool:
        return self.timeout_s is not None and self._waits is None and self.wait_s() == 0

    def should_hint(self) -> bool:
        """Return, once, that it is time to tell a person of the option."""
        due = self._hints and self.wait_s() == 0
        self._hints = self._hints and not due
        return due

    def ask(self, hosts: Mapping[str, float | None]) -> None:
        """Wait for the answers of these hosts, which have their leases and a while to give them."""
        self.observations = []
        self._waits = set(hosts)
        self._until_s = time.monotonic() + _ANSWER_S + max((lease_s or 0.0 for lease_s in hosts.values()), default=0.0)

    def answered(self, host: str, quiet_s: float, data: bytes) -> None:
        """Take the answer of a host: its encoded observations, and for how long it had been quiet when asked."""
        if self._waits is None or self.timeout_s is None:
            return  # it has gone on meanwhile
        if quiet_s < _SHARE * self.timeout_s:
            self.moved()
            return
        from shardwright.launch.hangs.stacks import decode_observations

        self.observations += decode_observations(data)
        self._waits.discard(host)

    def is_stalled(self) -> bool:
        """Return whether all have answered, or the time for that is over."""
        return self._waits is not None and (not self._waits or self.wait_s() == 0)

    def hang(self, returned: tuple[int, ...], hosts: Mapping[int, str]) -> Hang:
        """Return the observations, once it `is_stalled`; ``returned`` are ranks that ended with 0 before."""
        from shardwright.launch.hangs.stall_verdict import Hang

        assert self.timeout_s is not None
        return Hang(tuple(self.observations), self.timeout_s, returned, hosts, self.silent_hosts)
