"""Handles TERM during a training run: a scheduler reclaims the machine and leaves a grace period for a save.

A rank that is told to end does not end at once: it asks all ranks for an appointment (`training.appointment`), at which
they save together and leave. Where the launcher has marked the job as failed, a rank has died, and the others could
wait for it for ever: then they leave at once. That must work while the main thread is blocked in a collective, where
Python runs no handler; so the signal wakes a thread.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from functools import cache

from shardwright.launch.joblog.job import is_marked_as_failed

EXIT_CODE = 128 + signal.SIGTERM
"""The exit code of ranks after a save on TERM, as if TERM had ended them: 143."""


class Preemption:
    """While this is installed, TERM only sets ``asked``, in the thread that calls `wait`.

    A handler that the script itself has set stays, and so does the behaviour of a fit outside the main thread: TERM is
    then not ours to answer.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.asked = False
        self.installed = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        )
        if self.installed:
            _leave_children_alone()
            signal.signal(signal.SIGTERM, self._handle)
            before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._wakes = before == -1
            if not self._wakes:  # somebody else's, asyncio's for one: the handler alone must do
                signal.set_wakeup_fd(before)

    def _handle(self, signum: int, _: object) -> None:
        os.write(self._write, bytes([signum]))

    def wait(self, seconds: float) -> None:
        """Wait for TERM for so long; ends the process where it comes and the job has failed."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        if not ready or signal.SIGTERM not in os.read(self._read, 512):
            return
        if is_marked_as_failed(os.environ):
            os._exit(EXIT_CODE)
        self.asked = True

    def close(self) -> None:
        """Let TERM end the process again; called from the thread that made this, when no other waits any more."""
        if self.installed:
            if self._wakes:
                signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)


@cache
def _leave_children_alone() -> None:
    """In forked children, the workers of a DataLoader for one, TERM ends as ever, and wakes nobody here.

    Cached so that it is done once.
    """
    os.register_at_fork(after_in_child=_as_ever)


def _as_ever() -> None:
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Preemption):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
