"""The placement of ranks on hosts: by slots, in the order of the hosts, or as a rank table says."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.errors import UsageError
from shardwright.launch.hosts.hosts import Host, Hosts
from shardwright.launch.hosts.rank_table import RankTable


@dataclass(frozen=True)
class Placement:
    """``ranks[i]`` are those of ``hosts[i]``, by local rank. The first host is that of rank 0."""

    hosts: tuple[Host, ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(len(ranks) for ranks in self.ranks)

    @classmethod
    def by_slots(cls, hosts: Hosts, ranks: int | None, oversubscribe: bool = False) -> Placement:
        """Place so many ``ranks``, or one per slot; ranks beyond the slots are spread as the slots are.

        Raises `UsageError` for ranks beyond the slots, where that is not asked for, and where slots are not known.

        >>> Placement.by_slots(Hosts.from_list("a:2,b:2"), 3).ranks
        ((0, 1), (2,))
        >>> Placement.by_slots(Hosts.from_list("a:2,b:1"), 5, oversubscribe=True).ranks
        ((0, 1, 2, 3), (4,))
        """
        slots = [host.slots for host in hosts if host.slots is not None]
        if len(slots) < len(hosts):
            raise UsageError(f"the slots of some host are not known ({hosts}); give each its number: -H a:8,b:8")
        size = sum(slots) if ranks is None else ranks
        if size > sum(slots) and not oversubscribe:
            raise UsageError(
                f"-n {size} is more than the slots of {hosts}; leave -n out, give the hosts more slots (-H a:8,b:8), "
                "or type --oversubscribe to share them"
            )
        counts, left = [0] * len(slots), size
        while left:
            for index, room in enumerate(slots):
                taken = min(room, left)
                counts[index] += taken
                left -= taken
        used = [(host, count) for host, count in zip(hosts, counts, strict=True) if count]
        starts = [sum(counts[:index]) for index in range(len(counts))]
        return cls(
            tuple(host for host, _ in used),
            tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True) if count),
        )

    @classmethod
    def by_table(cls, table: RankTable) -> Placement:
        """Place the ranks as the rank table does: local ranks count the ranks of a server upwards."""
        ranks: dict[str, list[int]] = {}
        for rank, (server, _) in table.placed.items():
            ranks.setdefault(server.address, []).append(rank)
        return cls(table.hosts().hosts, tuple(tuple(on_host) for on_host in ranks.values()))
