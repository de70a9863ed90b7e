"""Reports to the launcher which collectives a GPU has completed, and how much memory and traffic a rank has.

NCCL's calls return when a collective is enqueued, so that they do not say whether it has run. An event is recorded
before and after each collective, and a thread writes to this rank's pulse which of the events the GPU has passed: the
report of a hang then says in which collective a GPU is, or that it never began it. Without a launcher that watches
there are neither events nor a thread.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwright.common.pulse import Pulse
from shardwright.common.step_lines import Steps
from shardwright.common.threads import Thread
from shardwright.common.torch_private import flight_recorder
from shardwright.launch.hosts.network import Wire

_PAUSE_S = 0.1
_RECORDED = 2000  # collectives that the flight recorder keeps
_COMPLETED_SHOWN = 3
# Both names count; the second is the older one.
_RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def switch_on_recorder() -> None:
    """Enable torch's flight recorder of NCCL collectives, unless the user configured it; before a group is created."""
    if not any(name in os.environ for name in _RECORDER_VARIABLES):
        os.environ[_RECORDER_VARIABLES[0]] = str(_RECORDED)


def follow_device(pulse: Pulse, device: torch.device) -> None:
    """Start a thread that records the progress of a GPU in ``pulse``, if a launcher detects hangs."""
    if pulse.watched and device.type == "cuda" and not pulse.follows:
        pulse.follow(_event)
        atexit.register(Follower(pulse, lambda: recorded(flight_recorder())).end)


def measure_steps(steps: Steps, device: torch.device, first_of_host: bool) -> None:
    """Have ``steps`` measure what is held on ``device``, and one rank of each host what that has moved."""
    if not steps.has_reader:
        return
    if device.type == "cuda":
        steps.communicating_s = None
        steps.measures["held_bytes"] = lambda: torch.cuda.max_memory_allocated(device)
    else:
        steps.measures["held_bytes"] = _held_since(_resident_bytes())
    if first_of_host:
        steps.measures["wire"] = Wire()


def _held_since(before_bytes: int) -> Callable[[], int]:
    """Return what a process holds beside what it held when its world began: Python, torch and what they loaded."""
    return lambda: max(0, _resident_bytes() - before_bytes)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class Follower:
    """Looks every `_PAUSE_S` seconds until its end; answers with ``recorded()`` where the supervisor asks for it."""

    def __init__(self, pulse: Pulse, recorded: Callable[[], str]) -> None:
        self._pulse, self._recorded = pulse, recorded
        self._ended = threading.Event()
        self._thread = Thread(self._follow, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for the thread: the interpreter would end one that is in C++ by force."""
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(_PAUSE_S):
            try:
                self._pulse.look()
            except RuntimeError:  # the GPU has failed, of which the program will tell
                return
            if self._pulse.is_asked():
                self._pulse.answer(self._recorded())


def recorded(dump: str | bytes) -> str:
    """Return what the flight recorder has: a line for each collective that has not ended, and the last that have.

    >>> ended = {"process_group": ["0", "world"], "profiling_name": "nccl:all_reduce", "collective_seq_id": 7,
    ...     "input_sizes": [[4, 8]], "input_dtypes": ["Float"], "state": "completed", "frames": []}
    >>> open = ended | {"collective_seq_id": 8, "state": "scheduled", "frames": [{"filename": "a/t.py", "line": 3}]}
    >>> print(recorded(json.dumps({"entries": [ended, open]})))
    world: all_reduce 7 of Float[4, 8] is completed
    world: all_reduce 8 of Float[4, 8] is scheduled (t.py:3)
    """
    try:
        entries = json.loads(dump).get("entries") or []
        return "\n".join(_line(entry) for entry in _telling(entries))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:  # another version's form
        return f"what torch has recorded cannot be read: {type(error).__name__}: {error}"


def _telling(entries: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        by_group.setdefault(entry["process_group"][-1], []).append(entry)
    found = []
    for group in by_group.values():
        found += [entry for entry in group if entry["state"] == "completed"][-_COMPLETED_SHOWN:]
        found += [entry for entry in group if entry["state"] != "completed"]
    return found


def _line(entry: Mapping[str, Any]) -> str:
    name = entry["profiling_name"].rpartition(":")[2]
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    tensors = ", ".join(map("{}{}".format, entry["input_dtypes"], entry["input_sizes"]))
    frame = next(iter(entry.get("frames") or ()), None)
    called = f" ({frame['filename'].rpartition('/')[2]}:{frame['line']})" if frame else ""
    return f"{entry['process_group'][-1]}: {name} {number} of {tensors} is {entry['state']}{called}"
