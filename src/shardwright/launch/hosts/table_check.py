"""The one check of rank tables, for the command that checks them and for every way to start a job by one.

What a product allows is a row of `PRODUCTS`; nothing else knows about products. A table says itself which one its
servers are, with ``"product": "any"``; else one of version 1.0 is of servers with 8 devices, for which that version was
made, and one of version 1.2, of super pods, of any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import UsageError
from shardwright.launch.hosts.hosts import read_text
from shardwright.launch.hosts.rank_table import RankTable, Server, parse_rank_table


@dataclass(frozen=True)
class Product:
    """The devices that servers of one kind may use.

    ``counts`` are the numbers of devices that one server alone may use; several servers use all ``devices`` of each.
    Fewer than all must lie in one of ``networks``. None and () where there is no such rule.
    """

    name: str
    devices: int | None = None
    counts: tuple[int, ...] = ()
    networks: tuple[range, ...] = ()

    def problems(self, servers: Sequence[Server]) -> list[str]:
        """Return every rule that the devices of ``servers`` break, in words.

        >>> from shardwright.launch.hosts.hosts import Hosts
        >>> table = RankTable.from_hosts(Hosts.from_list("a:3"))
        >>> PRODUCTS["8-device"].problems(table.servers)
        ['a uses 3 devices (0, 1, 2); an 8-device server alone uses 1, 2, 4 or 8']
        """
        return [problem for server in servers for problem in self._problems(server, len(servers) > 1)]

    def _problems(self, server: Server, among_others: bool) -> list[str]:
        if self.devices is None:
            return []
        ids, broken = sorted(server.device_ids), []
        shown = f"{', '.join(map(str, ids))}"
        if beyond := [device for device in ids if device >= self.devices]:
            broken.append(
                f"{server.server_id} has no device {_listed(beyond)}; an {self.name} server has the devices 0 to "
                f"{self.devices - 1}"
            )
        if among_others and len(ids) != self.devices:
            broken.append(
                f"{server.server_id} uses {_count(ids)} ({shown}); of several {self.name} servers each uses all "
                f"{self.devices}"
            )
        if not among_others and len(ids) not in self.counts:
            broken.append(
                f"{server.server_id} uses {_count(ids)} ({shown}); an {self.name} server alone uses "
                f"{_listed(self.counts)}"
            )
        if len(ids) < self.devices and not any(set(ids) <= set(network) for network in self.networks):
            networks = " and ".join(f"{network[0]}-{network[-1]}" for network in self.networks)
            broken.append(
                f"{server.server_id} uses the devices {shown}; {networks} are two networks of an {self.name} server, "
                f"and fewer than {self.devices} devices may not cross them"
            )
        return broken


PRODUCTS = {
    product.name: product
    for product in (
        Product("8-device", devices=8, counts=(1, 2, 4, 8), networks=(range(4), range(4, 8))),
        Product("any"),
    )
}
DEFAULT = "8-device"


def _listed(numbers: Sequence[int] | Sequence[str], word: str = "or") -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} {word} {last}" if first else last


def _count(ids: Sequence[int]) -> str:
    return f"{len(ids)} device{'s' * (len(ids) != 1)}"


@dataclass(frozen=True)
class Checked:
    """A table that was read, all that is wrong with it, and what suffices here but not for HCCL."""

    path: Path
    text: str
    table: RankTable
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def required(self) -> RankTable:
        """Return the table. Raises `UsageError`, which names the file and the first thing that is wrong with it."""
        if not self.problems:
            return self.table
        more = len(self.problems) - 1
        others = f" (and {more} more: type `shardwright ranktable check {self.path}`)" if more else ""
        raise UsageError(f"{self.path} is no rank table: {self.problems[0]}{others}")


def check_rank_table(path: Path, product: str | None = None) -> Checked:
    """Return a file's table with everything that is wrong with it; a broken table is read in part.

    ``product`` is what its servers are, whatever the table says.

    Raises:
        UsageError: where the file cannot be read.
    """
    text = read_text(path, "the rank table")
    table, faults, missing = parse_rank_table(text)
    problems = [*faults, *_against_product(table, product), *_shared_addresses(table)]
    if not faults and (wrong := _misnamed(path, table)):
        problems.append(wrong)
    return Checked(path, text, table, tuple(problems), tuple(_notes(table, missing)) if table.servers else ())


def read_rank_table(path: Path, product: str | None = None) -> RankTable:
    """Return the table of a file. Raises `UsageError` for the first thing that is wrong with it."""
    return check_rank_table(path, product).required()


def product_of(table: RankTable, named: str | None = None) -> str:
    """Return the name of a product: what was named, else what the table says, else what its version was made for."""
    return named or table.product or ("any" if table.version == "1.2" else DEFAULT)


def _against_product(table: RankTable, named: str | None) -> list[str]:
    name = product_of(table, named)
    if name not in PRODUCTS:
        return [f"product is {name!r}, expected {_listed(list(PRODUCTS))}"]
    broken = PRODUCTS[name].problems(table.servers)
    return [f'{problem} (other servers: "product": "any" in the table)' for problem in broken]


def _shared_addresses(table: RankTable) -> list[str]:
    by_address: dict[str, list[int]] = {}
    for rank, (_, device) in table.placed.items():
        if device.device_ip is not None:
            by_address.setdefault(device.device_ip, []).append(rank)
    return [f"ranks {_listed(r, 'and')} have one device_ip, {a}" for a, r in by_address.items() if len(r) > 1]


def _notes(table: RankTable, missing: Sequence[str]) -> list[str]:
    """Return what HCCL needs beyond what launching does."""
    suffices, devices = "enough for shardwright, but HCCL needs", [device for _, device in table.placed.values()]
    notes = [f"{name} is missing: {suffices} it" for name in missing]
    if any(device.device_ip is None for device in devices):
        notes.append(f"devices without device_ip: {suffices} them across servers")
    if table.version == "1.2":
        lacking = [device.rank for device in devices if device.super_device_id is None]
        notes += [f"rank {rank} has no super_device_id: {suffices} it in version 1.2" for rank in lacking]
    return notes


def _misnamed(path: Path, table: RankTable) -> str | None:
    """Return what is wrong with a file's name: one of the form that we give says which table it is."""
    name = file_name(table)
    if re.fullmatch(r"hccl_(\d+p_\d+_.+|\d+s_\d+p)\.json", path.name) and path.name != name:
        return f"the file is named {path.name}, but its servers and devices are those of {name}"
    return None


def file_name(table: RankTable) -> str:
    """Return ``hccl_4p_4567_127.0.0.1.json`` for one server, ``hccl_2s_16p.json`` for several."""
    if len(table.servers) > 1:
        return f"hccl_{len(table.servers)}s_{table.size}p.json"
    server = table.servers[0]
    return f"hccl_{table.size}p_{''.join(map(str, server.device_ids))}_{server.server_id}.json"
