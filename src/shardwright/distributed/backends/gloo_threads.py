"""Keeps gloo's receiving threads from holding up its sending ones.

A receiver that cannot take a connection's lock asks epoll again at once, and goes on until the sender lets go of it.
Where the two share a core, the sender cannot: it waits until the scheduler's next tick, 4 ms on many kernels, in every
third collective of as many ranks as cores. As `SCHED_BATCH` threads the receivers do not interrupt a sender when
data come in. They keep their share of the processor, and no privilege is needed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_RECEIVER = "gloo_tcp_loop"


def calm_receivers() -> int:
    """Schedule gloo's receiving threads of this process as batch work; returns how many there are.

    Call it after gloo has made a group: each one may bring a thread of its own.
    """
    found = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended, or a sandbox that forbids it: no harm
            if (thread / "comm").read_text().strip() == _RECEIVER:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
                found += 1
    return found
