"""The threads of gloo: its receivers, which hold up its senders, and its workers, which outlive their groups.

A receiver that cannot take a connection's lock asks epoll again at once, and goes on until the sender lets go of it.
Where the two share a core, the sender cannot: it waits until the scheduler's next tick, 4 ms on many kernels, in every
third collective of as many ranks as cores. As `SCHED_BATCH` threads the receivers do not interrupt a sender when
data come in. They keep their share of the processor, and no privilege is needed.

A worker thread of gloo drops the tensors of a collective a moment after the main thread has seen it done. Dropping one
may need the interpreter's lock, and a thread that asks for the lock while the interpreter ends is unwound by force,
which C++ answers with "terminate called without an active exception" and exit by SIGABRT. Destroying the group joins
its threads, unless somebody holds a reference to it: DistributedDataParallel does, and so does a script's own variable.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.common.threads import Thread

_EXIT_TIMEOUT_S = 10.0
_SAMPLE_S = 0.002
_GLOO_WORKER = "pt_gloo_runloop"
_FUTEX_WAIT_BITSET = 9


def leave_at_exit(served_by_scheduler: Store | None) -> None:
    """At exit, tell msrun's scheduler, which serves until all have left, and drop the group, peers alive or not.

    The thread that does so starts now: from Python 3.12 on an interpreter that ends starts none.
    """
    begin = threading.Event()

    def drop() -> None:
        begin.wait()
        _drop_groups(served_by_scheduler)

    thread = Thread(drop, "shardwright-leave", daemon=True)
    thread.start()
    atexit.register(_leave, begin, thread)


def _leave(begin: threading.Event, thread: threading.Thread) -> None:
    """Let the thread drop the group, unless this is a forked process, which has no such thread."""
    deadline_s = time.monotonic() + _EXIT_TIMEOUT_S
    begin.set()
    thread.join(_EXIT_TIMEOUT_S)
    _wait_for_idle_workers(deadline_s)


def _drop_groups(served_by_scheduler: Store | None) -> None:
    try:
        if served_by_scheduler is not None:
            served_by_scheduler.add("left", 1)
        if dist.is_initialized():
            dist.destroy_process_group()
    except (RuntimeError, OSError):  # a peer or the store has gone before us, and there is nothing left to do
        pass


def _wait_for_idle_workers(deadline_s: float) -> None:
    """Return when every worker that outlives its group waits for work, or at the deadline."""
    while time.monotonic() < deadline_s and not all(map(_is_idle, Path("/proc/self/task").iterdir())):
        time.sleep(_SAMPLE_S)


def _is_idle(task: Path) -> bool:
    """Return whether the thread is no gloo worker, or one that waits for work.

    A worker waits for work without a timeout, and with one for its peers and for the interpreter's lock.
    """
    try:
        if (task / "comm").read_text().strip() != _GLOO_WORKER:
            return True
        system_call = (task / "syscall").read_text().split()
    except OSError:  # it ended as we looked, or this kernel does not tell
        return True
    if len(system_call) < 5:  # "running"
        return False
    operation, timeout = int(system_call[2], 16), int(system_call[4], 16)
    return operation & 0xF == _FUTEX_WAIT_BITSET and timeout == 0


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
