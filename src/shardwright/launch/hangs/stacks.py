"""Reads the state of the ranks of one host: kernel facts, their own records (`pulse`), and Python stacks.

Stacks come from py-spy where it is installed and permitted: it reads them from outside, also those of a stopped rank
and of one that answers no signal. Else from faulthandler in the rank itself (`pulse`), which is there in ranks that
are forked from the zygote and in those that use shardwright. Everything is bounded in time and in size.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwright.common.pulse import STACK_SIGNAL, PulseFile, PulseReading
from shardwright.common.schema import from_json
from shardwright.launch.host.processes import descendants, name_of, send_signal, state_and_cpu_s
from shardwright.launch.host.system_files import text_of

_PY_SPY_S = 4.0  # for all ranks of a host together
_ANSWER_S = 3.0  # for a rank's own faulthandler, which needs none of Python's locks but a processor
_TICK_S = 0.05
_WINDOW_S = 0.3  # over which processor time is looked at
_STACKS_BYTES = 1 << 16
_LARGEST_ANSWER_BYTES = 1 << 22
_THREADS, _FRAMES, _TEXT, _RECORDED_LINES = 32, 64, 300, 64

_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


Stack = tuple[Frame, ...]  # innermost first


@dataclass(frozen=True)
class Target:
    """A rank of this host that is to be observed. ``stopped_by`` is the signal that stopped it, 0 if none has."""

    pid: int
    pulse: PulseFile | None = None
    stopped_by: int = 0


@dataclass(frozen=True)
class Observation:
    """The state of one rank at one moment.

    ``state`` is the kernel's letter (empty if the process is gone), ``waits_in`` its name of what the process waits
    for, ``syscall`` what /proc says of the call it is in; ``busy`` is the share of a processor that it used while it
    was looked at. ``stacks`` begin with the main thread's; where there are none, ``no_stacks`` says why.
    """

    rank: int
    pid: int
    state: str = ""
    stopped_by: int = 0
    waits_in: str = ""
    syscall: str = ""
    busy: float = 0.0
    pulse: PulseReading | None = None
    stacks: tuple[Stack, ...] = ()
    stacks_by: str = ""
    no_stacks: str = ""
    below: tuple[str, ...] = ()  # processes that it started: name, pid, state
    recorded: tuple[str, ...] = ()  # by torch, of its collectives on a GPU


def encode_observations(observations: list[Observation]) -> bytes:
    """Return the observations as bytes; where those would be too many, of each rank the main thread alone."""
    data = json.dumps([asdict(seen) for seen in observations]).encode()
    if len(data) > _LARGEST_ANSWER_BYTES:
        data = json.dumps(
            [asdict(replace(o, stacks=o.stacks[:1], below=(), recorded=())) for o in observations]
        ).encode()
    return data


def decode_observations(data: bytes) -> list[Observation]:
    """Return the observations in what `encode_observations` has returned."""
    return from_json(data, list[Observation])


def observe(targets: Mapping[int, Target]) -> list[Observation]:
    """Observe the ranks, which takes up to `_PY_SPY_S` + `_ANSWER_S` seconds and a little."""
    began_s = time.monotonic()
    pids = {rank: _python_of(target) for rank, target in targets.items()}
    before = {rank: state_and_cpu_s(pid) for rank, pid in pids.items()}
    asked = {rank: t.pulse for rank, t in targets.items() if t.pulse is not None and t.pulse.read().queued >= 0}
    for pulse in asked.values():
        pulse.ask()
    observations = {rank: _facts(rank, pids[rank], target) for rank, target in targets.items()}
    observations = _with_py_spy(observations)
    time.sleep(max(0.0, began_s + _WINDOW_S - time.monotonic()))
    for rank, pid in pids.items():
        now, then = state_and_cpu_s(pid), before[rank]
        if now and then:
            busy = (now[1] - then[1]) / (time.monotonic() - began_s)
            observations[rank] = replace(observations[rank], busy=round(busy, 2))
    observations = _with_faulthandler(observations, targets)
    able = [pulse for rank, pulse in asked.items() if observations[rank].state not in ("T", "t")]
    until_s = began_s + _WINDOW_S + _ANSWER_S
    while time.monotonic() < until_s and any(pulse.recorded() is None for pulse in able):
        time.sleep(_TICK_S)
    for rank, pulse in asked.items():
        lines = tuple(line[:_TEXT] for line in (pulse.recorded() or "").splitlines()[-_RECORDED_LINES:])
        observations[rank] = replace(observations[rank], recorded=lines)
    return list(observations.values())


def _python_of(target: Target) -> int:
    """Return the process that has the stacks: the rank's own, or a Python that a shell, say, has started."""
    below = descendants(target.pid)
    if target.pulse is not None and (listener := target.pulse.read().listener) in below:
        return listener
    for pid in (target.pid, *sorted(below)):
        with contextlib.suppress(OSError):
            if "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
                return pid
    return target.pid


def _facts(rank: int, pid: int, target: Target) -> Observation:
    state = (state_and_cpu_s(pid) or ("", 0.0))[0]
    stopped = target.stopped_by
    if pid != target.pid and stopped:  # a shell above
        state = "T"
    below = []
    for child in sorted(descendants(pid))[:_THREADS]:
        its = state_and_cpu_s(child)
        below.append(f"{name_of(child)} (pid {child}, state {its[0] if its else '?'})")
    return Observation(
        rank, pid, state, stopped, _proc(pid, "wchan").strip("0"), _proc(pid, "syscall"),
        pulse=target.pulse.read() if target.pulse is not None else None,
        no_stacks="the process is gone" if not state else "", below=tuple(below),
    )  # fmt: skip


def _proc(pid: int, name: str) -> str:
    return text_of(f"/proc/{pid}/{name}")


# --- py-spy


def _with_py_spy(observations: dict[int, Observation]) -> dict[int, Observation]:
    """Add the stacks that py-spy may read; after the first that may not be read none is tried."""
    beside = Path(sys.executable).with_name("py-spy")
    program = shutil.which("py-spy") or (str(beside) if beside.is_file() else None)
    if program is None:
        return observations
    result, until_s = dict(observations), time.monotonic() + _PY_SPY_S
    for rank, seen in observations.items():
        command = [program, "dump", "--nonblocking", "--json", "--pid", str(seen.pid)]
        left_s = until_s - time.monotonic()
        if not seen.state or left_s <= 0:
            continue
        try:
            said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=left_s).stdout
        except (OSError, subprocess.TimeoutExpired):
            break
        if stacks := read_py_spy(said, seen.pid):
            result[rank] = replace(seen, stacks=stacks, stacks_by="py-spy")
        elif b"ermission denied" in said:
            break
    return result


def read_py_spy(said: bytes, pid: int) -> tuple[Stack, ...]:
    """Return the threads of ``py-spy dump --json``, the main one first; none where it could not read them."""
    try:
        threads = sorted(json.loads(said), key=lambda thread: thread.get("os_thread_id") != pid)
        return tuple(
            tuple(
                Frame(f["filename"][:_TEXT], int(f["line"]), f["name"].rpartition(".")[2][:_TEXT])
                for f in thread["frames"][:_FRAMES]
            )
            for thread in threads[:_THREADS]
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()


# --- faulthandler


def _with_faulthandler(observations: dict[int, Observation], targets: Mapping[int, Target]) -> dict[int, Observation]:
    """Add the stacks that ranks write themselves.

    All are asked at once; a stopped process would answer when it continues, and is not asked.
    """
    asked: dict[int, PulseFile] = {}
    result = dict(observations)
    for rank, seen in observations.items():
        pulse = targets[rank].pulse
        if seen.stacks or seen.no_stacks:
            continue
        if seen.state in "Tt":
            result[rank] = replace(seen, no_stacks="it is stopped; py-spy could read it (`pip install py-spy`)")
        elif pulse is None or seen.pulse is None or seen.pulse.listener != seen.pid or not _handles(seen.pid):
            why = "neither forked by the launcher nor using shardwright; py-spy could read it (`pip install py-spy`)"
            result[rank] = replace(seen, no_stacks=why)
        else:
            pulse.take_stacks(0)
            send_signal(seen.pid, STACK_SIGNAL)
            asked[rank] = pulse
    _wait_for_answers(asked)
    for rank, pulse in asked.items():
        stacks = read_faulthandler(pulse.take_stacks(_STACKS_BYTES))
        why = "" if stacks else f"it did not answer {STACK_SIGNAL.name} within {_ANSWER_S:g} s"
        result[rank] = replace(
            observations[rank], stacks=stacks, stacks_by="faulthandler" if stacks else "", no_stacks=why
        )
    return result


def _handles(pid: int) -> bool:
    """Return whether a process catches the signal; a program that a rank has executed since its fork may not."""
    for line in _proc(pid, "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def _wait_for_answers(asked: Mapping[int, PulseFile]) -> None:
    """Wait until each rank has written, and then nothing more for a moment, or the time is over."""
    until_s = time.monotonic() + _ANSWER_S
    sizes: dict[int, int] = {}
    while time.monotonic() < until_s:
        now = {rank: pulse.stacks_bytes() for rank, pulse in asked.items()}
        if now == sizes and all(now.values()):
            return
        sizes = now
        time.sleep(_TICK_S)


def read_faulthandler(text: str) -> tuple[Stack, ...]:
    r"""Return the threads of faulthandler's traceback, the main one first: it writes the newest first.

    >>> read_faulthandler('Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n\n'
    ...                   'Current thread 0x2 (most recent call first):\n  File "b.py", line 2 in <module>\n')[0]
    (Frame(file='b.py', line=2, function='<module>'),)
    """
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.fullmatch(line)) and len(threads[-1]) < _FRAMES:
            threads[-1].append(Frame(frame[1][:_TEXT], int(frame[2]), frame[3][:_TEXT]))
    return tuple(tuple(frames) for frames in threads[::-1][:_THREADS])
