"""The result of a verification, and how it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.compiler.plan.plan import Plan


@dataclass(frozen=True)
class Deviation:
    """The largest deviation of one kind from one reference, and where it is: tensor, step, index and rank.

    ``got`` and ``expected`` are the entries there; ``skipped`` of ``entries`` are not compared (float32 parameters).
    """

    dtype: str
    reference: str
    kind: str
    largest: float
    tolerance: float
    name: str
    step: int
    index: tuple[int, ...]
    rank: int
    got: float
    expected: float
    entries: int
    skipped: int

    @property
    def ok(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def where(self) -> str:
        at = str(list(self.index)) if self.index else ""
        return f"{self.name}{at}, step {self.step}" if self.largest else ""


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. ``ok`` says whether every deviation is within its tolerance; it prints as a table.

    ``how`` says what was run: so many steps of AdamW, or a loop of the user's.
    """

    plan: Plan
    how: str
    deviations: tuple[Deviation, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(deviation.ok for deviation in self.deviations)

    def __str__(self) -> str:
        plan = self.plan
        rows = [("dtype", "against", "what", "largest", "tolerance", "", "where")]
        for d in self.deviations:
            verdict = "ok" if d.ok else "BEYOND"
            numbers = f"{d.largest:.1e}", f"{d.tolerance:.0e}"
            rows.append((d.dtype, d.reference, d.kind, *numbers, verdict, d.where))
        lines = [
            f"{self.how} on {counted(plan.mesh.size, 'rank')}: "
            f"mode {plan.mode}, search {plan.search}, mesh {plan.shown_mesh}",
            "",
            _table(rows),
            "",
            *self.notes,
            *(_accusation(d) for d in self.deviations if not d.ok),
            "within tolerance: the plan gives what one device gives" if self.ok else "BEYOND TOLERANCE",
        ]
        return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """``1 step``, ``3 steps``."""
    return f"{number} {noun}" + "s" * (number != 1)


def _accusation(d: Deviation) -> str:
    return (
        f"{d.dtype} {d.kind}: {d.name}{list(d.index) if d.index else ''} is {d.got:.9g} on rank {d.rank} "
        f"in step {d.step}, {d.reference} has {d.expected:.9g}"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
