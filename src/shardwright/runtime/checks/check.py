"""The protocol of checks, and in which calls those are made that compare something between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from torch import Tensor

Checks = Literal["usual", "full"]
"""The rate at which ranks compare what they hold and pass: in the first calls and then one in so many, or in each."""

FIRST = 3
EVERY = 100
"""In these calls ranks compare what they have: in the first ones, and then in one of so many."""


class StepCheck(Protocol):
    """A check before a step, whose docstring says what it costs; `Parallel` lists its own."""

    def before(self, tensors: Sequence[Tensor]) -> None:
        """Raise where the step must not begin; ``tensors`` are those of the batch that this rank passes."""


class Turns:
    """Counts calls, and knows those in which ranks compare what they have."""

    def __init__(self, checks: Checks = "usual") -> None:
        self.seen, self._all = 0, checks == "full"

    def next(self) -> bool:
        """Return whether one more call is such a one."""
        self.seen += 1
        return self._all or self.seen <= FIRST or self.seen % EVERY == 0

    @property
    def steady(self) -> bool:
        """Return whether the last call was none of the first ones, and few are such as it."""
        return not self._all and self.seen > FIRST


def checks_problem(checks: object) -> str | None:
    """Return why an argument names no way to check; None where it does."""
    if checks in get_args(Checks):
        return None
    return f"checks={checks!r} is unknown; choose one of {', '.join(map(repr, get_args(Checks)))}"
