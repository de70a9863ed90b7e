"""The verdict on a hang: the location of each rank in words, and one sentence that names the odd one out.

What the rank itself has written comes first, since it knows the step and the operator; then the innermost frame of its
stack that says anything: a function of torch.distributed, a data loader, autograd's backward, and else the innermost
line that belongs to the script.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Literal

from shardwright.common import package
from shardwright.common.pulse import PulseReading
from shardwright.common.words import describe_ranks
from shardwright.launch.hangs.stacks import Frame, Observation, Stack
from shardwright.launch.joblog.judge import signal_name

# A rank that is "waiting" is in something that others must come to; "known" is any other place that has a name.
LocationKind = Literal["waiting", "known", "stopped", "kernel", "unknown"]

_BUSY = 0.5  # of a processor
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+/|^<frozen |^<string>$")
_OURS = re.compile(rf"/shardwright/(?:{'|'.join(package.WINGS)}|__main__)(?:/\w+)*\.py$")
_PROGRAM = "<program of rank "  # the file name of a local program (`runtime`)
_WRAPPERS = frozenset({"wrapper", "_wrapper", "inner", "_call_impl", "_wrapped_call_impl", "__call__"})


@dataclass(frozen=True)
class RankLocation:
    """The location of a rank: ``text`` reads after "rank 3 is", ``where`` is the same without a stop."""

    kind: LocationKind
    text: str
    where: str


def location_of(seen: Observation) -> RankLocation:
    """Return the location of a rank as its observation shows it."""
    where, waiting = _where(seen)
    if seen.state in ("T", "t"):
        how = f" ({signal_name(seen.stopped_by)})" if seen.stopped_by else " by a debugger" if seen.state == "t" else ""
        return RankLocation("stopped", f"stopped{how}{f' {where}' if where else ''}", where)
    if seen.state == "D":
        what = f", in {seen.waits_in}" if seen.waits_in else ""
        return RankLocation("kernel", f"waiting for the kernel (state D{what}) {where}".rstrip(), where)
    if not where:
        kernel = f"the kernel has it in {seen.waits_in}" if seen.waits_in else f"its state is {seen.state}"
        return RankLocation("unknown", f"somewhere ({kernel})" if seen.state else "gone", "")
    return RankLocation("waiting" if waiting else "known", where, where)


def _where(seen: Observation) -> tuple[str, bool]:
    """Return the location in words that begin with "in", if known, and whether the rank waits there for others."""
    idle = seen.busy < _BUSY
    pulse = seen.pulse
    step = f" of step {pulse.step}" if pulse is not None and pulse.step else ""
    if pulse is not None and pulse.operation:
        what = f"{pulse.operation}{step}{f' for {pulse.site}' if pulse.site else ''}"
        return (f"in {what}", True) if pulse.reached else (f"computing on its GPU, before {what}", False)
    place = _of_stacks(seen.stacks, step, idle)
    if place is None:
        return (f"in{step.removeprefix(' of')}" if step else ""), False
    text, waiting = place
    return text + ("" if idle or waiting else ", computing"), waiting


def _of_stacks(stacks: tuple[Stack, ...], step: str, idle: bool) -> tuple[str, bool] | None:
    """Return the location of the main thread; of another in a collective where that waits for its backward."""
    places = [_of_stack(stack, step, idle) for stack in stacks if stack]
    if not places:
        return None
    if _is_backward(stacks[0]):
        return next((place for place in places[1:] if place[1]), places[0])
    return places[0]


def _of_stack(stack: Stack, step: str, idle: bool) -> tuple[str, bool]:
    inside = list(takewhile(_is_library, stack))
    script = stack[len(inside)] if len(inside) < len(stack) else None
    called = f" (called at {_short(script)})" if script is not None and not _is_program(script) else ""
    if names := list(_functions(inside, lambda frame: "/torch/distributed/" in frame.file)):
        return f"in {names[-1]}{step}{called}", True  # also where it is busy: MPI asks again and again
    if any(frame.file.startswith("<frozen importlib") for frame in inside):
        return f"in an import{called}", False
    if any("/torch/utils/data/" in frame.file for frame in inside):
        return f"in DataLoader{called}", False
    if _is_backward(stack):
        return f"in the backward{step}{called}", idle
    if script is not None and _is_program(script):
        return f"in the forward{step} (line {script.line} of its program)", False
    if names := list(_functions(inside, lambda frame: _OURS.search(frame.file) is not None)):
        return f"in {names[-1]} of shardwright{step}{called}", False
    return f"in {_short(script or stack[0])}{f' ({step[4:]})' if step else ''}", False


def _functions(frames: list[Frame], belongs: Callable[[Frame], bool]) -> Iterator[str]:
    """The names of functions, those of wrappers left out; the last is what was called from outside."""
    return (frame.function for frame in frames if belongs(frame) and frame.function not in _WRAPPERS)


def _is_library(frame: Frame) -> bool:
    return _LIBRARY.search(frame.file) is not None or _OURS.search(frame.file) is not None


def _is_backward(stack: Stack) -> bool:
    return any("/torch/autograd/" in frame.file for frame in takewhile(_is_library, stack))


def _is_program(frame: Frame) -> bool:
    return frame.file.startswith(_PROGRAM)


def _short(frame: Frame) -> str:
    """A frame in the words "train.py:12 in load"."""
    name = frame.file.rpartition("/")[2]
    return f"{name}:{frame.line}" + (f" in {frame.function}" if frame.function != "<module>" else "")


Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Hang:
    """The observations of all ranks while the job hung.

    ``returned`` are ranks that ended with 0 before; ``hosts`` names the host of each rank, where there are several;
    ``silent`` are the hosts that have not answered.
    """

    observations: tuple[Observation, ...]
    timeout_s: float
    returned: Ranks = ()
    hosts: Mapping[int, str] | None = None
    silent: Sequence[str] = ()

    @cached_property
    def places(self) -> dict[int, RankLocation]:
        """The location of each rank, in their order."""
        return {seen.rank: location_of(seen) for seen in sorted(self.observations, key=lambda seen: seen.rank)}

    @property
    def groups(self) -> dict[str, Ranks]:
        """The ranks at each location, the largest group first."""
        groups: dict[str, Ranks] = {}
        for rank, place in self.places.items():
            groups[place.text] = (*groups.get(place.text, ()), rank)
        return dict(sorted(groups.items(), key=lambda group: -len(group[1])))

    def on_host(self, ranks: Collection[int]) -> str:
        """Return the words " on HOST" where the ranks are all on one host of several, else nothing."""
        names = {(self.hosts or {}).get(rank, "") for rank in ranks}
        return f" on {names.pop()}" if len(names) == 1 and "" not in names else ""

    def verdict(self) -> tuple[str, Ranks]:
        """Return one line, and the ranks that it blames, if any: where they are, and who began other collectives."""
        text, blamed = self._by_places()
        other, apart = self.other_calls()
        return (f"{text}; {other}" if other else text), blamed or apart

    def other_calls(self) -> tuple[str, Ranks]:
        """Return what is said of ranks that began other collectives in a step than most, and these; else nothing.

        It is the first step in which they did of those that all ranks remember. Ranks of one pipeline stage are
        compared.
        """
        found = map(self._other_calls_of, self._by_stage(self.places))
        return next((each for each in found if each[0]), ("", ()))

    def _other_calls_of(self, ranks: Ranks) -> tuple[str, Ranks]:
        pulses = {rank: self._pulse(rank) for rank in ranks}
        of_ranks = {rank: {step: told for step, *told in pulse.calls} for rank, pulse in pulses.items() if pulse}
        if len(of_ranks) < max(2, len(pulses)):
            return "", ()
        for step in sorted(set.intersection(*(set(told) for told in of_ranks.values()))):
            told = {rank: (known[step][0], known[step][1]) for rank, known in of_ranks.items()}
            (most, having), *others = Counter(told.values()).most_common()
            if not others:
                continue
            if having == others[0][1]:
                alike = {what: [rank for rank, each in told.items() if each == what] for what in told.values()}
                each = ", ".join(f"{describe_ranks(ranks)} {what[0]}" for what, ranks in alike.items())
                return f"in step {step} ranks did not begin the same collectives: {each}", ()
            odd = tuple(rank for rank, each in told.items() if each != most)
            counts = ", ".join(str(count) for count in sorted({told[rank][0] for rank in odd}))
            began = f"{describe_ranks(odd)}{self.on_host(odd)} began other collectives in step {step} than the rest"
            return f"{began}: {counts} of them, and the rest {most[0]}", odd
        return "", ()

    def _by_places(self) -> tuple[str, Ranks]:
        """Return a line of where ranks are, and the ranks that it blames, if any.

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
        if len(self._by_stage(self.places)) > 1:
            each = "; ".join(self._is(ranks) for ranks in self.groups.values())
            return f"ranks of several pipeline stages wait for each other: {each}", ()
        if len(most) == len(rest[0][1]):
            return self._halves()
        odd = tuple(sorted(rank for _, ranks in rest for rank in ranks))
        ahead = self._ahead(odd, most)
        how = {1: "passed or skipped that one", -1: "not come to that one"}.get(
            ahead, "skipped that one, or called another in its place"
        )
        return f"{self._is(odd)} while {_wait(most)} {first}: {'they have' if len(odd) > 1 else 'it has'} {how}", odd

    def _halves(self) -> tuple[str, Ranks]:
        """Blame those further in the program: there is no majority, but they cannot have been where others wait."""
        far = {rank: done for rank in self.places if (done := self._done(rank)) is not None}
        front = tuple(rank for rank, done in far.items() if done == max(far.values()))
        behind = tuple(rank for rank in self.places if rank not in front)
        if len(far) < len(self.places) or not behind:
            each = "; ".join(self._is(ranks) for ranks in self.groups.values())
            return f"ranks wait in different collectives, of which some left one out or called one twice: {each}", ()
        have = "have" if len(front) > 1 else "has"
        return f"{self._is(front)} and {have} passed or skipped what others wait in: {self._is(behind)}", front

    def _ahead(self, odd: Ranks, most: Ranks) -> int:
        """Return 1 where all of the odd ranks are further in the program, -1 where none is as far, else 0."""
        here = [done for rank in odd if (done := self._done(rank)) is not None]
        there = [done for rank in most if (done := self._done(rank)) is not None]
        if len(here) < len(odd) or len(there) < len(most):
            return 0
        return (min(here) > max(there)) - (max(here) < min(there))

    def _done(self, rank: int) -> tuple[int, int] | None:
        pulse = self._pulse(rank)
        return (pulse.step, pulse.position) if pulse is not None and pulse.position else None

    def _pulse(self, rank: int) -> PulseReading | None:
        [pulse] = [seen.pulse for seen in self.observations if seen.rank == rank]
        return pulse

    def _by_stage(self, ranks: Collection[int]) -> list[Ranks]:
        """Return the ranks of each pipeline stage, all ranks together where there are no stages."""
        found: dict[int, Ranks] = {}
        for rank in ranks:
            pulse = self._pulse(rank)
            stage = 0 if pulse is None else pulse.stage
            found[stage] = (*found.get(stage, ()), rank)
        return list(found.values())

    def _fewest_collectives(self) -> Ranks:
        """Return the ranks behind the others of their stage by count: on GPUs nobody is seen inside a collective."""
        behind: list[int] = []
        for ranks in self._by_stage(self.places):
            pulses = {rank: self._pulse(rank) for rank in ranks}
            counts = {rank: p.collectives for rank, p in pulses.items() if p is not None and p.collectives}
            if len(counts) == len(pulses) and len(set(counts.values())) > 1:
                behind += [rank for rank, count in counts.items() if count == min(counts.values())]
        return tuple(behind)

    def _is(self, ranks: Ranks) -> str:
        return f"{describe_ranks(ranks)}{self.on_host(ranks)} {'are' if len(ranks) > 1 else 'is'} {self._where(ranks)}"

    def _where(self, ranks: Ranks) -> str:
        texts = {self.places[rank].text for rank in ranks}
        return texts.pop() if len(texts) == 1 else f"in {len(texts)} places"


def _wait(ranks: Ranks) -> str:
    return f"{len(ranks)} ranks wait" if len(ranks) > 1 else f"{describe_ranks(ranks)} waits"
