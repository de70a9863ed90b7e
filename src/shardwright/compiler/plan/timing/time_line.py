"""The time line of a step on one device, which computes on one stream and communicates on another.

A step is a sequence of acts, as its program has them: it computes, it begins to communicate, it waits for what it has
begun, or it communicates and waits at once. What was begun goes on in the order in which it began, one after the other,
beside what is computed meanwhile; for the last of it the step waits at its end. Computing stands still only for what it
waits for, so that at any time at least one of both goes on.

Where both go on at once each is slower, since collectives take processors and memory bandwidth from computing: of the
shorter of the two the hardware hides a share (`Hardware.hides_gradients`). Both then have the speed 1 / (2 - share),
and a step takes what it computes and communicates, less that share of the time in which it does both. What is
communicated at once has the links for itself: what was begun before stands still meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Stream = Literal["computing", "communicating"]


@dataclass(frozen=True)
class Work:
    """Computing, or communicating, for one operator in one direction; "" where no operator is concerned."""

    stream: Stream
    backward: bool
    operator: str
    seconds: float


@dataclass(frozen=True, eq=False)
class Begun:
    """Communication that goes on beside computing; ``bytes`` is the memory of what it makes."""

    work: Work
    bytes: int = 0


@dataclass(frozen=True)
class Act:
    """One act of a step: it does some work and waits for it, or it begins or awaits what goes on meanwhile."""

    kind: Literal["does", "begins", "awaits"]
    of: Work | Begun


def does(work: Work) -> Act:
    """Return the act that works and waits for it."""
    return Act("does", work)


def begins(begun: Begun) -> Act:
    """Return the act after which something goes on."""
    return Act("begins", begun)


def awaits(begun: Begun) -> Act:
    """Return the act that waits for what goes on."""
    return Act("awaits", begun)


@dataclass(frozen=True)
class Event:
    """Work between two times of a step; what stands still in between has several events."""

    work: Work
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TimeLine:
    """The events of a step, in the order in which they end, and the seconds in which it computed and communicated."""

    events: tuple[Event, ...]
    together_s: float  # of the work, that was done while other work went on
    end_s: float


def time_line(acts: Sequence[Act], hides: float) -> TimeLine:
    """Return when everything is done, where the hardware hides this share of the shorter of both."""
    clock = _Clock(hides)
    for act in acts:
        if isinstance(act.of, Work):
            clock.do(act.of)
        elif act.kind == "begins":
            clock.begin(act.of)
        else:
            clock.wait(act.of)
    return clock.ended()


class _Clock:
    def __init__(self, hides: float) -> None:
        self._slower = 2 - hides  # seconds for one of work, where both go on
        self._now = self._together = 0.0
        self._begun: deque[tuple[Begun, float]] = deque()  # in order, with the seconds that are left
        self._since = 0.0  # when the first of them went on
        self._events: list[Event] = []

    def do(self, work: Work) -> None:
        if work.stream == "communicating":
            self._stand_still()
        start, left = self._now, work.seconds
        while left and self._begun and work.stream == "computing":
            left = self._both(left)
        self._now += left
        self._events.append(Event(work, start, self._now))
        if work.stream == "communicating":
            self._since = self._now

    def begin(self, begun: Begun) -> None:
        if not self._begun:
            self._since = self._now
        self._begun.append((begun, begun.work.seconds))

    def wait(self, begun: Begun) -> None:
        while any(begun is other for other, _ in self._begun):
            self._end_first()

    def ended(self) -> TimeLine:
        while self._begun:
            self._end_first()
        return TimeLine(tuple(self._events), self._together, self._now)

    def _both(self, computing_s: float) -> float:
        """Compute beside the first of what was begun, until one of both is done; return what is left to compute."""
        first, left = self._begun[0]
        both = min(computing_s, left)
        self._now += both * self._slower
        self._together += both
        self._begun[0] = first, left - both
        if both == left:
            self._end_first()
        return computing_s - both

    def _end_first(self) -> None:
        begun, left = self._begun.popleft()
        self._now += left
        self._events.append(Event(begun.work, self._since, self._now))
        self._since = self._now

    def _stand_still(self) -> None:
        if self._begun and self._now > self._since:
            self._events.append(Event(self._begun[0][0].work, self._since, self._now))


def with_prefetch(acts: Sequence[Act], most_bytes: float, *, one_ahead: bool = False) -> list[Act]:
    """Return the acts in which all that is waited for is begun as late as it takes for computing to wait for nothing.

    What has no act in which it begins gets one here. It keeps the order in which it is waited for. What is begun and
    not yet waited for makes no more than ``most_bytes``, and all begins with the first act at the earliest. With
    ``one_ahead`` each begins where the one before it is waited for at the earliest, and the first where it is itself.
    """
    given = {id(act.of) for act in acts if act.kind == "begins"}
    waits = [
        (at, act.of) for at, act in enumerate(acts)
        if act.kind == "awaits" and isinstance(act.of, Begun) and id(act.of) not in given
    ]  # fmt: skip
    computed = [act.of.seconds if isinstance(act.of, Work) and act.of.stream == "computing" else 0.0 for act in acts]
    before = [0.0, *accumulate(computed)]  # the seconds that are computed before each act
    starts = _latest_starts(waits, before)
    beginning: Mapping[int, list[Act]] = defaultdict(list)
    first = ahead_bytes = 0  # of what is begun before its turn
    for number, (at, begun) in enumerate(waits):
        ahead_bytes += begun.bytes
        while first <= number and (ahead_bytes > most_bytes or (one_ahead and first < number)):
            ahead_bytes -= waits[first][1].bytes
            first += 1
        alone = first > number or (one_ahead and number == 0)
        earliest = at if alone else waits[first - 1][0] + 1 if first else 0
        beginning[max(starts[number], earliest)].append(begins(begun))
    return [each for at, act in enumerate(acts) for each in (*beginning[at], act)]


def _latest_starts(waits: Sequence[tuple[int, Begun]], before: Sequence[float]) -> list[int]:
    """Return before which act each begins at the latest, where these take as long as that and go on one by one."""
    found, next_s = [0] * len(waits), float("inf")
    for number in reversed(range(len(waits))):
        at, begun = waits[number]
        next_s = min(before[at], next_s) - begun.work.seconds
        found[number] = max(bisect_right(before, next_s, hi=at + 1) - 1, 0)
    return found
