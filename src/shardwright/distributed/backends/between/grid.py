"""The grid of a group: ranks that share memory, host by host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shardwright.distributed.backends.segment.memory import SMALL_BYTES

PAIR = 2  # hosts: each sends as much whether it sends all of a piece or sends halves twice


@dataclass(frozen=True)
class Grid:
    """The ranks of a group by their places, the hosts or containers within which memory can be shared: a row for each.

    >>> grid = Grid.of(["a", "b", "a", "b"])
    >>> grid.rows, grid.at(3), grid.column(1)
    (((0, 2), (1, 3)), (1, 1), (2, 3))
    """

    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, places: Sequence[Hashable]) -> Grid:
        """``places`` are those of the ranks, in their order."""
        rows: dict[Hashable, list[int]] = {}
        for rank, place in enumerate(places):
            rows.setdefault(place, []).append(rank)
        return cls(tuple(map(tuple, rows.values())))

    @property
    def is_whole(self) -> bool:
        """Return whether there are several ranks at each place, and as many at all."""
        return len({len(row) for row in self.rows}) == 1 and len(self.rows[0]) > 1

    def at(self, rank: int) -> tuple[int, int]:
        """The row in which a rank stands, and where it stands there."""
        return next((number, row.index(rank)) for number, row in enumerate(self.rows) if rank in row)

    def column(self, index: int) -> tuple[int, ...]:
        """The ranks that stand there, one of each row; the rows are as long as each other."""
        return tuple(row[index] for row in self.rows)


def sums_parts(hosts: int, inside: int, size_bytes: float) -> bool:
    """Return whether each host, of ``inside`` ranks, reduces a part and sends that to all; else each sends its own sum.

    >>> [sums_parts(hosts, inside=8, size_bytes=2**25) for hosts in (2, 3)], sums_parts(3, 8, 2**20)
    ([False, True], False)
    """
    return hosts > PAIR and size_bytes / inside > SMALL_BYTES
