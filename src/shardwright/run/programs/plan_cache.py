"""Plans are remembered in files for the next job."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path

import torch

from shardwright import __version__, package
from shardwright.backends.table import BACKENDS
from shardwright.errors import PlanError
from shardwright.graph.ir import Capture
from shardwright.plan.make import make_plan
from shardwright.plan.plan import Plan
from shardwright.plan.pricing.ruled import RuledGraph
from shardwright.plan.request import PlanRequest
from shardwright.rules.register import registered_rules
from shardwright.world.gradients import BUCKET_BYTES


def cache_directory() -> Path:
    """Where plans are remembered between jobs: ``$XDG_CACHE_HOME/shardwright/plans``, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardwright" / "plans"


@cache
def planner_digest() -> str:
    """A hash of everything that decides a plan: the sources of the planner, torch's version, the sizes of buckets."""
    of_backends = [(row.name, row.buckets, row.buckets_between) for row in BACKENDS.values()]
    text = hashlib.sha256(f"{torch.__version__} {BUCKET_BYTES} {of_backends}".encode())
    for name, source in package.sources("mesh", "rules", "graph", "plan").items():
        text.update(name.encode() + source)
    return text.hexdigest()[:32]


def _rules_of_users(graph: RuledGraph) -> dict[str, str]:
    """The rules of the graph's operators that do not stand in the planner's sources."""
    operators = {node.op for node in graph.capture.nodes}
    return {op: rule for op, rule in registered_rules().items() if op in operators}


class SaidOnce:
    """Writes the first text that it is given on standard error, and no other."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, text: str) -> None:
        if not self._said:
            self._said = True
            print(f"shardwright: {text}", file=sys.stderr, flush=True)


said_once = SaidOnce()
"""Of this process, which may parallelize several models."""


def _said(path: Path) -> str:
    """Where a plan was found, of when it is, and how to be rid of it."""
    try:
        saved = f" on {datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d at %H:%M}"
    except OSError:  # another job has deleted it since
        saved = ""
    return f"nothing was searched: an earlier start found this plan{saved}; delete {path} to search anew"


def remembered(
    graph: RuledGraph,
    request: PlanRequest,
    make: Callable[[Capture, PlanRequest], Plan] = make_plan,
    say: Callable[[str], None] = said_once,
) -> Plan:
    """The plan of an earlier job for the same graph and request, else a new one.

    A plan made by another planner is not met again. A file that cannot be read or written is ignored: the cache is
    never needed. Where that saves a search, it is said, of the first plan of a process.
    """
    text = f"{__version__} {planner_digest()} {graph.capture.digest} {request.digest} {_rules_of_users(graph)}"
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    path = cache_directory() / f"{key}.json"
    try:
        plan = Plan.load(path, graph)
    except PlanError:
        plan = make(graph.capture, request)
    else:
        if request.searched is not None:
            say(_said(path))
        return plan
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    except (OSError, PlanError):
        pass
    return plan
