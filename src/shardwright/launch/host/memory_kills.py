"""Kills for lack of memory as the kernel counts them: on the host, and in each control group.

The count of the group that a process is in tells its kill from that of a process elsewhere on the host. Where there is
no such group, or none that can be read, the count of the host has to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardwright.launch.host.processes import is_ending
from shardwright.launch.host.system_files import text_of

_AGE_S = 30.0  # a large process takes its time from the kernel's kill to its end
_LOOK_S = 1.0
_HOST = Path("/proc/vmstat")
# The controller's name in /proc/PID/cgroup, which the second kind of groups has not, and the files that count there.
_FILES = {"memory": ("memory.oom_control",), "": ("memory.events.local", "memory.events")}


class MemoryKills:
    """The kernel's kills for lack of memory in the last while, where processes are."""

    def __init__(self) -> None:
        self._files: dict[int, Path] = {}
        self._counts: dict[Path, _Count] = {}
        self._looked_s = 0.0

    def look(self, pids: Iterable[int]) -> None:
        """Note the control groups of living processes, and the counts there; one that has ended is in none any more."""
        now_s = time.monotonic()
        if now_s < self._looked_s + _LOOK_S:
            return
        self._looked_s = now_s
        for pid in pids:
            file = counting_file(pid) or _HOST
            if not is_ending(pid):  # then it is shown in the group at the top
                self._files[pid] = file
        for file in set(self._files.values()):
            self._counts.setdefault(file, _Count(file)).sample(now_s)

    def recent(self, pid: int) -> bool:
        """Return whether there was one where the process was, for one or two intervals."""
        count = self._counts.get(self._files.get(pid, _HOST))
        return count is not None and count.recent()


@dataclass
class _Count:
    """A count of the kernel's, now and at two moments before."""

    file: Path

    def __post_init__(self) -> None:
        self.older = self.newer = kills(self.file) or 0
        self.sampled_s = time.monotonic()

    def sample(self, now_s: float) -> None:
        if now_s >= self.sampled_s + _AGE_S:
            self.older, self.newer, self.sampled_s = self.newer, kills(self.file) or 0, now_s

    def recent(self) -> bool:
        return (kills(self.file) or 0) > self.older


def kills(file: Path) -> int | None:
    """Return the count in a file of the kernel's; None where there is none."""
    lines = text_of(file).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def counting_file(pid: int) -> Path | None:
    """Return the file that counts the kills in the control group of a living process; None where there is none."""
    for names, group in (line.split(":", 2)[1:] for line in text_of(f"/proc/{pid}/cgroup").splitlines()):
        for controller, root, point in _mounts():
            below = os.path.relpath(group, root)
            if controller not in names.split(",") or below.startswith(".."):
                continue
            for file in (Path(point) / below / name for name in _FILES[controller]):
                if kills(file) is not None:
                    return file
    return None


@cache
def _mounts() -> tuple[tuple[str, str, str], ...]:
    """Return the mounts of control groups of either kind: the controller, the group at the top, and the folder.

    Cached once: control groups are mounted as the host starts.
    """
    found = []
    for line in text_of("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        (_, _, _, root, point, *_), (kind, *_, options) = before.split(), after.split()
        if kind == "cgroup2":
            found.append(("", root, point))
        elif kind == "cgroup" and "memory" in options.split(","):
            found.append(("memory", root, point))
    return tuple(found)
