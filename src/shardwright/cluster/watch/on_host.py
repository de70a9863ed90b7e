"""The program on a host for `shardwright watch -H`, which reads the folder of a job that was launched there.

{"order": "jobs"}                     the jobs that were launched here
{"order": "watch", "folder": PATH}    the job with this folder, now (`launch.progress.ranks`)
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.cluster.programs.on_host import answer_orders
from shardwright.launch.joblog.jobs import known_jobs
from shardwright.launch.progress.ranks import WatchedJob


@cache
def _watched(folder: str) -> WatchedJob:
    """Return who reads a job's folder, and remembers how far it has.

    Cached by the folder: its answers are read anew each time, this only keeps the place in growing files.
    """
    return WatchedJob(Path(folder))


def _jobs() -> dict[str, Any]:
    return {"records": [asdict(record) for record in known_jobs()]}


def main(_packed: int) -> None:
    """Answer orders until there are no more."""
    answer_orders({
        "jobs": lambda _: _jobs(),
        "watch": lambda order: asdict(_watched(order["folder"]).snapshot()),
    })  # fmt: skip
