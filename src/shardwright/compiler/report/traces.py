"""Traces of several ranks as one, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Trace = Mapping[str, Any]
"""A trace that torch's profiler has exported, read from its JSON."""
_FLOWS = ("s", "t", "f")  # the kinds of events that belong together by their id


def merged(traces: Sequence[Trace]) -> dict[str, Any]:
    """The traces of ranks, rank 0's first, as one: each rank's processes have its number before their names."""
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in traces]
    events: list[dict[str, Any]] = []
    pids: dict[tuple[int, Any], int] = {}
    for rank, (trace, base) in enumerate(zip(traces, bases, strict=True)):
        shift_us = (base - bases[0]) / 1e3
        for event in trace["traceEvents"]:
            events.append(_of_rank(event, rank, len(traces), shift_us, pids))
    names = {"process_name", "process_sort_index"}
    named = {event["pid"] for event in events if event.get("name") == "process_name"}
    events += [_named(pid, rank) for (rank, _), pid in pids.items() if pid not in named]
    rest = {name: value for name, value in traces[0].items() if name != "traceEvents"}
    return rest | {"traceEvents": sorted(events, key=lambda event: event.get("name") not in names)}


def _of_rank(
    event: Mapping[str, Any], rank: int, ranks: int, shift_us: float, pids: dict[tuple[int, Any], int]
) -> dict[str, Any]:
    """An event with the numbers that it has among those of all ranks."""
    moved = dict(event)
    if "pid" in moved:
        moved["pid"] = pids.setdefault((rank, event["pid"]), len(pids) + 1)
    if "ts" in moved and moved.get("ph") != "M":
        moved["ts"] = float(moved["ts"]) + shift_us
    if moved.get("ph") in _FLOWS and isinstance(moved.get("id"), int):
        moved["id"] = moved["id"] * ranks + rank
    if moved.get("name") == "process_name":
        moved["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
    if moved.get("name") == "process_sort_index":
        moved["args"] = {"sort_index": rank}
    return moved


def _named(pid: int, rank: int) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": f"rank {rank}"}}
