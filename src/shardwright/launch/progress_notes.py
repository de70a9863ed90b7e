"""Notes on what takes long, shown where somebody looks and nowhere else.

    with waiting_for("saving step-00000100"):
        ...

What has taken two seconds is shown with its seconds until it is done, of several the innermost. It is shown on standard
error where that is a terminal, by rank 0 alone. A rank that our launcher started tells the launcher, as it does of
steps (`shardwright.common.step_lines`): that shows the line on its own terminal, and so does `shardwright watch`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from shardwright.common.step_lines import own_steps
from shardwright.common.words import drawn
from shardwright.errors import WorldError
from shardwright.launch.hosts.environment import read_environment

T = TypeVar("T")
Show = Callable[[str], None]
"""Shows a line in place of the one before; an empty one is none."""

_AFTER_S, _EVERY_S = 2.0, 0.5


class Task:
    """A task that is under way, which prints itself."""

    def __init__(self, name: str) -> None:
        self._name, self._done = name, ""
        self.begun_s = time.monotonic()

    def stage(self, name: str) -> None:
        """Rename the task: "planning"."""
        self._name = name

    def did(self, count: int, of: int) -> None:
        """Note how much of it is done."""
        self._done = f"{count} of {of}, "

    def __str__(self) -> str:
        return f"{self._name}: {self._done}{time.monotonic() - self.begun_s:.0f} s"


class TaskDisplay:
    """The tasks of the main thread that are under way; ``find_show`` returns the display, None for nowhere."""

    def __init__(self, find_show: Callable[[], Show | None], after_s: float = _AFTER_S) -> None:
        self._find_show, self._after_s = find_show, after_s
        self._works: list[Task] = []
        self.instead: Show | None = None
        """The function that shows the line for whoever has the terminal, such as a bar of steps."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[Task]:
        """Show a task that may take long, while the context lasts."""
        work = Task(name)
        if threading.current_thread() is not threading.main_thread():
            yield work
            return
        self._works.append(work)
        try:
            with self._shown() if len(self._works) == 1 else contextlib.nullcontext():
                yield work
        finally:
            self._works.pop()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        show = self.instead or self._find_show()
        if show is None:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._show, args=(show, done), daemon=True)
        with contextlib.suppress(RuntimeError):  # the system has no room for another thread
            thread.start()
        try:
            yield
        finally:
            done.set()
            if thread.ident is not None:
                thread.join()

    def _show(self, show: Show, done: threading.Event) -> None:
        shown = ""
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or its stream was closed
            while not done.wait(min(_EVERY_S, self._after_s)):
                begun_s = time.monotonic() - self._after_s
                text = next((str(work) for work in reversed(self._works) if work.begun_s <= begun_s), "")
                if text != shown:
                    show(text)
                    shown = text
            if shown:
                show("")


def counted(name: str, items: Sequence[T]) -> Iterator[T]:
    """Yield the items one after the other, while it is shown how many are done."""
    with waiting_for(name) as work:
        for count, item in enumerate(items):
            work.did(count, len(items))
            yield item


def _find_show() -> Show | None:
    """Return the launcher that listens to this process, or else its terminal, if it is rank 0."""
    steps = own_steps()
    if not steps.has_reader and not _has_terminal():
        return None
    with contextlib.suppress(WorldError):  # which is told where the ranks meet
        if read_environment(os.environ).rank != 0:
            return None
    return (lambda text: steps.tell({"doing": text})) if steps.has_reader else _on_terminal


def _has_terminal() -> bool:
    """Return whether errors are written on a terminal; a stream that a program has replaced may not say."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return sys.stderr.isatty() and sys.stderr.fileno() >= 0
    return False


def _on_terminal(text: str) -> None:
    sys.stderr.write(drawn(text, os.get_terminal_size(sys.stderr.fileno()).columns))
    sys.stderr.flush()


waiting_for = TaskDisplay(_find_show)
"""Of this process."""
