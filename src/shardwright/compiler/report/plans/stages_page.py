"""Where the seconds of planning went: by stage, and by mesh and search."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shardwright.common.stages import StageRow

_WIDTH = 100
MOST_ROWS = 12  # of meshes and searches


def stages_page(rows: Sequence[StageRow]) -> str:
    """Return two tables of the stages that were recorded."""
    whole_s = sum(row.seconds for row in rows)
    times = _summed(rows, lambda row: (row.stage,), lambda row: row.times)
    stages = _table(f"{whole_s:.2f} s by stage", ("stage", "times"))
    for (name,), seconds in _summed(rows, lambda row: (row.stage,), lambda row: row.seconds).items():
        stages.add_row(name, f"{times[name,]:,.0f}", *_cells(seconds, whole_s))
    within = [row for row in rows if row.mesh]
    meshes = _table("by mesh and search, of what is done for one", ("mesh", "search"))
    found = _summed(within, lambda row: (row.mesh, row.search), lambda row: row.seconds)
    for (mesh, search), seconds in [*found.items()][:MOST_ROWS]:
        meshes.add_row(mesh, search or "-", *_cells(seconds, whole_s))
    if len(found) > MOST_ROWS:
        meshes.add_row(f"and {len(found) - MOST_ROWS} that take less", "", "", "")
    console = Console(file=io.StringIO(), width=_WIDTH)
    console.print(stages, *[meshes] * bool(found))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


def _summed(
    rows: Sequence[StageRow], key: Callable[[StageRow], tuple[str, ...]], value: Callable[[StageRow], float]
) -> dict[tuple[str, ...], float]:
    """Return the sums by key, the largest first."""
    found: dict[tuple[str, ...], float] = {}
    for row in rows:
        found[key(row)] = found.get(key(row), 0.0) + value(row)
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, justify="right" if name == "times" else "left")
    for name in ("seconds", "share"):
        table.add_column(name, justify="right")
    return table


def _cells(seconds: float, whole_s: float) -> tuple[str, str]:
    return f"{seconds:.2f}", f"{seconds / whole_s:.1%}" if whole_s else "-"
