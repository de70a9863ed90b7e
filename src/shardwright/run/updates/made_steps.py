"""What the optimizers of split parameters have done on this rank.

No rank has what another one makes of its part, so nothing shows later that one has made a step less, begun with other
states, or made its steps with another learning rate. So ranks tell each other how often and how each has.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.optim import Optimizer

_DIGITS = 6  # of settings that are compared: processors may work out a schedule with other roundings


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
        """What has come to these numbers: steps, loads, settings."""
        return [self.steps - before.steps, self.loads - before.loads, self.settings - before.settings]


_made = [MadeSteps()]  # of this process


def made_steps() -> MadeSteps:
    return _made[0]


def note_step(optimizer: Optimizer) -> None:
    """Told before each step of an optimizer that has split parameters."""
    last = "; ".join(
        ", ".join(f"{name}={_rounded(value)}" for name, value in sorted(group.items()) if _is_setting(name, value))
        for group in optimizer.param_groups
    )
    before = made_steps()
    _made[0] = replace(before, steps=before.steps + 1, settings=before.settings + zlib.crc32(last.encode()), last=last)


def note_load() -> None:
    """Told where an optimizer that has split parameters was given a state."""
    _made[0] = replace(made_steps(), loads=made_steps().loads + 1)


def _is_setting(name: str, value: object) -> bool:
    """Whether it is a number, or some; a tensor may be on a GPU, which is not waited for."""
    numbers = value if isinstance(value, (tuple, list)) and name != "params" else [value]
    return all(isinstance(number, (int, float)) for number in numbers)


def _rounded(value: float | Sequence[float]) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float)):
        return f"{value:.{_DIGITS}g}"
    return f"({', '.join(map(_rounded, value))})"


def unlike(everyone: Sequence[Sequence[int]], last: Sequence[str]) -> str | None:
    """What to say where ranks have done other things than rank 0.

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
            f"{_differing(last[rank], last[0])}; give optimizers and schedulers the same numbers on every rank"
        )
    else:
        what = (
            f"rank {rank} made some with other settings than rank 0, which have {last[0]} now; give optimizers and "
            "schedulers the same numbers on every rank"
        )
    return f"ranks have not made the same steps of split parameters, of which each holds a part: {what}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _differing(settings: str, other: str) -> str:
    """Those of the settings that are not among the others."""
    others = set(other.replace("; ", ", ").split(", "))
    return ", ".join(dict.fromkeys(each for each in settings.replace("; ", ", ").split(", ") if each not in others))
