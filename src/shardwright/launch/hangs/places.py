"""Where a rank is, in words: the collective and what it is for, the DataLoader, or a line of the script.

What the rank itself has written comes first, since it knows the step and the operator; then the innermost frame of its
stack that says anything: a function of torch.distributed, a data loader, autograd's backward, and else the innermost
line that belongs to the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from shardwright.common import package
from shardwright.launch.hangs.stacks import Frame, Observation, Stack
from shardwright.launch.joblog.failure import signal_name

# A rank that is "waiting" is in something that others must come to; "known" is any other place that has a name.
PlaceKind = Literal["waiting", "known", "stopped", "kernel", "unknown"]

_BUSY = 0.5  # of a processor
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+/|^<frozen |^<string>$")
_OURS = re.compile(rf"/shardwright/(?:{'|'.join(package.WINGS)}|__main__)(?:/\w+)*\.py$")
_PROGRAM = "<program of rank "  # the file name of a local program (`run.execute`)
_WRAPPERS = frozenset({"wrapper", "_wrapper", "inner", "_call_impl", "_wrapped_call_impl", "__call__"})


@dataclass(frozen=True)
class Place:
    """Where a rank is: ``text`` reads after "rank 3 is"; ranks with the same text are together.

    ``where`` is the same without a stop.
    """

    kind: PlaceKind
    text: str
    where: str


def place_of(seen: Observation) -> Place:
    where, waiting = _where(seen)
    if seen.state in ("T", "t"):
        how = f" ({signal_name(seen.stopped_by)})" if seen.stopped_by else " by a debugger" if seen.state == "t" else ""
        return Place("stopped", f"stopped{how}{f' {where}' if where else ''}", where)
    if seen.state == "D":
        what = f", in {seen.waits_in}" if seen.waits_in else ""
        return Place("kernel", f"waiting for the kernel (state D{what}) {where}".rstrip(), where)
    if not where:
        kernel = f"the kernel has it in {seen.waits_in}" if seen.waits_in else f"its state is {seen.state}"
        return Place("unknown", f"somewhere ({kernel})" if seen.state else "gone", "")
    return Place("waiting" if waiting else "known", where, where)


def _where(seen: Observation) -> tuple[str, bool]:
    """The place in words that begin with "in", empty where nothing is known; and whether the rank waits there for
    others.
    """
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
    """The place of the main thread; where that waits for the backward, of another thread that is in a collective."""
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
