"""The program on a host for `shardwright ps -H`, `stop -H` and `watch -H`: it finds jobs of this user, and ends them.

A job is known by the mark that all its processes carry, and by the record of its launcher where that is on this host.
Above the processes of a job whose launcher is elsewhere stands an agent, as long as that launcher is heard. The orders:

    {"order": "jobs"}                           what there is of jobs (`jobs`)
    {"order": "end", "id": ID, "now": false}    who watches a job is told to end it, or its processes, if nobody does
    {"order": "kill", "id": ID}                 what there is of it is killed
    {"order": "watch", "folder": PATH}          the job with this folder, now (`launch.progress.ranks`)
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.cluster.programs.on_host import answer_orders
from shardwright.launch.carriers.packed import BOOT
from shardwright.launch.host import processes
from shardwright.launch.joblog.jobs import known_jobs, tell_launcher
from shardwright.launch.progress.ranks import WatchedJob

_MARK = re.compile(r"(.+-[0-9a-f]{16})(?:/\d+)?")
_KILL_S = 8.0


def _processes() -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for pid, mark in processes.job_marks().items():
        if (match := _MARK.fullmatch(mark)) and _is_ours(pid):
            found.setdefault(match[1], set()).add(pid)
    return found


def _is_ours(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def _agents(pids: Collection[int]) -> set[int]:
    above = {up for pid in pids if (up := processes.parent(pid)) is not None} - set(pids)
    return {pid for pid in above if _is_ours(pid) and _is_agent(pid)}


def _is_agent(pid: int) -> bool:
    try:
        return BOOT.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def jobs() -> dict[str, Any]:
    """Return the jobs of which there are processes here, and those that were launched here."""
    return {
        "records": [{**asdict(record), "lives": record.lives} for record in known_jobs()],
        "parts": [_part(job_id, pids) for job_id, pids in _processes().items()],
    }


def _part(job_id: str, pids: set[int]) -> dict[str, Any]:
    """Return the part of a job here: its age, whether an agent watches it, and from where that was started."""
    agents = _agents(pids)
    begun = [ticks for pid in pids if (ticks := processes.start_ticks(pid)) is not None]
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    age_s = up_s - min(begun) / os.sysconf("SC_CLK_TCK") if begun else 0.0
    origins = [told.split()[0] for pid in agents if (told := processes.variable(pid, "SSH_CONNECTION"))]
    return {
        "id": job_id, "processes": len(pids), "age_s": age_s, "watched": bool(agents),
        "origin": next(iter(origins), None),
    }  # fmt: skip


def end(job_id: str, now: bool) -> dict[str, Any]:
    """Tell a job to end: its launcher, if it is here, or else the agents, or processes that nobody watches."""
    if records := [record for record in known_jobs() if job_id in record.marks and record.lives]:
        for record in records:
            tell_launcher(record, now)
        return {}
    pids = _processes().get(job_id, set())
    if agents := _agents(pids):
        _signal(agents, processes.KILL_NOW if now else processes.ASK_LAUNCHER)
    else:
        _signal(pids, signal.SIGKILL if now else signal.SIGTERM)
    return {}


def _signal(pids: Collection[int], signum: int) -> None:
    for pid in pids:
        processes.send_signal(pid, signum)
        processes.send_signal(pid, signal.SIGCONT)


def kill(job_id: str) -> dict[str, Any]:
    """Kill what there is of a job. Its agents take what the job has written here with them."""
    _signal(_agents(_processes().get(job_id, set())), signal.SIGTERM)
    processes.kill_all(lambda: _processes().get(job_id, set()), _KILL_S)
    return {}


@cache
def _watched(folder: str) -> WatchedJob:
    """Return who reads a job's folder, and remembers how far it has.

    Cached by the folder: its answers are read anew each time, this only keeps the place in growing files.
    """
    return WatchedJob(Path(folder))


def main(_packed: int) -> None:
    """Answer orders until there are no more."""
    answer_orders({
        "jobs": lambda _: jobs(),
        "end": lambda order: end(order["id"], order["now"]),
        "kill": lambda order: kill(order["id"]),
        "watch": lambda order: asdict(_watched(order["folder"]).snapshot()),
    })  # fmt: skip
