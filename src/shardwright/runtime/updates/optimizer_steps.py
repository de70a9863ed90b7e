"""Counts the steps and loaded states of the optimizers of sharded parameters on this rank, for ranks to compare.

Each rank updates its own shard, so that no tensor shows that one rank has made a step less, loaded another state, or
used another learning rate. Ranks therefore compare these counts and settings.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_DIGITS = 6  # of settings that are compared: processors may work out a schedule with other roundings
_WAYS = ("params", "foreach", "fused", "capturable", "differentiable")  # by which a step makes the same

_Settings = tuple[int, int | None, tuple[tuple[str, tuple[float, ...]], ...]]


@dataclass(frozen=True)
class MadeSteps:
    """Counts that are equal on ranks that have done the same; ``settings`` counts none, but is equal then, too.

    ``last`` has the settings of the last step, for people.
    """

    steps: int = 0
    loads: int = 0
    settings: int = 0
    last: str = ""

    def since(self, before: MadeSteps) -> list[int]:
        """Return what has come to these numbers: steps, loads, settings."""
        return [self.steps - before.steps, self.loads - before.loads, self.settings - before.settings]


_made = [MadeSteps()]  # of this process


def made_steps() -> MadeSteps:
    """Return the counts of steps and loads in this process so far."""
    return _made[0]


def note_step(optimizer: Optimizer, *, has_closure: bool = False) -> None:
    """Count a step that an optimizer of sharded parameters is about to make; with a closure, gradients come later."""
    last = _described(
        type(optimizer).__name__, tuple(_settings(group, has_closure) for group in optimizer.param_groups)
    )
    before = made_steps()
    _made[0] = replace(before, steps=before.steps + 1, settings=before.settings + zlib.crc32(last.encode()), last=last)


def note_load() -> None:
    """Count a state that was loaded into an optimizer of sharded parameters."""
    _made[0] = replace(made_steps(), loads=made_steps().loads + 1)


def _settings(group: dict[str, Any], has_closure: bool) -> _Settings:
    """Return how many parameters a group has, how many of them have gradients, and its numbers."""
    parameters = group["params"]
    gradients = None if has_closure else sum(parameter.grad is not None for parameter in parameters)
    numbers = [(name, _numbers(value)) for name, value in sorted(group.items()) if name not in _WAYS]
    return len(parameters), gradients, tuple([(name, found) for name, found in numbers if found])


def _numbers(value: object) -> tuple[float, ...]:
    """Return what a setting is if it is a number, or some; a tensor may be on a GPU, which is not waited for."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    numbers = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(numbers) if all(isinstance(number, (int, float)) for number in numbers) else ()


def _described(kind: str, groups: tuple[_Settings, ...]) -> str:
    return "; ".join(
        ", ".join([_counted(kind, count, gradients), *(f"{name}={_rounded(numbers)}" for name, numbers in settings)])
        for count, gradients, settings in groups
    )


def _counted(kind: str, count: int, gradients: int | None) -> str:
    with_gradients = "" if gradients in (None, count) else f" of which {gradients} have gradients"
    return f"{kind} of {count} parameters{with_gradients}"


def _rounded(numbers: tuple[float, ...]) -> str:
    texts = [f"{number:.{_DIGITS}g}" for number in numbers]
    return texts[0] if len(texts) == 1 else f"({','.join(texts)})"


def unlike(everyone: Sequence[Sequence[int]], last: Sequence[str]) -> str | None:
    """Return what to say where ranks have done other things than rank 0.

    Args:
        everyone: what `MadeSteps.since` gives on each rank.
        last: the settings of the last step of each.
    """
    rank = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if rank is None:
        return None
    (steps, loads, _), (its_steps, its_loads, _) = everyone[0], everyone[rank]
    if steps != its_steps:
        what = f"rank 0 has made {steps} of them and rank {rank} {its_steps}; call optimizer.step() on every rank"
    elif loads != its_loads:
        what = (
            f"rank 0 was given states {_times(loads)} by load_state_dict, and rank {rank} {_times(its_loads)}; load "
            "them on every rank"
        )
    elif last[0] != last[rank]:
        what = (
            f"rank 0 made the last one with {_differing(last[0], last[rank])} and rank {rank} with "
            f"{_differing(last[rank], last[0])}; give optimizers and schedulers the same on every rank"
        )
    else:
        what = (
            f"rank {rank} made some otherwise than rank 0, and the last one as it did, with {last[0]}; give optimizers "
            "and schedulers the same on every rank"
        )
    return f"ranks have not made the same steps of split parameters, of which each holds a part: {what}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _differing(settings: str, other: str) -> str:
    """Those of the settings that are not among the others."""
    others = set(other.replace("; ", ", ").split(", "))
    return ", ".join(dict.fromkeys(each for each in settings.replace("; ", ", ").split(", ") if each not in others))
