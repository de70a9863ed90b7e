"""Shows a job as a screen on a terminal, and as lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.common.words import in_bytes, in_time, on_a_clock, plain
from shardwright.launch.joblog.job import RUNNING
from shardwright.launch.progress.lines import StepLine
from shardwright.launch.progress.ranks import RankSnapshot, Snapshot

_WIDE, _HOSTS = 100, 76  # columns of a terminal, from which on names are whole, and hosts and reasons are shown
_LOG_LINES, _FEWEST_RANKS = 8, 3
# The name of a column, on a narrow terminal too, and the letters that its numbers have at most.
_COLUMNS = (
    ("rank", "rank", 4), ("step", "step", 5), ("a step", "a step", 7), ("computes", "comp", 7),
    ("communicates", "comm", 7), ("loads data", "data", 7), ("holds", "holds", 8),
)  # fmt: skip
_NOTHING = "-"


def screen(seen: Snapshot, width: int, height: int) -> RenderableType:
    """Return a screen of so many columns and rows: ranks with a mark come first where not all fit."""
    marks, wires = seen.marks(), list(_wires(seen))
    fixed = len(_head(seen)) + len(wires) + 3 + (seen.plan is not None)
    room = max(_FEWEST_RANKS, height - fixed - min(len(seen.log), _LOG_LINES))
    shown = _chosen(seen, marks, room)
    left = len(seen.ranks) - len(shown)
    table = _table(seen, shown, marks, width)
    more = [Text(f"and {left} more ranks", style="dim")] if left > 0 else []
    log = _log(seen, max(0, min(_LOG_LINES, height - fixed - len(shown) - len(more))))
    parts: list[RenderableType] = [*_head(seen), Text(), table, *more, *wires, Text(), *log]
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def _chosen(seen: Snapshot, marks: dict[int, str], room: int) -> list[RankSnapshot]:
    if len(seen.ranks) <= room:
        return list(seen.ranks)
    chosen = sorted(seen.ranks, key=lambda rank: rank.rank not in marks)[: max(1, room - 1)]
    return sorted(chosen, key=lambda rank: rank.rank)


def _head(seen: Snapshot) -> list[Text]:
    hosts = list(dict.fromkeys(rank.state.host for rank in seen.ranks if rank.state.host))
    until_s = seen.now_s if seen.runs or seen.state.ended_s is None else seen.state.ended_s
    count = len(seen.ranks) or seen.state.ranks
    ranks = f"{count} rank{'s' * (count != 1)}"
    where = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
    restarts = f"  restarts {seen.state.restarts}" if seen.state.restarts else ""
    status = seen.state.status if seen.runs else seen.state.end
    first = Text.assemble(
        ("job ", ""), (plain(seen.name), "bold"), f"  {status} {on_a_clock(until_s - seen.state.started_s)}  ", ranks,
        where, (restarts, "yellow"),
    )  # fmt: skip
    return [first, Text(progress(seen) or _why_nothing(seen), style="" if progress(seen) else "dim")]


def _why_nothing(seen: Snapshot) -> str:
    if not seen.ranks:
        return "ranks.jsonl is missing in its folder: an older version launched it, or the disk was full"
    return "no step has been told yet" if seen.runs else "no step was told"


def progress(seen: Snapshot) -> str:
    """Return the progress of the training, in a line; empty where nothing has been reported."""
    line, doing = seen.first, [plain(seen.doing)] if seen.doing else []
    if line is None:
        return "".join(doing)
    parts = [*doing, f"step {line.step}"]
    if line.loss is not None:
        parts.append(f"loss {line.loss:.6g}")
    if line.samples and line.seconds:
        parts.append(f"{line.samples / line.seconds:.4g} samples/s")
    if line.step_s is not None:
        planned = seen.plan.get("seconds") if seen.plan else None
        parts.append(f"{in_time(line.step_s)} a step" + (f" (plan {in_time(planned)})" if planned else ""))
    return ", ".join(parts)


def _table(seen: Snapshot, shown: Sequence[RankSnapshot], marks: dict[int, str], width: int) -> Table:
    several = width >= _HOSTS and len({rank.state.host for rank in seen.ranks}) > 1
    table = Table(box=None, padding=(0, 2 if width >= _WIDE else 1, 0, 0), pad_edge=False, header_style="bold")
    for wide, narrow, least in _COLUMNS:
        table.add_column(wide if width >= _WIDE else narrow, justify="right", no_wrap=True, min_width=least)
    if several:
        table.add_column("host", no_wrap=True, max_width=width // 6)
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    if seen.plan is not None:
        table.add_row("plan", *_planned(seen.plan), *([""] if several else []), Text("expected", style="dim"))
    for rank in shown:
        mark = marks.get(rank.rank, "")
        style = "" if not mark else "yellow" if mark.startswith("slow") else "bold red"
        word = mark or ("" if rank.state.state == RUNNING and rank.line else rank.state.state or "starting")
        host = [plain(rank.state.host)] if several else []
        last = Text(plain(word if width >= _HOSTS else _kind(word)), style=style or "dim")
        table.add_row(str(rank.rank), *_cells(rank.line), *host, last, style=style)
    return table


def _cells(line: StepLine | None) -> list[str]:
    if line is None:
        return [_NOTHING] * (len(_COLUMNS) - 1)
    times = (line.step_s, line.computing_s, line.waiting_s, line.loading_s)
    held = _NOTHING if line.held_bytes is None else in_bytes(line.held_bytes)
    return [str(line.step), *(_NOTHING if seconds is None else in_time(seconds) for seconds in times), held]


def _planned(plan: Any) -> list[str]:
    times = [plan.get(name) for name in ("seconds", "computing_s", "communicating_s")]
    held = plan.get("held_bytes")
    return ["", *(_NOTHING if seconds is None else in_time(seconds) for seconds in times), "",
            _NOTHING if held is None else in_bytes(held)]  # fmt: skip


def _wires(seen: Snapshot) -> Iterator[Text]:
    for rank in seen.ranks:
        if rank.wire is not None:
            sent = seen.plan.get("sent_bytes") if seen.plan else None
            plan = f"; plan: {in_bytes(sent)} a step from each device" if sent else ""
            into, out, within = (in_bytes(rank.wire.get(name, 0.0)) for name in ("in", "out", "within"))
            where = f"{plain(rank.state.host)}: " if rank.state.host else ""
            yield Text(f"wire  {where}{into}/s in, {out}/s out, {within}/s within{plan}", style="dim")


def _log(seen: Snapshot, most: int) -> list[Text]:
    lines = seen.log[len(seen.log) - most :] if most else ()
    return [Text.assemble((f"[{rank}] ", "dim"), plain(text, 300)) for rank, text in lines]


def events(before: Snapshot | None, now: Snapshot) -> list[str]:
    """Return the changes of the ranks since the last look, in lines."""
    old, new = before.marks() if before is not None else {}, now.marks()
    came = [f"rank {rank}: {mark}" for rank, mark in new.items() if _kind(old.get(rank, "")) != _kind(mark)]
    went = [f"rank {rank}: no longer {_kind(mark)}" for rank, mark in old.items() if rank not in new and now.runs]
    restarts = before.state.restarts if before is not None else 0
    again = [f"restart {now.state.restarts}"] if now.state.restarts != restarts else []
    return [*again, *came, *went]


def _kind(mark: str) -> str:
    """Return a mark without its numbers, which change with each look."""
    return mark.partition(" ")[0].rstrip(":")
