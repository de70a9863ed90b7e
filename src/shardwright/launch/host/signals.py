"""Which signals a launcher hears, and how."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
KILL_NOW = signal.SIGRTMIN
"""From `shardwright stop --now`: TERM without a grace. SIGINT, the second of which kills, is ignored behind an &."""
ASK_LAUNCHER = signal.SIGRTMIN + 1
"""From `shardwright stop -H` to an agent, which passes it on: the launcher is to end the job as by TERM. An agent that
gets `KILL_NOW` passes that on, too."""


@contextlib.contextmanager
def woken_by(handlers: Mapping[int, Callable[[int, FrameType | None], object]]) -> Iterator[int]:
    """A descriptor that becomes readable with each of these signals, whose numbers it gives, a byte each.

    What was ignored when this process was started, as under nohup, stays so.
    """
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    heard = [signum for signum in handlers if signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, handlers[signum]) for signum in heard}
    try:
        yield read
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(read)
        os.close(write)
