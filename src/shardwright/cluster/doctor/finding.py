"""Checks and findings of `shardwright doctor`.

A check is one function that takes a `HostReading` and returns one `Finding`: its severity, a text, and lines to type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from shardwright.cluster.doctor.reading import HostReading, Unreadable


class Severity(IntEnum):
    """The severity of a finding, from "as it should be" to "a job does not start, or fails".

    Between them: something optional is missing; nobody knows; a job is slower or in danger.
    """

    OK = 0
    NOTE = 1
    UNKNOWN = 2
    WARNING = 3
    PROBLEM = 4

    @property
    def exit_code(self) -> int:
        """The exit code: 0 where nothing need be done, 1 where something should be looked at, 2 for an obstacle."""
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
    function: Callable[[HostReading], Finding]


@dataclass(frozen=True)
class HostFinding:
    """A finding with the check that it comes from and the hosts that it is about."""

    group: str
    name: str
    hosts: tuple[str, ...]
    finding: Finding


def _finding(severity: Severity, text: str, *remedy: str) -> Finding:
    return Finding(severity, text, remedy)


# Each takes a text and lines to type, and returns a finding of its severity.
ok = partial(_finding, Severity.OK)
note = partial(_finding, Severity.NOTE)
unknown = partial(_finding, Severity.UNKNOWN)
warning = partial(_finding, Severity.WARNING)
problem = partial(_finding, Severity.PROBLEM)


MISREAD = (Unreadable, ValueError, TypeError, KeyError, IndexError, AttributeError)
"""The errors that a check raises where a host says something in a form that the check does not expect."""


def misread(error: Exception) -> Finding:
    """Return the finding for one of `MISREAD` that a check raised: nobody knows."""
    if isinstance(error, Unreadable):
        return unknown(str(error))
    return unknown(f"what the host says of it has another form than expected: {type(error).__name__}: {error}")


def examine(check: Check, reading: HostReading) -> HostFinding:
    """Return the finding of a check on a host; unknown where the host says something in an unexpected form."""
    try:
        finding = check.function(reading)
    except MISREAD as error:
        finding = misread(error)
    return HostFinding(check.group, check.name, (reading.name,), finding)


def not_applicable() -> Finding:
    """Return an empty finding: what the check is about is not here, and another check has said so."""
    return Finding(Severity.OK, "")
