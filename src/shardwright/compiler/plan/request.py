"""The request to the planner: everything that decides a plan besides the graph, as one frozen value."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal

from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.pricing.hardware import Hardware, for_device
from shardwright.compiler.plan.pricing.memory import ADAMW, OptimizerStates
from shardwright.compiler.plan.searches import MINDSPORE, MODES, SEARCHES, Mode, SearchName, mode_called
from shardwright.errors import UsageError

Inputs = Literal["split", "whole"] | Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan. Pins, and where batch normalisation counts, are in the graph already.

    Args:
        mesh: the devices; axes are split further where strategies need it.
        search: by default the usual one of the mode; MindSpore's names are read as ours.
        inputs: "split": each rank is given its rows of the batch; "whole": all of it; or slices per dim by input name.
        hardware: what plans are priced by, where the search counts seconds.
        storage: layouts that parameters have already, by value name; they are then not free.
        axes: the mesh that the plan must speak of, of an earlier plan whose storage is given; by default chosen.
        memory: how many bytes each device may hold; None: as many as the plan needs.
        optimizer: what will update the parameters, and holds states for them.
        recompute: patterns of the paths of modules whose inside the backward is to compute again, kept by no plan.
        microbatches: into how many parts the batch is cut, where the mesh has stages; None: a few for each stage.
        schedule: the order in which microbatches go through stages; None: 1F1B where the loss allows it.
        search_stages: whether plans with pipeline stages are looked for, too, on devices without names.

    Raises:
        UsageError: for an unknown mode, search or form of inputs.
    """

    mesh: Mesh
    mode: Mode = "auto"
    search: SearchName | None = None
    inputs: Inputs = "split"
    hardware: Hardware = field(default_factory=partial(for_device, "cpu"))
    storage: Mapping[str, Layout] = field(default_factory=dict)
    axes: Mesh | None = None
    memory: int | None = None
    optimizer: OptimizerStates = ADAMW
    recompute: tuple[str, ...] = ()
    microbatches: int | None = None
    schedule: str | None = None
    search_stages: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", mode_called(self.mode))
        if self.search is not None and self.search not in SEARCHES:
            raise UsageError(f"unknown search {self.search!r}; the searches are {', '.join(SEARCHES)}")
        for theirs, ours in MINDSPORE.items():
            if self.search == theirs:
                object.__setattr__(self, "search", ours)
        if problem := inputs_problem(self.inputs) or _microbatches_problem(self.microbatches):
            raise UsageError(problem)

    @property
    def searched(self) -> SearchName | None:
        """The search that decides: the one asked for or the mode's usual one, none where the mode searches nothing."""
        usual = MODES[self.mode].search
        return usual and (self.search or usual)

    @property
    def digest(self) -> str:
        """A hash of all fields, equal on every machine: a field that is added is in it.

        Raises:
            TypeError: where a field holds a value that has no text of its own.
        """
        return hashlib.sha256(_stable_text(self).encode()).hexdigest()[:32]


def inputs_problem(inputs: object) -> str | None:
    """Return why these cannot be the inputs of a request, None where they can."""
    if isinstance(inputs, Mapping) or inputs in ("split", "whole"):
        return None
    return f"inputs is 'split', 'whole' or a mapping from input name to slices per dim, got {inputs!r}"


def _microbatches_problem(microbatches: object) -> str | None:
    if microbatches is None or (type(microbatches) is int and microbatches > 0):
        return None
    return f"microbatches is {microbatches!r}; expected a whole number from 1 on"


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{i}B": base**power
    for i, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kMGT", start=1)
}


def read_memory(given: int | str) -> int:
    """Bytes as a user writes them.

    >>> read_memory("80GiB"), read_memory("1.5 MB"), read_memory(4096)
    (85899345920, 1500000, 4096)

    Raises:
        UsageError: where it is no number of bytes above 0.
    """
    if isinstance(given, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kKMGT]?i?B?)\s*", given)):
        number, unit = found.groups()
        unit = unit.replace("K", "k").removesuffix("B") + "B"
        given = round(float(number) * _UNITS.get(unit, 0))
    if isinstance(given, bool) or not isinstance(given, int) or given <= 0:
        raise UsageError(
            f"memory is {given!r}; expected how many bytes each device may hold, as '80GiB' or '512MB', or 'auto'"
        )
    return given


def read_patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    """Patterns of module paths as a user writes them: one or several.

    >>> read_patterns("blocks.*"), read_patterns(["encoder.*", "decoder.*"])
    (('blocks.*',), ('encoder.*', 'decoder.*'))

    Raises:
        UsageError: where it is neither.
    """
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, (tuple, list)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError(
            f"recompute is {given!r}; expected a pattern of module paths, as 'blocks.*', or a list of them"
        )
    return tuple(patterns)


def _stable_text(value: Any) -> str:
    """A text that differs where values differ, and is the same in every process."""
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_stable_text(key)}: {_stable_text(at)}" for key, at in value.items())) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_stable_text, value)) + "]"
    if is_dataclass(value) and not isinstance(value, type):
        texts = (f"{part.name}={_stable_text(getattr(value, part.name))}" for part in fields(value))
        return f"{type(value).__name__}({', '.join(texts)})"
    raise TypeError(f"{value!r} is {type(value).__name__}, which has no text that is the same in every process")
