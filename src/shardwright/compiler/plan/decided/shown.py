"""How decisions are written for people: tables, and one name for equal layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardwright.compiler.plan.decided.decisions import Decisions

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns, the first one as a head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def in_tuples(strategies: Sequence[tuple[int, ...]]) -> str:
    """Slices per dim of several tensors: ``(2,4) (4,1)``."""
    return " ".join(str(strategy).replace(" ", "") for strategy in strategies) or "-"


def in_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks, the first of them where they are many: ``(0, 1, ... 64 in all)``."""
    shown = ", ".join(map(str, ranks[:most]))
    return f"({shown})" if len(ranks) <= most else f"({shown}, ... {len(ranks)} in all)"


def short(op: str) -> str:
    """An operator as people call it: ``aten.linear.default`` is a linear."""
    return op.split(".")[1]


def template(name: str) -> str:
    """A name without its numbers, by which equal layers are told: ``h.*.attn``."""
    return _NUMBER.sub("*", name)


def joined(names: Sequence[str]) -> str:
    """One name for those that differ in numbers alone, ``h.0-47.attn``; a dash for the model itself."""
    numbers = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    ranges = iter([_ranges(sorted(set(of))) for of in numbers])
    return _NUMBER.sub(lambda _: next(ranges), names[0]) or "-"


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def layers_computed_again(plan: Decisions) -> str:
    """The modules of whose inside nothing is kept, equal ones once."""
    alike: dict[str, list[str]] = {}
    for block in plan.blocks:
        alike.setdefault(template(block.name), []).append(block.name)
    return ", ".join(map(joined, alike.values()))
