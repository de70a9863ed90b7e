"""Schedules of pipelines: in which order each group of ranks does the forward and the backward of every microbatch.

A schedule is a table of actions, a row for each group of ranks. `simulate` goes through it before anything runs: it
finds out whether the groups would wait for each other forever, how many microbatches each holds, and when it ends.

- ``gpipe``: all forwards, then all backwards (Huang et al., *GPipe*, 2019). Every group holds all microbatches.
- ``1f1b``: after as many forwards as there are stages behind, a forward and a backward in turns (Narayanan et al.,
  *PipeDream*, 2019; *Megatron-LM*, 2021). A group holds at most as many microbatches as there are stages from it on.
- ``interleaved``: 1F1B in which each group has several stages, of which each is a fraction as long, so that they wait a
  fraction of the time and send as many times as much (Narayanan et al., *Megatron-LM*, 2021).
- ``zb-h1``: 1F1B whose backward is done in two actions. The first gives the gradients that the stage before waits for,
  the second those of weights, for which nobody waits: it fills the time in which others wait (Qi et al., *Zero Bubble
  Pipeline Parallelism*, 2023). Every group holds as many microbatches as there are stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import UsageError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")

SPLIT = ("zb-h1",)
"""Those that do the gradients of weights in actions of their own."""

UNDER_WAY = 2
"""Messages in one direction that a group has sent and not waited for: before a further one it waits for the first."""


class Action(NamedTuple):
    """The forward or the backward of a microbatch in a stage.

    In a schedule with ``weights`` a backward leaves the gradients of weights to that action.
    """

    kind: Literal["forward", "backward", "weights"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}" + (f"@{self.stage}")


Table = tuple[tuple[Action, ...], ...]
"""What each group of ranks does, in order."""


def read_schedule(given: str) -> tuple[str, int]:
    """Return the name of a schedule, and how many stages each group of ranks has.

    >>> read_schedule("1f1b"), read_schedule("interleaved"), read_schedule("interleaved:4")
    (('1f1b', 1), ('interleaved', 2), ('interleaved', 4))

    Raises:
        UsageError: where it is none.
    """
    name, _, each = given.partition(":") if isinstance(given, str) else (None, "", "")
    if name not in SCHEDULES or (each and not (name == "interleaved" and each.isdigit() and int(each) > 1)):
        raise UsageError(
            f"schedule is {given!r}; expected one of {', '.join(map(repr, SCHEDULES))}, or as 'interleaved:4' how many "
            "stages each group of ranks has (--schedule)"
        )
    return name, (int(each or 2) if name == "interleaved" else 1)


def schedule_problem(name: str, groups: int, microbatches: int) -> str | None:
    """Return what is wrong with a schedule for so many groups of ranks and microbatches; None where nothing is."""
    if name == "interleaved" and groups == 1:
        return "schedule='interleaved' needs several groups of ranks; type a larger pp= in mesh=, or schedule='1f1b'"
    if name == "interleaved" and microbatches % groups:
        return (
            f"schedule='interleaved' needs a number of microbatches that {groups} groups of ranks divide, and there "
            f"are {microbatches}; type microbatches={max(1, microbatches // groups) * groups} (--microbatches)"
        )
    return None


def schedule(name: str, groups: int, microbatches: int, stages: int | None = None) -> Table:
    """Return the actions of each group of ranks; stage ``s`` is on group ``s % groups``.

    >>> for row in schedule("1f1b", 3, 4):
    ...     print(*row)
    F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 B2@0 B3@0
    F0@1 F1@1 B0@1 F2@1 B1@1 F3@1 B2@1 B3@1
    F0@2 B0@2 F1@2 B1@2 F2@2 B2@2 F3@2 B3@2

    Raises:
        UsageError: where there is no such schedule.
    """
    stages = groups if stages is None else stages
    if problem := schedule_problem(name, groups, microbatches):
        raise UsageError(problem)
    made: dict[str, Callable[[int], tuple[Action, ...]]] = {
        "gpipe": lambda group: _gpipe(group, microbatches),
        "1f1b": lambda group: _one_stage_in_turns(group, groups, microbatches),
        "interleaved": lambda group: _interleaved(group, groups, microbatches, stages // groups),
        "zb-h1": lambda group: tuple(_zero_bubble(group, groups, microbatches)),
    }
    return tuple(made[name](group) for group in range(groups))


def _gpipe(group: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action("forward", group, m) for m in range(microbatches)]
    # Autograd takes what was made last first.
    return (*forwards, *(Action("backward", group, m) for m in reversed(range(microbatches))))


def _in_turns(forwards: Sequence[Action], backwards: Sequence[Action], first: int) -> tuple[Action, ...]:
    """Return ``first`` forwards, then a forward and a backward in turns, then the backwards that are left."""
    first = min(first, len(forwards))
    found = list(forwards[:first])
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        found += [forward, backward]
    return (*found, *backwards[len(forwards) - first :])


def _one_stage_in_turns(group: int, groups: int, microbatches: int) -> tuple[Action, ...]:
    """Return 1F1B of a group of ranks with one stage."""
    forwards = [Action("forward", group, m) for m in range(microbatches)]
    backwards = [Action("backward", group, m) for m in range(microbatches)]
    return _in_turns(forwards, backwards, groups - 1 - group)


def _interleaved(group: int, groups: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    """Return 1F1B in rounds: as many microbatches as there are groups through its first stage, then its second, ..."""
    order = [
        (chunk, start + place)
        for start in range(0, microbatches, groups)
        for chunk in range(chunks)
        for place in range(groups)
    ]
    forwards = [Action("forward", chunk * groups + group, m) for chunk, m in order]
    backwards = [Action("backward", (chunks - 1 - chunk) * groups + group, m) for chunk, m in order]
    first = (groups - 1 - group) * 2 + (chunks - 1) * groups
    return _in_turns(forwards, backwards, first)


def _zero_bubble(group: int, groups: int, microbatches: int) -> Iterator[Action]:
    """Yield 1F1B, in which the gradients of weights follow as many backwards later as there are stages before."""
    for action in _one_stage_in_turns(group, groups, microbatches):
        yield action
        if action.kind == "backward" and action.microbatch >= group:
            yield Action("weights", group, action.microbatch - group)
    yield from (Action("weights", group, m) for m in range(max(0, microbatches - group), microbatches))


Floats = NDArray[np.float64]
Time = TypeVar("Time", float, Floats)
"""Seconds of one cut into stages, or of several."""


class StageSeconds(NamedTuple):
    """What a stage takes for a microbatch: its forward, its backward, and a message to the next stage, or back.

    ``weights`` is what the action of that name takes, where a schedule has it; it is not in ``backward``. A message
    ``on_demand`` begins when its reader waits for it, as on GPUs, and not while that computes.
    """

    forward: float
    backward: float
    message: float = 0.0
    weights: float = 0.0
    on_demand: bool = False

    def of(self, kind: str) -> float:
        """Return what an action of this kind takes."""
        return float(getattr(self, kind))


@dataclass(frozen=True)
class Run:
    """A schedule that was gone through: when each action ends, and how many microbatches each group holds at most.

    A microbatch of a stage is held from its forward to its backward, or to the gradients of its weights.
    """

    ends: dict[Action, float]
    held: tuple[int, ...]
    busy: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The seconds until all is done."""
        return max(self.ends.values(), default=0.0)

    @property
    def idle(self) -> float:
        """The share of the time in which the busiest group waits, the bubble."""
        return 1 - max(self.busy) / self.seconds if self.seconds else 0.0


def simulate(table: Table, stages: Sequence[StageSeconds]) -> Run:
    """Go through a schedule: each group does its actions in order, each as soon as what it reads has come.

    Messages from one group to another go one after the other.

    >>> run = simulate(schedule("1f1b", 4, 8), [StageSeconds(1.0, 2.0)] * 4)
    >>> run.held, run.seconds, round(run.idle, 3)  # 3 / (8 + 3)
    ((4, 3, 2, 1), 33.0, 0.273)

    Raises:
        AssertionError: where groups wait for each other forever, or take messages in another order than they come.
    """
    order = turns(table, len(stages))
    took = {kind: [stage.of(kind) for stage in stages] for kind in ("forward", "backward", "weights")}
    on_demand = [stage.on_demand for stage in stages]
    ends = _ends(order, took, [stage.message for stage in stages], on_demand, max, 0.0)
    busy = tuple(sum(stages[each.stage].of(each.kind) for each in row) for row in table)
    held = tuple(most_held(row).total() for row in table)
    return Run({turn.action: end for turn, end in zip(order, ends, strict=True)}, held, busy)


def seconds_of_cuts(
    order: Sequence[Turn], forward: Floats, backward: Floats, message: Floats, *, on_demand: bool = False
) -> Floats:
    """Return what `Run.seconds` says of each of several cuts into stages, which are gone through at once.

    >>> two, none = np.array([[1.0, 2.0], [1.0, 1.0]]), np.zeros((2, 2))
    >>> seconds_of_cuts(turns(schedule("gpipe", 2, 3), 2), two, none, none)
    array([4., 7.])

    Args:
        order: the actions of the schedule, as `turns` returns them.
        forward: seconds of each stage for a microbatch, a row for each stage and a column for each cut.
        backward: as many, gradients of weights with it.
        message: seconds to the next stage, and back.
        on_demand: whether messages are, as `StageSeconds` says.
    """
    took = {"forward": [*forward], "backward": [*backward], "weights": [*np.zeros_like(backward)]}
    of_stages = [on_demand] * len(forward)
    return reduce(np.maximum, _ends(order, took, [*message], of_stages, np.maximum, np.zeros(forward.shape[1])))


class Turn(NamedTuple):
    """An action, the group that does it, and its messages.

    That which it ``takes`` is named by the place in the order of who sends it, that which it ``sends`` by a stage: the
    message to the next one, and back. Each may be none.
    """

    action: Action
    group: int
    takes: int | None
    sends: int | None


def turns(table: Table, count: int) -> list[Turn]:
    """Return all actions in an order in which what each reads is there before it.

    Raises:
        AssertionError: where groups wait for each other forever, or take messages in another order than they come.
    """
    found: list[Turn] = []
    places: dict[Action, int] = {}
    comes: dict[Action, int] = {}  # by who takes a message, who has sent it
    at = [0] * len(table)
    sent = defaultdict[tuple[int, str], list[Action]](list)  # who takes what a group has sent in a direction
    while True:
        before = len(found)
        for group, row in enumerate(table):
            while at[group] < len(row):
                action = row[at[group]]
                reads, reader = _reads_message(action, count), _reader(action, count)
                ready = action in comes if reads else _is_ready(action, places)
                to = sent[group, action.kind]
                full = len(to) > UNDER_WAY and to[-1 - UNDER_WAY] not in places  # earlier ones were seen before
                if not ready or (reader and full):
                    break
                if reader:
                    to.append(reader)
                    comes[reader] = len(found)
                places[action] = len(found)
                found.append(
                    Turn(action, group, comes[action] if reads else None, _message(reader) if reader else None)
                )
                at[group] += 1
        if len(found) == before:
            break
    stuck = [str(row[place]) for place, row in zip(at, table, strict=True) if place < len(row)]
    assert not stuck, f"the groups wait for each other forever, before {', '.join(stuck)}"
    _check_order(table, count)
    return found


def _ends(
    order: Sequence[Turn],
    took: Mapping[str, Sequence[Time]],
    messages: Sequence[Time],
    on_demand: Sequence[bool],
    larger: Callable[[Time, Time], Time],
    start: Time,
) -> Iterator[Time]:
    """Yield when each action ends, of one cut into stages or, with arrays, of several.

    Args:
        took: seconds of actions, by their kind and their stage.
        messages: of each stage, to the next one and back.
    """
    free = defaultdict[int, Time](lambda: start)  # when a group has done what it did so far
    links = defaultdict[tuple[int, str], Time](lambda: start)  # when its last message in a direction has gone
    arrives: dict[int, Time] = {}  # messages under way, by who has sent them; when they were sent, if on demand
    for place, (action, group, takes, sends) in enumerate(order):
        begins = free[group]
        if takes is not None:
            message = _message(action)
            begins = larger(begins, arrives.pop(takes))
            begins = begins + messages[message] if on_demand[message] else begins
        free[group] = begins + took[action.kind][action.stage]
        if sends is not None:
            link = group, action.kind
            links[link] = larger(free[group], links[link]) + messages[sends]
            arrives[place] = free[group] if on_demand[sends] else links[link]
        yield free[group]


def least_seconds(both_s: float, name: str, groups: int, microbatches: int, slowest_s: float = 0.0) -> float:
    """Return seconds before which no cut into stages, however long each is, has ended on so many groups.

    In GPipe and 1F1B a group begins after the forward of one microbatch in the stages before its own, and their
    backward is left when it ends: with `P` the seconds before its stage, of `t` seconds, no end is before
    ``P + microbatches * t``, whatever the group. That is least where it is the same for all. And its first backward
    waits for that of all stages behind its own, while it has at most ``groups - 1`` forwards to do, of `f` seconds
    each, or in GPipe none: no end is before ``both_s + (microbatches - 1) * t - (groups - 1) * f``. In other schedules
    some group takes no less than all do on average.

    A message on demand is part of the seconds of the stage that waits for it, forward or backward.

    >>> round(least_seconds(3.0 * 4, "1f1b", groups=4, microbatches=8), 2)  # 33 for stages that are alike
    29.0
    >>> least_seconds(3.0 * 4, "1f1b", groups=4, microbatches=8, slowest_s=7 * 3.0 - 3 * 1.0)
    30.0

    Args:
        both_s: seconds of a microbatch in all stages, forward and backward.
        slowest_s: what is added to ``both_s`` above, of some group.
    """
    if name in ("gpipe", "1f1b"):
        return max(both_s / (1 - (1 - 1 / microbatches) ** groups), both_s + slowest_s)
    return both_s * microbatches / groups


def _reads_message(action: Action, count: int) -> bool:
    """Return whether an action reads what another group sends."""
    kind, stage, _ = action
    return stage > 0 if kind == "forward" else kind == "backward" and stage + 1 < count


def _message(reader: Action) -> int:
    """Return the stage whose message an action takes: of a forward the one before, of a backward its own."""
    return reader.stage - 1 if reader.kind == "forward" else reader.stage


def _is_ready(action: Action, done: Container[Action]) -> bool:
    """Return whether all that an action reads of its own group is there."""
    kind, stage, microbatch = action
    return kind == "forward" or Action("backward" if kind == "weights" else "forward", stage, microbatch) in done


def _reader(action: Action, count: int) -> Action | None:
    """Return the action of another group that takes the message of an action."""
    kind, stage, microbatch = action
    if kind == "forward":
        return Action("forward", stage + 1, microbatch) if stage + 1 < count else None
    return Action("backward", stage - 1, microbatch) if stage and kind == "backward" else None


_SIGNS = {"forward": ("0", 10), "backward": ("a", 26), "weights": ("A", 26)}  # the first of so many


def drawn(table: Table, stages: Sequence[StageSeconds], width: int = 96) -> list[str]:
    r"""Return a row of text for each group: time goes from left to right, in ``width`` equal parts.

    A digit is the forward of the microbatch with that last digit, a letter the backward of the microbatch with that
    place in the alphabet, a capital letter the gradients of its weights, a dot that the group waits.

    >>> print(*drawn(schedule("1f1b", 2, 3), [StageSeconds(1.0, 1.0)] * 2, width=8), sep="\n")
    01·a2b·c
    ·0a1b2c·

    Args:
        stages: what each takes.
    """
    run = simulate(table, stages)
    rows = []
    for row in table:
        cells = ["·"] * width
        for action in row:
            end = run.ends[action] / run.seconds * width
            start = end - stages[action.stage].of(action.kind) / run.seconds * width
            first, many = _SIGNS[action.kind]
            sign = chr(ord(first) + action.microbatch % many)
            cells[round(start) : round(end)] = sign * (round(end) - round(start))
        rows.append("".join(cells))
    return rows


def most_held(row: Sequence[Action]) -> Counter[int]:
    """Return the microbatches of each stage that a group holds when it holds most, from their forward to their end.

    The end is the backward, or, where the schedule has them apart, the gradients of weights.

    >>> most_held(schedule("interleaved", 2, 4, 4)[0])
    Counter({0: 3, 2: 2})
    """
    held, most = Counter[int](), Counter[int]()
    end = "weights" if any(action.kind == "weights" for action in row) else "backward"
    for kind, stage, _ in row:
        held[stage] += (kind == "forward") - (kind == end)
        if held.total() > most.total():
            most = +held
    return most


def _check_order(table: Table, count: int) -> None:
    """Check that messages from one group to another come in the order in which that takes them."""
    groups = len(table)
    for kind in ("forward", "backward"):
        sent: dict[tuple[int, int], list[Action]] = {}
        for group, row in enumerate(table):
            for action in row:
                if action.kind == kind and (reader := _reader(action, count)):
                    sent.setdefault((group, reader.stage % groups), []).append(reader)
        for (source, to), readers in sent.items():
            among = set(readers)
            taken = [action for action in table[to] if action in among]
            assert taken == readers, f"group {to} takes what group {source} sends in another order"
