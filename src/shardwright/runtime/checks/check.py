"""The protocol of checks, and the argument by which users say how often ranks compare something."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

Checks = Literal["usual", "full"]
"""The rate at which ranks compare what they hold and pass: in the first calls and then one in so many, or in each."""


class StepCheck(Protocol):
    """A check before a step, whose docstring says what it costs; `Parallel` lists its own."""

    def before(self) -> None:
        """Raise where the step must not begin."""


def checks_problem(checks: object) -> str | None:
    """Return why an argument names no way to check; None where it does."""
    if checks in get_args(Checks):
        return None
    return f"checks={checks!r} is unknown; choose one of {', '.join(map(repr, get_args(Checks)))}"
