"""What a check is, and what it finds.

A check is one function that takes a `Reading` and gives one `Finding`: how bad it is, what was found, and what to type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from shardwright.cluster.doctor.reading import Reading, Unreadable


class Severity(IntEnum):
    """How bad a finding is: something is as it should be; something optional is missing; nobody knows; a job is slower
    or in danger; a job does not start, or fails."""

    OK = 0
    NOTE = 1
    UNKNOWN = 2
    WARNING = 3
    PROBLEM = 4

    @property
    def exit_code(self) -> int:
        """0 where nothing need be done, 1 where something should be looked at, 2 where something is in the way."""
        return {Severity.PROBLEM: 2, Severity.WARNING: 1, Severity.UNKNOWN: 1}.get(self, 0)


@dataclass(frozen=True)
class Finding:
    """``remedy`` are lines for the shell of that host; a shell comment says what a command cannot do."""

    severity: Severity
    text: str
    remedy: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """A check of one host: the heading under which it is shown, its name there, and the function that looks."""

    group: str
    name: str
    function: Callable[[Reading], Finding]


@dataclass(frozen=True)
class Found:
    """A finding with the check that it comes from and the hosts that it is about."""

    group: str
    name: str
    hosts: tuple[str, ...]
    finding: Finding


def ok(text: str, *remedy: str) -> Finding:
    return Finding(Severity.OK, text, remedy)


def note(text: str, *remedy: str) -> Finding:
    return Finding(Severity.NOTE, text, remedy)


def unknown(text: str, *remedy: str) -> Finding:
    return Finding(Severity.UNKNOWN, text, remedy)


def warning(text: str, *remedy: str) -> Finding:
    return Finding(Severity.WARNING, text, remedy)


def problem(text: str, *remedy: str) -> Finding:
    return Finding(Severity.PROBLEM, text, remedy)


MISREAD = (Unreadable, ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What a check raises where a host says something in a form that the check does not expect."""


def misread(error: Exception) -> Finding:
    """What is found where a check raises one of `MISREAD`: that nobody knows."""
    if isinstance(error, Unreadable):
        return unknown(str(error))
    return unknown(f"what the host says of it has another form than expected: {type(error).__name__}: {error}")


def examine(check: Check, reading: Reading) -> Found:
    """What a check finds on a host. What the host says in a form that the check does not expect is unknown."""
    try:
        finding = check.function(reading)
    except MISREAD as error:
        finding = misread(error)
    return Found(check.group, check.name, (reading.name,), finding)


def moot() -> Finding:
    """Nothing to say: what the check looks at is not here, and another check has said so."""
    return Finding(Severity.OK, "")
