"""Processes as Linux shows them, the marks of jobs, and the signals that a launcher handles."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType

from shardwright.common.pulse import JOB_VARIABLE
from shardwright.launch.host.system_files import text_of

_PF_EXITING = 4
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children, those that called setsid included."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int) -> None:
    """Have the kernel send ``signum`` when the thread that forked this process ends; 0 takes that back."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _prctl(option: int, value: int) -> None:
    import ctypes  # a dozen milliseconds that the launcher spends while the supervisor imports torch

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; the name before them may hold blanks and brackets."""
    return text_of(f"/proc/{pid}/stat").rpartition(")")[2].split() or None


def all_processes() -> Iterator[int]:
    """Return the ids of all processes of this host."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def descendants(root: int, without: Collection[int] = ()) -> set[int]:
    """Return every living process below ``root``, zombies left out, and the trees under ``without``."""
    children: dict[int, list[int]] = {}
    for pid in all_processes():
        if (fields := _stat(pid)) and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(pid)
    tree: set[int] = set()
    frontier = [root]
    while frontier:
        below = [pid for pid in children.get(frontier.pop(), []) if pid not in without]
        tree.update(below)
        frontier += below
    return tree


def job_marks() -> dict[int, str]:
    """Return the mark of each living process that carries one, except the caller: every process of a job does."""
    found = {pid: variable(pid, JOB_VARIABLE) for pid in all_processes() if pid != os.getpid()}
    return {pid: mark for pid, mark in found.items() if mark and (fields := _stat(pid)) and fields[0] not in "ZX"}


def marked(job_id: str) -> set[int]:
    """Return every living process whose environment names the job, except the caller."""
    return {pid for pid, mark in job_marks().items() if mark == job_id}


def variable(pid: int, name: str) -> str | None:
    """Return a variable of the environment that a process was started with; None where there is none to be read."""
    begin = f"{name}=".encode()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(begin):
                return entry[len(begin) :].decode(errors="replace")
    return None


def parent(pid: int) -> int | None:
    """Return the process that has started another, or has adopted it."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot, which tells its pid from a reuse. None if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def is_ending(pid: int) -> bool:
    """Return whether the process is gone, or on its way: closing files, giving back memory, or waited for."""
    fields = _stat(pid)
    return fields is None or fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


def state_and_cpu_s(pid: int) -> tuple[str, float] | None:
    """Return the kernel's letter for the state of a process, and the processor time of its threads. None if gone."""
    fields = _stat(pid)
    return (fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")) if fields else None


def name_of(pid: int) -> str:
    """Return the name of a process, "?" where it cannot be read."""
    return text_of(f"/proc/{pid}/comm") or "?"


def send_signal(pid: int, signum: int) -> None:
    """Do as os.kill does; it is no error if the process is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def kill_all(find: Callable[[], set[int]], timeout_s: float) -> set[int]:
    """Kill what ``find`` returns until it returns nothing, since the dying can fork. Returns what outlived the time."""
    deadline = time.monotonic() + timeout_s
    while (pids := find()) and time.monotonic() < deadline:
        for pid in pids:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.01)
    return pids


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
