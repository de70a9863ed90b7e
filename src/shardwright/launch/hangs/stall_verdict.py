"""Who holds a job up that hangs: from where each rank is to one sentence that names the odd one out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.common.pulse import Reading
from shardwright.launch.hangs.places import Place, place_of
from shardwright.launch.hangs.stacks import Observation
from shardwright.launch.joblog.failure import describe_ranks

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Hang:
    """Where all ranks of a job were while it hung. ``returned`` are ranks that ended with 0 before; ``hosts`` names the
    host of each rank, where there are several; ``silent`` are the hosts that have not told where their ranks are.
    """

    observations: tuple[Observation, ...]
    timeout_s: float
    returned: Ranks = ()
    hosts: Mapping[int, str] | None = None
    silent: Sequence[str] = ()

    @cached_property
    def places(self) -> dict[int, Place]:
        """Where each rank is, in their order."""
        return {seen.rank: place_of(seen) for seen in sorted(self.observations, key=lambda seen: seen.rank)}

    @property
    def groups(self) -> dict[str, Ranks]:
        """The ranks at each place, the largest group first."""
        groups: dict[str, Ranks] = {}
        for rank, place in self.places.items():
            groups[place.text] = (*groups.get(place.text, ()), rank)
        return dict(sorted(groups.items(), key=lambda group: -len(group[1])))

    def on_host(self, ranks: Collection[int]) -> str:
        """The words " on HOST" where the ranks are all on one host of several, else nothing."""
        names = {(self.hosts or {}).get(rank, "") for rank in ranks}
        return f" on {names.pop()}" if len(names) == 1 and "" not in names else ""

    def verdict(self) -> tuple[str, Ranks]:
        """One line, and the ranks that it blames, if any.

        The first of these that is so: a rank is stopped, or hangs in the kernel; has returned while others wait; is
        elsewhere while others wait; all wait, but not in the same; or some have begun fewer collectives.
        """
        waiting, elsewhere = self._of_kind("waiting"), self._of_kind("known", "unknown")
        everyone = tuple(self.places)
        if held := self._of_kind("stopped") or self._of_kind("kernel"):
            return self._held(held), held
        if waiting and self.returned:
            return f"{describe_ranks(self.returned)} returned 0 before, and {self._is(waiting)}", self.returned
        if waiting and elsewhere:
            return f"{self._is(elsewhere)} while {_wait(waiting)} {self._where(waiting)}", elsewhere
        if waiting:
            return self._all_waiting()
        if late := self._fewest_collectives():
            others = tuple(rank for rank in everyone if rank not in late)
            have = "have" if len(late) > 1 else "has"
            return f"{self._is(late)} and {have} begun fewer collectives than the others: {self._is(others)}", late
        return (self._is(everyone) if everyone else "nobody has told where they are"), ()

    def _of_kind(self, *kinds: str) -> Ranks:
        return tuple(rank for rank, place in self.places.items() if place.kind in kinds)

    def _held(self, held: Ranks) -> str:
        others = tuple(rank for rank in self.places if rank not in held)
        if not others:
            return self._is(held)
        if all(self.places[rank].kind == "waiting" for rank in others):
            them = "them" if len(held) > 1 else "it"
            return f"{self._is(held)}; {_wait(others)} for {them} {self._where(others)}"
        return f"{self._is(held)}; {self._is(others)}"

    def _all_waiting(self) -> tuple[str, Ranks]:
        (first, most), *rest = self.groups.items()
        if not rest and len(most) == 1:
            return f"{self._is(most)}, for others that are not there", ()
        if not rest:
            why = "the line between them is down, or what they pass differs in size"
            return f"all {len(most)} ranks wait for each other {first}: {why}", ()
        if len(most) == len(rest[0][1]):
            return self._halves()
        odd = tuple(sorted(rank for _, ranks in rest for rank in ranks))
        ahead = self._ahead(odd, most)
        how = {1: "passed or skipped that one", -1: "not come to that one"}.get(
            ahead, "skipped that one, or called another in its place"
        )
        return f"{self._is(odd)} while {_wait(most)} {first}: {'they have' if len(odd) > 1 else 'it has'} {how}", odd

    def _halves(self) -> tuple[str, Ranks]:
        """No majority says what is right; but who comes later in the program cannot have been where others wait."""
        far = {rank: done for rank in self.places if (done := self._done(rank)) is not None}
        front = tuple(rank for rank, done in far.items() if done == max(far.values()))
        behind = tuple(rank for rank in self.places if rank not in front)
        if len(far) < len(self.places) or not behind:
            each = "; ".join(self._is(ranks) for ranks in self.groups.values())
            return f"ranks wait in different collectives, of which some left one out or called one twice: {each}", ()
        have = "have" if len(front) > 1 else "has"
        return f"{self._is(front)} and {have} passed or skipped what others wait in: {self._is(behind)}", front

    def _ahead(self, odd: Ranks, most: Ranks) -> int:
        """Which ranks are further: 1 where all of the odd ones are further in the program, -1 where none is as far,
        else 0.
        """
        here = [done for rank in odd if (done := self._done(rank)) is not None]
        there = [done for rank in most if (done := self._done(rank)) is not None]
        if len(here) < len(odd) or len(there) < len(most):
            return 0
        return (min(here) > max(there)) - (max(here) < min(there))

    def _done(self, rank: int) -> tuple[int, int] | None:
        """The step, and how far the rank is in it, where that is known."""
        pulse = self._pulse(rank)
        return (pulse.step, pulse.position) if pulse is not None and pulse.position else None

    def _pulse(self, rank: int) -> Reading | None:
        [pulse] = [seen.pulse for seen in self.observations if seen.rank == rank]
        return pulse

    def _fewest_collectives(self) -> Ranks:
        """Where collectives run beside the program, as on GPUs, nobody is seen inside one."""
        pulses = {rank: self._pulse(rank) for rank in self.places}
        counts = {rank: pulse.collectives for rank, pulse in pulses.items() if pulse is not None and pulse.collectives}
        if len(counts) < len(pulses) or len(set(counts.values())) < 2:
            return ()
        return tuple(rank for rank, count in counts.items() if count == min(counts.values()))

    def _is(self, ranks: Ranks) -> str:
        return f"{describe_ranks(ranks)}{self.on_host(ranks)} {'are' if len(ranks) > 1 else 'is'} {self._where(ranks)}"

    def _where(self, ranks: Ranks) -> str:
        texts = {self.places[rank].text for rank in ranks}
        return texts.pop() if len(texts) == 1 else f"in {len(texts)} places"


def _wait(ranks: Ranks) -> str:
    return f"{len(ranks)} ranks wait" if len(ranks) > 1 else f"{describe_ranks(ranks)} waits"
