"""Plans are remembered in files for the next job."""

from __future__ import annotations

import contextlib
import hashlib
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
from shardwright.private_folder import cache_folder, is_private
from shardwright.rules.register import registered_rules
from shardwright.world.gradients import BUCKET_BYTES


def cache_directory() -> Path:
    """Return the folder where plans are kept between jobs: ``$XDG_CACHE_HOME/shardwright/plans``, or under ~/.cache.

    Where others may write to that it is one in ``/tmp``, of this user alone. Raises `OSError` where it cannot be made.
    """
    return cache_folder("plans")


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
    """Return the plan of an earlier job for the same graph and request, else a new one.

    A plan made by another planner is not met again. The cache is never needed: what cannot be read is searched anew,
    and written again with a line that says why. Where a search was saved, it is said, of the first plan of a process.
    """
    text = f"{__version__} {planner_digest()} {graph.capture.digest} {request.digest} {_rules_of_users(graph)}"
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    try:
        path = cache_directory() / f"{key}.json"
    except (OSError, RuntimeError):
        return make(graph.capture, request)
    try:
        if plan := _read(path, graph, request):
            if request.searched is not None:
                say(_said(path))
            return plan
    except (OSError, PlanError) as error:
        print(
            f"shardwright: a kept plan is not used, and another takes its place: {error}", file=sys.stderr, flush=True
        )
    plan = make(graph.capture, request)
    with contextlib.suppress(OSError, PlanError):
        plan.save(path)
    return plan


def _read(path: Path, graph: RuledGraph, request: PlanRequest) -> Plan | None:
    """Return the plan of a file; None where there is none.

    Raises:
        PlanError: where the file is no plan for this request, or somebody else may have written it.
    """
    if not path.exists():
        return None
    if not is_private(path):
        raise PlanError(f"{path} may have been written by another user")
    plan = Plan.load(path, graph)
    if plan.mode != request.mode or plan.mesh.size != request.mesh.size:
        raise PlanError(f"{path} has a plan of mode {plan.mode} on {plan.mesh.size} devices")
    return plan
