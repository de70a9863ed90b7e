"""Plans are remembered in files for the next job."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright import __version__
from shardwright.common import package
from shardwright.common.private_folder import cache_folder, is_private
from shardwright.common.schema import SchemaError, from_json
from shardwright.common.whole_file import write_whole
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.rules.register import registered_rules
from shardwright.errors import PlanError


def cache_directory() -> Path:
    """Return the folder where plans are kept between jobs: ``$XDG_CACHE_HOME/shardwright/plans``, or under ~/.cache.

    Where others may write to that it is one in ``/tmp``, of this user alone. Raises `OSError` where it cannot be made.
    """
    return cache_folder("plans")


@cache
def planner_digest() -> str:
    """Return a hash of the code that plans: every source of the compiler and of all wings that it may import."""
    text = hashlib.sha256()
    for name, source in package.sources(*package.WINGS[: package.WINGS.index("compiler") + 1]).items():
        text.update(f"{name} {hashlib.sha256(source).hexdigest()}\n".encode())
    return text.hexdigest()[:32]


def plan_key(graph: RuledGraph, request: PlanRequest) -> dict[str, str]:
    """Return everything that a plan depends on, by name: two plans of one key are the same plan.

    A plan is `make_plan(capture, request)`, which reads no clock, no environment and no file. What it returns follows
    from its arguments, from the code that runs, and from the rules that users have registered:

    - ``graph`` hashes the operators with all their arguments, the modules they stand in and their pins, and the values
      with their shapes, dtypes and whether they need gradients;
    - ``request`` hashes every field of `PlanRequest` (a new one by itself): the mesh, the mode, the search, the budget,
      the optimizer, what is recomputed, how parameters are stored, and the content of the hardware profile, not its
      name;
    - ``code`` hashes the sources of the room `plan` and of all rooms before it: it imports no others
      (tests/test_architecture.py), so that the table of rules, of backends and the sizes of buckets are in it;
    - ``torch``, ``numpy`` and ``python`` are the libraries that it calls; ``shardwright`` is there for people;
    - ``rules`` are those that users have given to operators of this graph.
    """
    return {
        "shardwright": __version__,
        "code": planner_digest(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "numpy": np.__version__,
        "python": platform.python_version(),
        "graph": graph.capture.digest,
        "request": request.digest,
        "rules": json.dumps(_rules_of_users(graph), sort_keys=True),
    }


def _rules_of_users(graph: RuledGraph) -> dict[str, str]:
    """Return the rules of the graph's operators that do not stand in the planner's sources."""
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
    """Return where a plan was found, of when it is, and how to be rid of it."""
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
    """Return the plan of an earlier job for the same key (`plan_key`), else a new one.

    The file holds the whole key beside the plan, and is passed over where that is another one, whatever it is called.
    So is every file while sources are newer than this process, which may run what stood in them before. The cache is
    never needed: what cannot be read is searched anew, and written again with a line that says why. Where a search was
    saved, it is said, of the first plan of a process.
    """
    if package.changed_since_import():
        return make(graph.capture, request)
    key = plan_key(graph, request)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    try:
        path = cache_directory() / f"{name}.json"
    except (OSError, RuntimeError):
        return make(graph.capture, request)
    try:
        if (found := _read(path, key, graph)) is not None:
            if request.searched is not None:
                say(_said(path))
            return found
    except (OSError, PlanError) as error:
        text = f"{path} is not used, and another plan takes its place: {error}"
        print(f"shardwright: {text}", file=sys.stderr, flush=True)
    plan = make(graph.capture, request)
    text = json.dumps({"key": key, "plan": json.loads(plan.to_json())}, indent=1)
    with suppress(OSError):
        write_whole(path, lambda draft: draft.write_text(text + "\n"))
    return plan


@dataclass(frozen=True)
class _Kept:
    """A file of the cache."""

    key: dict[str, str]
    plan: dict[str, Any]


def _read(path: Path, key: dict[str, str], graph: RuledGraph) -> Plan | None:
    """Return the plan that a file holds for this key, None where there is no file.

    Raises:
        PlanError: where it holds none, or somebody else may have written it.
    """
    if not path.exists():
        return None
    if not is_private(path):
        raise PlanError("another user may have written it")
    try:
        kept = from_json(path.read_bytes(), _Kept)
    except SchemaError as error:
        raise PlanError(str(error)) from error
    if kept.key != key:
        raise PlanError("it is of another key")
    return Plan.from_json(json.dumps(kept.plan), graph)
