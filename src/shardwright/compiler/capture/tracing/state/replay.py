"""Run a step again and again, and compare what it computes where it finds in Python what earlier ones have left.

The step is run on tensors without values, again and again, each time on another batch. Where a later one computes the
same of its own batch, and leaves the same kind of things, so do all that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwright.common import torch_private, trees
from shardwright.compiler.capture.tracing.outside.places import Place
from shardwright.compiler.capture.tracing.outside.safe import is_a
from shardwright.compiler.capture.tracing.outside.values import MISSING
from shardwright.compiler.capture.tracing.state.contents import Contents
from shardwright.compiler.capture.tracing.state.side_effects import Change, Left

_FURTHER = 5  # steps that are run where each leaves more than the one before, or counts
_COUNTED = (
    5040,
    10**6,
)  # what counters are then set to: a multiple of all numbers up to 10, and one beyond most limits

Step = Callable[[Sequence[torch.Tensor]], Any]


@dataclass(frozen=True)
class Again:
    """The findings of further steps.

    differs: something else than the first.
    computes: something else than the first of its own batch, or they failed.
    read: places at which they read a tensor that an earlier one had left.
    reached: those of them that made a difference for what they return, or for buffers.
    grown: names of collections into which each puts more.
    left: places that the first one changed, to which those of a capture need not be equal: keys may be other ones.
    counted: whether they changed numbers and words, which is told wherever it is.
    """

    differs: bool = False
    computes: bool = False
    read: frozenset[Place] = frozenset()
    reached: frozenset[Place] = frozenset()
    grown: frozenset[Place] = frozenset()
    left: frozenset[Place] = frozenset()
    counted: bool = False

    def are_among(self, place: Place, places: frozenset[Place]) -> bool:
        """Return whether a change of the capture is among these places, or none is known to be the same."""
        if place in self.left:
            return place in places
        name = replace(place, path="")
        return name in map(_name, places) or name not in map(_name, self.left)


@dataclass(frozen=True)
class _Run:
    result: Any  # what can be compared of it
    follows: frozenset[Hashable]
    changes: list[Change]


class _Steps:
    """Runs ``step`` of ``model``, a copy. ``begins`` looks at what stands in Python."""

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        batch: Callable[[], Sequence[torch.Tensor]],
        begins: Callable[[], Left],
        loss_fn: Callable[..., Any],
    ) -> None:
        self._model, self._step, self._batch, self._begins = model, step, batch, begins
        self._loss_fn = loss_fn
        self.contents = Contents(model)

    def count(self, changes: Sequence[Change], to: int) -> bool:
        """Let numbers that the last step has made larger become ``to`` in the next one, and return whether any do.

        Those in collections, objects and classes stay.
        """
        found = [change for change in changes if _grows(change) and not change.place.path]
        for change in found:
            value, place = to - (change.after - change.before), change.place
            own = place.variables(self._model) if place.kind == "attribute" else {}
            if place.name in own:
                own[place.name] = value
            elif place.kind != "attribute":
                place.put(self._loss_fn, value)
        return bool(found)

    def run(self) -> _Run:
        left, batch = self._begins(), self._batch()
        self.contents.begin(batch)
        with torch_private.OperatorMode(self.contents.call):
            result = self._step(batch)
        found = trees.tree_leaves((result, list(self._model.buffers())))
        tensors = [leaf for leaf in found if is_a(leaf, torch.Tensor)]
        follows = frozenset[Hashable]().union(*map(self.contents.follows, tensors))
        return _Run(self.contents.described(found), follows, list(left.changes()))


def again(
    model: nn.Module,
    step: Step,
    batch: Callable[[], Sequence[torch.Tensor]],
    begins: Callable[[], Left],
    loss_fn: Callable[..., Any],
) -> Again | None:
    """Run a step of ``model``, a copy, and further ones; None where it does not run like this.

    Args:
        batch: makes another batch of the same shapes.
        begins: looks at what stands in Python.
        loss_fn: what the step calls, which may close over counters.
    """
    before, steps = begins(), _Steps(model, step, batch, begins, loss_fn)
    try:
        return _run_again(steps)
    finally:
        before.put_back()


def _run_again(steps: _Steps) -> Again | None:
    try:
        first = steps.run()
    except Exception:  # of what the exporter alone can run
        return None
    try:
        return _compared(steps, first)
    except Exception:  # of the user's code, which finds what it does not expect
        return Again(differs=True, computes=True, left=_changed(first))


def _compared(steps: _Steps, first: _Run) -> Again:
    contents, roots = steps.contents, {_name(place) for place in _changed(first)}
    differs = any(contents.was_written(tensor) for tensor, _ in _left(first))
    runs, grown, computes = [first], set[Place](), False
    for _ in range(_FURTHER):
        now = steps.run()
        runs.append(now)
        more = {change.place: change for change in now.changes if _is_more(change, contents)}
        others = [change for change in now.changes if change.place not in more]
        grown |= set(map(_name, more))
        computes = computes or now.result != first.result
        differs = differs or computes or not roots.issuperset(map(_name, _changed(now)))
        differs = differs or not all(_stays(change, contents) for change in others)
        counts = any(not is_a(change.after, torch.Tensor) for change in others)
        if computes or (differs and not counts) or not (more or counts):
            break
    for count in () if differs else _COUNTED:
        if steps.count(runs[-1].changes, count):
            runs.append(steps.run())
            computes = computes or runs[-1].result != first.result
    return replace(_seen(runs, contents, frozenset(grown)), differs=differs or computes, computes=computes)


def _seen(runs: Sequence[_Run], contents: Contents, grown: frozenset[Place]) -> Again:
    reached = frozenset[Hashable]().union(*(run.follows for run in runs[1:]))
    later = [change for run in runs[1:] for change in run.changes if _is_other_constant(change, contents)]
    left = [(tensor, place) for run in runs for tensor, place in _left(run) if contents.changes(tensor)]
    left += [(change.before, change.place) for change in later]
    keys = [(torch_private.storage_key(tensor), place) for tensor, place in left]
    return Again(
        read=frozenset(place for key, place in keys if key in contents.read),
        reached=frozenset(place for key, place in keys if key in reached),
        grown=grown,
        left=_changed(runs[0]),
        counted=any(_counts(change) for run in runs for change in run.changes),
    )


def _left(run: _Run) -> list[tuple[torch.Tensor, Place]]:
    return [(change.after, change.place) for change in run.changes if _is_fake(change.after)]


def _changed(run: _Run) -> frozenset[Place]:
    return frozenset(change.place for change in run.changes)


def _name(place: Place) -> Place:
    return replace(place, path="")


def _grows(change: Change) -> bool:
    """Check that a step has made a whole number larger."""
    numbers = type(change.before) is int and type(change.after) is int
    return numbers and bool(change.after > change.before)


def _counts(change: Change) -> bool:
    return not is_a(change.before, torch.Tensor) and not is_a(change.after, torch.Tensor)


def _is_fake(value: Any) -> bool:
    return is_a(value, torch.Tensor) and torch_private.is_fake(value)


def _is_more(change: Change, contents: Contents) -> bool:
    """Return whether the last step has put a tensor of its own where nothing was, in a collection or an object."""
    more = bool(change.place.path) and change.before is MISSING and _is_fake(change.after)
    return more and contents.is_new(change.after)


def _stays(change: Change, contents: Contents) -> bool:
    """Return whether what one step leaves in the place of what another has left is the same for all that follow."""
    before, after = change.before, change.after
    if _counts(change):
        return True  # told
    if not _is_fake(before) or not _is_fake(after) or before.shape != after.shape or before.dtype != after.dtype:
        return False
    alike = contents.described(before) == contents.described(after)
    return alike or (contents.changes(after) and contents.is_left(before))


def _is_other_constant(change: Change, contents: Contents) -> bool:
    """Return whether a step leaves what is the same for all batches, and not what the one before has left."""
    both = _is_fake(change.before) and _is_fake(change.after)
    return both and not contents.changes(change.before) and not _stays(change, contents)
