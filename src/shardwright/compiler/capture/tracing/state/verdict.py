"""Refuses what a step leaves in Python for the next one to compute from, and tells what else of it is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing.outside.entries import HOOKS
from shardwright.compiler.capture.tracing.outside.places import Place
from shardwright.compiler.capture.tracing.outside.safe import is_a, is_parameter, words
from shardwright.compiler.capture.tracing.outside.values import MISSING, NOT_PLAIN, plain
from shardwright.compiler.capture.tracing.state.origins import Origins
from shardwright.compiler.capture.tracing.state.replay import Again
from shardwright.compiler.capture.tracing.state.seen import Seen
from shardwright.compiler.capture.tracing.state.side_effects import Change
from shardwright.errors import CaptureError

GENERATORS = random.Random, np.random.Generator, np.random.RandomState
DRAWN_ONCE = (
    "a captured model draws them once, at the capture, so that all steps would have the same\nDraw with torch, whose "
    "random numbers are part of the graph, or outside the loss function and pass them in the batch."
)


@dataclass(frozen=True)
class Judged:
    """A change that one step leaves.

    text: what is told of it where it does no harm, nothing where that is not worth it.
    grows: the same where each step adds to it.
    refusal: what is raised where a further step reads it; None where none can.
    kind: of what stands there at the end of the step: "drawn" is a generator of random numbers that was drawn from, and
        "counted" all else that is no other tensor.
    asked: whether the step reads what stands there, and a tensor stands there at its end.
    likely: whether that is another one in every step.
    """

    place: Place
    text: str
    grows: str
    refusal: CaptureError | None
    kind: Literal["tensor", "counted", "drawn"]
    asked: bool
    likely: bool

    @property
    def root(self) -> Place:
        return replace(self.place, path="")

    def is_refused(self, steps: Again | None) -> bool:
        """Check whether further steps do otherwise for it; where they cannot be run, whether they might."""
        if self.kind != "tensor":
            return self.kind == "drawn" or steps is None or steps.computes
        if steps is None:
            return self.likely
        if steps.differs and self.asked and (self.likely or not steps.counted):
            return True
        return steps.are_among(self.place, steps.read) if self.likely else self.place in steps.reached


def judged(changes: Iterable[Change], seen: Seen, origins: Origins) -> list[Judged]:
    """Return what one step tells of its changes.

    Raises:
        CaptureError: where a parameter is set.
    """
    return [_judged(change, seen, origins) for change in changes]


def lost(changes: Sequence[Judged], again: Callable[[], Again | None]) -> Iterator[str]:
    """Return what is to be told, one text for each name.

    Args:
        again: runs further steps, which takes its time.

    Raises:
        CaptureError: where the next step would read a tensor, and may find another one than this step has found.
    """
    steps = again() if any(change.refusal for change in changes) else Again()

    def order(change: Judged) -> tuple[bool, bool]:
        return change.kind == "counted", steps is not None and change.place not in steps.read

    for change in sorted(changes, key=order):
        if change.refusal is not None and change.is_refused(steps):
            raise change.refusal from None
    told: set[Place] = set()
    for change in changes:
        text = change.grows if steps is not None and change.root in steps.grown else change.text
        if text and change.root not in told:
            told.add(change.root)
            yield text


def _judged(change: Change, seen: Seen, origins: Origins) -> Judged:
    if is_parameter(change.after) or is_parameter(change.before):
        raise _parameter_set(change, seen)
    text, asked = _text(change, seen, origins), _is_asked(change, seen, origins)
    if is_a(change.after, torch.Tensor):
        refusal = _refusal(change, seen) if _may_be_read(change, seen, origins) else None
        likely = asked and origins.follows(change.after)
        if refusal is not None and origins.is_moved(change.before, change.after):
            return Judged(change.place, "", "", refusal, "counted", False, False)
        return Judged(change.place, text, _text_of_growth(change, seen) or text, refusal, "tensor", asked, likely)
    drawn = change.before is change.after and is_a(change.after, GENERATORS)
    if drawn:
        return Judged(change.place, text, text, _refusal_of_drawn(change, seen), "drawn", False, False)
    owned = change.place.kind == "attribute" and change.place.name not in HOOKS
    before = (change.place.owner, change.place.name) in seen.read_plain
    refusal = None if owned and not before and _is_of_this_step(change, seen) else _refusal_of_counted(change, seen)
    return Judged(change.place, text, text, refusal, "counted", False, False)


def _may_be_read(change: Change, seen: Seen, origins: Origins) -> bool:
    """Return whether a further step may read a tensor that was left: only such a step can tell."""
    if not is_a(change.after, torch.Tensor):
        return False
    if origins.before_moves(change.after) is change.before and change.after.dtype == change.before.dtype:
        return False
    return change.place.kind != "attribute" or change.place.name in HOOKS or not _is_of_this_step(change, seen)


def _is_asked(change: Change, seen: Seen, origins: Origins) -> bool:
    if not _may_be_read(change, seen, origins):
        return False
    if change.place.kind != "attribute" or change.place.name in HOOKS:
        return is_a(change.before, torch.Tensor) and origins.was_used(change.before)
    if change.place.path and is_a(change.before, torch.Tensor) and not torch_private.is_fake(change.before):
        return origins.was_used(change.before)
    return True


def _is_of_this_step(change: Change, seen: Seen) -> bool:
    """Return whether a name has been set before it was read, if it was."""
    name = change.place.owner, change.place.name
    return name not in seen.read and (name in seen.set or (change.before is MISSING and not change.place.path))


def _line(change: Change, seen: Seen) -> str:
    name = change.place.owner, change.place.name
    return seen.set.get(name) or seen.read.get(name, "")


def _text(change: Change, seen: Seen, origins: Origins) -> str:
    """Return what is told of a change, nothing where that has been told or is not worth it."""
    place, name = change.place, (change.place.owner, change.place.name)
    if is_a(change.after, torch.Tensor) and place.path and not origins.follows(change.after):
        return ""  # made when it is first needed
    if change.before is None and is_a(change.after, str):
        return ""  # decided when it is first needed, as which kind of loss follows from the labels
    if place.kind != "attribute":
        return (
            f"{replace(place, path='')}, is changed by the loss function: a captured step does not do it again; change "
            "it outside of it, or keep it in a buffer of the model"
        )
    if is_a(change.after, torch.Tensor) and place.name not in HOOKS:
        return _text_of_tensor(change, seen, origins)
    if _is_of_this_step(change, seen):
        return ""
    if name in seen.set and not place.path and plain(change.after) is not NOT_PLAIN:
        return ""  # told at its line
    return (
        f"{replace(place, path='')} is changed while the model runs{_line(change, seen)}: a captured model runs its "
        "graph, not this line, so that it stays what it was; change it outside the loss function, or keep it in a "
        "buffer"
    )


def _text_of_tensor(change: Change, seen: Seen, origins: Origins) -> str:
    place, name = change.place, (change.place.owner, change.place.name)
    if origins.was_used(change.after) if place.path else name in seen.read or name in seen.read_then:
        return ""
    return (
        f"{place} is set to a tensor while the model runs{seen.set.get(name, '')}, which the step does not read then: "
        "a captured model does not set it; to have it after a step, return it beside the loss"
    )


def _text_of_growth(change: Change, seen: Seen) -> str:
    if change.place.kind != "attribute" or change.place.name in HOOKS:
        return ""
    return (
        f"{replace(change.place, path='')} gets another tensor at each step{_line(change, seen)}: a captured model "
        "runs its graph, not this line, so that it stays what it was; to have a tensor after a step, return it beside "
        "the loss"
    )


def _parameter_set(change: Change, seen: Seen) -> CaptureError:
    name = ".".join(filter(None, (change.place.owner, change.place.name)))
    return CaptureError(
        f"the parameter {name} is set while the model runs{_line(change, seen)}: a captured model runs its graph, not "
        "this line\nParameters are changed by the optimizer alone. Keep what the step changes itself in a buffer: "
        f"self.register_buffer({change.place.name!r}, ...) in __init__."
    )


def _refusal_of_counted(change: Change, seen: Seen) -> CaptureError:
    place, owned = change.place, change.place.kind == "attribute" and change.place.name not in HOOKS
    line, keep = _line(change, seen), f"self.register_buffer({place.name!r}, ...)" if owned else "self.register_buffer"
    shown = all(plain(value) is not NOT_PLAIN for value in (change.before, change.after))
    how = f" from {change.before!r} to {change.after!r}" if shown and change.before is not change.after else ""
    return CaptureError(
        f"{place}{',' * (place.kind != 'attribute')} is changed by the step{how}{line}, and a later step computes "
        "something else for it: a captured model runs its graph, not Python, so that every step would find what the "
        f"first one has found\nKeep it in a buffer, by {keep} in __init__, and compute with that tensor; or pass the "
        "value in with the batch, as a tensor."
    )


def _refusal_of_drawn(change: Change, seen: Seen) -> CaptureError:
    place = change.place
    return CaptureError(
        f"numbers are drawn of {place}{',' * (place.kind != 'attribute')} while the model runs{_line(change, seen)}: "
        f"{DRAWN_ONCE}"
    )


def _refusal(change: Change, seen: Seen) -> CaptureError:
    place, name = change.place, (change.place.owner, change.place.name)
    read, line = seen.read.get(name, ""), _line(change, seen)
    keep = f"self.register_buffer({place.name!r}, ...) in __init__"
    if place.kind != "attribute" or place.name in HOOKS:
        return CaptureError(
            f"{place}{',' * (place.kind != 'attribute')} is read by the step, which then puts another tensor there: a "
            "captured step does not do it again, so that the next one would read the old one\n"
            "Keep it in a buffer of the model, by self.register_buffer in __init__."
        )
    if place.path and not is_a(change.before, torch.Tensor):
        return CaptureError(
            f"{place} is {_words(change.before)} when the step begins, which looks into {replace(place, path='')}"
            f"{read}, and leaves a tensor there: a captured model runs its graph, not Python, so that every step would "
            "find it so\n"
            "Keep what the next step reads in a buffer, by self.register_buffer in __init__; return what is read after "
            f"the step beside the loss. What is of one step alone is made anew in each: set self.{place.name} before "
            f"it is read, as by self.{place.name} = [] in place of self.{place.name}.clear()."
        )
    if place.path:
        return CaptureError(
            f"{replace(place, path='')} is read by the step{read}, and holds another tensor at its end, {place}: a "
            "captured model runs its graph, not Python, so that the next step would find what was there before\n"
            "Keep each tensor that the next step reads in a buffer, by self.register_buffer in __init__. What is of "
            f"one step alone is made anew in each: set self.{place.name} before it is read."
        )
    if is_a(change.before, torch.Tensor):
        return CaptureError(
            f"{place} is read by the step and then set to another tensor{line}: a captured model runs its graph, not "
            f"this line, so that the next step would read the old one\nKeep it in a buffer: {keep}."
        )
    return CaptureError(
        f"{place} is {_words(change.before)} when the step reads it{read}, and is then set to a tensor{line}: a "
        "captured model runs its graph, not this line, so that every step would find it "
        f"so\nKeep it in a buffer that has its shape from the start: {keep}; a buffer of one number can tell the first "
        "step from the others, by torch.where."
    )


def _words(before: Any) -> str:
    return "not there" if before is MISSING else words(before)
