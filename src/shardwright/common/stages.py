"""Measures the seconds of the stages of a task when requested; otherwise a stage costs one variable lookup.

    with recorded() as record:
        plan = make_plan(...)
    record.rows()

A function whose calls are a stage is marked by `in_stage`, a few lines by ``with stage("tables"):``. The innermost
stage has the time that passes, so that the rows of a record add up to all of it. A stage may also say for which mesh
and which search it is; what is inside of it is for these, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Place(NamedTuple):
    stage: str
    mesh: str = ""
    search: str = ""


@dataclass(frozen=True)
class StageRow:
    """What a stage took for a mesh and a search, without the stages inside of it; "" where it was for none."""

    stage: str
    mesh: str
    search: str
    times: int
    seconds: float


class Record:
    """The seconds of stages, by place. It belongs to the thread, or the task, in which it was begun."""

    def __init__(self) -> None:
        self._seconds: dict[_Place, float] = {}
        self._times: dict[_Place, int] = {}
        self._place, self._since_s = _Place("other"), time.perf_counter()

    def rows(self) -> tuple[StageRow, ...]:
        """Return a row for each place, in the order in which they were first left."""
        return tuple(StageRow(*place, self._times.get(place, 0), seconds) for place, seconds in self._seconds.items())

    @contextmanager
    def entered(self, stage: str | None, mesh: str | None, search: str | None) -> Iterator[None]:
        """Be in a stage, or for a mesh or a search, while the context lasts."""
        before = self._place
        # A search within another one, as one that is tried where the first leaves a gap, is named by both.
        both = before.search if search is None else f"{before.search} > {search}" if before.search else search
        place = _Place(stage or before.stage, before.mesh if mesh is None else mesh, both)
        self.move(place)
        if stage is not None:
            self._times[place] = self._times.get(place, 0) + 1
        try:
            yield
        finally:
            self.move(before)

    def move(self, place: _Place) -> None:
        """Add the seconds since the last move to the place of then."""
        now_s = time.perf_counter()
        self._seconds[self._place] = self._seconds.get(self._place, 0.0) + now_s - self._since_s
        self._place, self._since_s = place, now_s


_RECORD: ContextVar[Record | None] = ContextVar("stages", default=None)


@contextmanager
def recorded() -> Iterator[Record]:
    """Record the stages inside."""
    record = Record()
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        record.move(_Place("other"))
        _RECORD.reset(token)


def stage(
    name: str | None = None, *, mesh: str | None = None, search: str | None = None
) -> AbstractContextManager[None]:
    """Return a context that is a stage, or what is done for a mesh or a search."""
    record = _RECORD.get()
    return nullcontext() if record is None else record.entered(name, mesh, search)


def in_stage(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of functions whose calls are a stage."""

    def mark(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            if _RECORD.get() is None:
                return function(*args, **kwargs)
            with stage(name):
                return function(*args, **kwargs)

        return within

    return mark
