"""The reports of a rank on its steps: lines of JSON, which the supervisor of its host passes on to the job's folder.

    {"time_s": 1700000000.1, "step": 12, "steps": 3, "seconds": 1.21, "data_s": 0.01, "communicating_s": 0.4,
     "samples": 96, "loss": 2.3}

They go into a pipe, which the rank finds as ``/proc/<supervisor>/fd/<number>`` by `STEPS_VARIABLE`. A line is written
at the end of a step, about every second and in a long run less often, so that it costs the training next to nothing.
Nobody ever waits: what the pipe does not take is left out. Without the variable nothing is told.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

STEPS_VARIABLE = "SHARDWRIGHT_STEPS"
TELLS_VARIABLE = "SHARDWRIGHT_TELLS"
"""The LOCAL_RANK of the process that tells for all on its host, where torchrun has started several in place of one."""
_OFTEN_S, _SELDOM_S = 1.0, 10.0  # between two lines, at the beginning of a run and in a long one
_LINES_OF_A_RUN = 600  # after so many seconds they become fewer
_LONGEST_LINE_BYTES = 4096  # what a pipe takes in one piece


class DeferredNumber(Protocol):
    """A number that comes from a device which works on."""

    @property
    def is_there(self) -> bool:
        """Return whether it has come."""

    def value(self) -> float:
        """Wait for the number and return it."""


class Steps:
    """The step reports of one rank, made by its training thread; ``write`` takes a line, None without a launcher.

    A step lasts from `open` to `close`, the loading of its data included. Who knows but the beginning of steps calls
    `begin` alone, which ends the step before.
    """

    def __init__(self, write: Callable[[bytes], None] | None) -> None:
        self._write = write
        self.measures: dict[str, Callable[[], Any]] = {}
        """The functions that measure the other values of a line, by name, between a forward and its backward."""
        self.communicating_s: float | None = 0.0
        """Seconds that the program spent in collectives; None where they run on a device, beside it."""
        self._begun_s: float | None = None  # of the step that is open
        self._numbered = self._loading = False
        self._number = self._steps = self._samples = 0
        self._seconds = self._data_s = self._communicating_s = self._communicated_s = 0.0
        self._measured: dict[str, Any] = {}
        self._loss: Callable[[], DeferredNumber] | None = None
        self._waiting: tuple[dict[str, Any], DeferredNumber] | None = None  # a line whose loss has not come
        self._started_s = self._due_s = time.perf_counter()

    @property
    def has_reader(self) -> bool:
        """Return whether anybody reads them."""
        return self._write is not None

    def open(self) -> None:
        """Begin a step with the loading of its data, if there are any more."""
        if self._write is not None:
            self._begun_s, self._numbered = time.perf_counter(), False
            self._communicated_s = self.communicating_s or 0.0  # before the step

    def begin(self, number: int) -> None:
        """Begin to compute a step."""
        if self._write is None:
            return
        if self._begun_s is None or self._numbered:
            self.close()
            self.open()
        self._number, self._numbered = number, True

    def close(self) -> None:
        """End the step that is open."""
        if self._write is None or self._begun_s is None:
            return
        now_s, begun_s = time.perf_counter(), self._begun_s
        self._begun_s = None
        if self._numbered:
            self._steps += 1
            self._seconds += now_s - begun_s
            self._communicating_s += (self.communicating_s or 0.0) - self._communicated_s
            self._tell_due(now_s)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the time of the context as loading of data, if a step is open."""
        if self._begun_s is None or self._loading:
            yield
            return
        self._loading, begun_s = True, time.perf_counter()
        try:
            yield
        finally:
            self._loading = False
            self._data_s += time.perf_counter() - begun_s

    def computed(self, samples: int, loss: Callable[[], DeferredNumber]) -> None:
        """Record a batch of the step after its forward; ``loss`` is called only if the loss is to be reported."""
        if self._write is None:
            return
        self._samples += samples
        self._loss = loss
        if not self._measured and time.perf_counter() >= self._due_s:
            self._measured = {name: measure() for name, measure in self.measures.items()}

    def tell(self, line: Mapping[str, Any]) -> None:
        """Write a line now."""
        if self._write is not None:
            data = json.dumps({"time_s": round(time.time(), 3), **line}, separators=(",", ":")).encode() + b"\n"
            if len(data) <= _LONGEST_LINE_BYTES:
                self._write(data)

    def finish(self) -> None:
        """Report the remaining steps at the end of the process; the duration of the last one is unknown."""
        self._tell_waiting(wait=True)
        if self._steps or self._loss is not None:
            self._tell_step()
            self._tell_waiting(wait=True)

    def _tell_due(self, now_s: float) -> None:
        if self._waiting is not None:
            self._tell_waiting(wait=False)
        if now_s >= self._due_s and self._waiting is None:
            run_s = now_s - self._started_s
            self._due_s = now_s + min(max(_OFTEN_S, run_s / _LINES_OF_A_RUN), _SELDOM_S)
            self._tell_step()

    def _tell_step(self) -> None:
        line: dict[str, Any] = {"step": self._number, "steps": self._steps, "seconds": round(self._seconds, 6)}
        line |= {"data_s": round(self._data_s, 6), "samples": self._samples}
        if self.communicating_s is not None:
            line["communicating_s"] = round(self._communicating_s, 6)
        line |= {name: value for name, value in self._measured.items() if value is not None}
        self._measured = {}
        self._steps = self._samples = 0
        self._seconds = self._data_s = self._communicating_s = 0.0
        loss, self._loss = self._loss, None
        if loss is None:
            self.tell(line)
            return
        self._waiting = line, loss()
        self._tell_waiting(wait=False)

    def _tell_waiting(self, wait: bool) -> None:
        if self._waiting is not None and (wait or self._waiting[1].is_there):
            (line, loss), self._waiting = self._waiting, None
            self.tell(line | {"loss": loss.value()})


def variable_of_this_rank(variable: str) -> str | None:
    """Return a variable that the supervisor has set, unless another process is to answer to it."""
    tells = os.environ.get(TELLS_VARIABLE)
    return os.environ.get(variable) if tells in (None, os.environ.get("LOCAL_RANK")) else None


@cache
def own_steps() -> Steps:
    """Return the reports of this process.

    Cached once: a process has one place to tell of its steps, which its supervisor gives it at the start.
    """
    steps = Steps(_writer(variable_of_this_rank(STEPS_VARIABLE)))
    if steps.has_reader:
        atexit.register(steps.finish)
    return steps


def _writer(path: str | None) -> Callable[[bytes], None] | None:
    """Return a function that writes into the pipe; None where there is none, as in a container of its own."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC) if path else -1
    except OSError:
        fd = -1
    if fd < 0:
        return None

    def write(data: bytes) -> None:
        try:
            os.write(fd, data)
        except OSError:  # the pipe is full, or its reader has gone
            return

    return write
