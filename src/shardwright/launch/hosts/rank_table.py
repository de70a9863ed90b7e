"""A rank table: a JSON file that gives every rank its server and its device there, read, and written again.

Version 1.0 and, with super pods, 1.2. Ids are read as strings and as whole numbers, and written as strings. What a
table says beyond what is known here (ports, backup addresses) is kept when it is written again.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardwright.errors import UsageError
from shardwright.launch.hosts.hosts import Host, Hosts, is_host_name

VERSIONS = ("1.0", "1.2")
# The variables of a rank beside torchrun's.
TABLE_VARIABLES = ("RANK_TABLE_FILE", "RANK_ID", "RANK_SIZE", "DEVICE_ID", "DEVICE_NUM")

Others = tuple[tuple[str, Any], ...]
_T = TypeVar("_T")
_V = TypeVar("_V", int, str)


@dataclass(frozen=True)
class TableDevice:
    """A device of a server, and the rank that it has."""

    device_id: int
    rank: int
    device_ip: str | None = None
    super_device_id: str | None = None
    others: Others = ()

    def to_value(self) -> dict[str, Any]:
        return _present(
            ("device_id", str(self.device_id)), ("super_device_id", self.super_device_id),
            ("device_ip", self.device_ip), *self.others, ("rank_id", str(self.rank)),
        )  # fmt: skip


@dataclass(frozen=True)
class Server:
    """A host with its devices, in the order of the table."""

    server_id: str
    devices: tuple[TableDevice, ...]
    host_nic_ip: str | None = "reserve"
    host_ip: str | None = None
    others: Others = ()

    @property
    def address(self) -> str:
        """The address of the server; in version 1.2 its id may be any name."""
        return self.host_ip or self.server_id

    @property
    def device_ids(self) -> tuple[int, ...]:
        return tuple(device.device_id for device in self.devices)

    def to_value(self) -> dict[str, Any]:
        return _present(
            ("server_id", self.server_id), ("host_ip", self.host_ip), *self.others,
            ("device", [device.to_value() for device in self.devices]), ("host_nic_ip", self.host_nic_ip),
        )  # fmt: skip


@dataclass(frozen=True)
class SuperPod:
    """Servers of version 1.2 that share a super pod."""

    super_pod_id: str
    server_ids: tuple[str, ...]

    def to_value(self) -> dict[str, Any]:
        return {"super_pod_id": self.super_pod_id, "server_list": [{"server_id": name} for name in self.server_ids]}


@dataclass(frozen=True)
class RankTable:
    """Every rank from 0 to ``size`` - 1 is on one device of one server.

    ``product`` names what its servers are (`table_check.PRODUCTS`), None where the table does not say.
    """

    servers: tuple[Server, ...]
    version: str = "1.0"
    super_pods: tuple[SuperPod, ...] = ()
    product: str | None = None

    @property
    def size(self) -> int:
        return sum(len(server.devices) for server in self.servers)

    @property
    def placed(self) -> dict[int, tuple[Server, TableDevice]]:
        """The server and device of each rank, rank 0 first."""
        by_rank = {device.rank: (server, device) for server in self.servers for device in server.devices}
        return dict(sorted(by_rank.items()))

    def __str__(self) -> str:
        servers = "one server" if len(self.servers) == 1 else f"{len(self.servers)} servers"
        lines = [f"rank table {self.version}: {self.size} rank{'s' * (self.size != 1)} on {servers}"]
        for server in self.servers:
            ranks = [f"{device.rank} on device {device.device_id}" for device in server.devices]
            lines.append(f"  {server.server_id}: rank {', '.join(ranks)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the file as HCCL's own generator writes it: indented by four, no line end after the last brace."""
        value: dict[str, Any] = {
            "version": self.version,
            "server_count": str(len(self.servers)),
            "server_list": [server.to_value() for server in self.servers],
        }
        if self.super_pods:
            value["super_pod_list"] = [pod.to_value() for pod in self.super_pods]
        value["status"] = "completed"
        return json.dumps(value | _present(("product", self.product)), indent=4)

    def hosts(self) -> Hosts:
        """Return the servers as hosts, that of rank 0 first, with their devices in the order of the ranks."""
        devices: dict[str, list[int]] = {}
        for server, device in self.placed.values():
            devices.setdefault(server.address, []).append(device.device_id)
        return Hosts(tuple(Host(name, len(ids), devices=tuple(ids)) for name, ids in devices.items()))

    @classmethod
    def from_hosts(cls, hosts: Hosts) -> RankTable:
        """Return the table in the order of the hosts. Raises `UsageError` for one without devices or slots."""
        servers, rank = [], 0
        for host in hosts:
            if host.slots is None:
                raise UsageError(f"how many devices {host.name} has is not known; write `{host.address} slots=N`")
            ids = host.devices or tuple(range(host.slots))
            servers.append(Server(host.name, tuple(TableDevice(d, rank + i) for i, d in enumerate(ids))))
            rank += len(ids)
        return cls(tuple(servers))

    def variables(self, rank: int, path: Path) -> dict[str, str]:
        """Return `TABLE_VARIABLES` of a rank; ``DEVICE_NUM`` counts the table's devices on the rank's server."""
        server, device = self.placed[rank]
        values = (os.path.abspath(path), rank, self.size, device.device_id, len(server.devices))
        return {name: str(value) for name, value in zip(TABLE_VARIABLES, values, strict=True)}


def parse_rank_table(text: str) -> tuple[RankTable, tuple[str, ...], tuple[str, ...]]:
    """Return the table, all faults in how it is written, and what HCCL would miss in it and launching does not.

    Where there is a fault, the table has what could be read, no more.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return RankTable(()), (f"it is no JSON: {error}",), ()
    reader = _Reader()
    return reader.table(value), tuple(reader.problems), tuple(reader.missing)


def _present(*items: tuple[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None}


def _others(entry: dict[str, Any], *known: str) -> Others:
    return tuple((name, value) for name, value in entry.items() if name not in known)


class _Reader:
    """Reads a whole table and collects everything that is wrong with it."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.missing: list[str] = []

    def table(self, value: Any) -> RankTable:
        entry = self._entry(value, "the table")
        version = str(entry.get("version", "1.0"))
        if version not in VERSIONS:
            self.problems.append(f"version is {version!r}, expected {' or '.join(VERSIONS)}")
        listed = self._entries(entry, "server_list", "the table")
        servers = [self._read_whole(self._server, value, f"server_list[{i}]") for i, value in enumerate(listed)]
        pods = [
            self._read_whole(self._super_pod, value, f"super_pod_list[{i}]")
            for i, value in enumerate(self._entries(entry, "super_pod_list", "the table", needed=False))
        ]
        self._check_header(entry, len(listed))
        product = self._text(entry, "product", "the table")
        table = RankTable(tuple(filter(None, servers)), version, tuple(filter(None, pods)), product)
        if table.servers:
            self._check_ids(table.servers, all_read=None not in servers)
        if None not in servers and None not in pods:
            self._check_super_pods(table.servers, table.super_pods)
        return table

    def _read_whole(self, read: Callable[[Any, str], _T], value: Any, place: str) -> _T | None:
        """Return the value as ``read`` gives it, None where a part of it could not be read."""
        before = len(self.problems)
        part = read(value, place)
        return part if len(self.problems) == before else None

    def _server(self, value: Any, place: str) -> Server:
        entry = self._entry(value, place)
        devices = self._entries(entry, "device", place)
        return Server(
            server_id=self._name(entry, "server_id", place) or "",
            devices=tuple(self._device(device, f"{place}.device[{i}]") for i, device in enumerate(devices)),
            host_nic_ip=self._text(entry, "host_nic_ip", place),
            host_ip=self._address(entry, "host_ip", place),
            others=_others(entry, "server_id", "device", "host_nic_ip", "host_ip"),
        )

    def _device(self, value: Any, place: str) -> TableDevice:
        entry = self._entry(value, place)
        return TableDevice(
            device_id=self._number(entry, "device_id", place),
            rank=self._number(entry, "rank_id", place),
            device_ip=self._address(entry, "device_ip", place),
            super_device_id=self._text(entry, "super_device_id", place),
            others=_others(entry, "device_id", "rank_id", "device_ip", "super_device_id"),
        )

    def _super_pod(self, value: Any, place: str) -> SuperPod:
        entry = self._entry(value, place)
        names = [
            self._name(self._entry(server, f"{place}.server_list[{i}]"), "server_id", f"{place}.server_list[{i}]")
            for i, server in enumerate(self._entries(entry, "server_list", place))
        ]
        return SuperPod(self._needed(entry, "super_pod_id", place) or "", tuple(name or "" for name in names))

    # --- the whole

    def _check_header(self, entry: dict[str, Any], servers: int) -> None:
        count, status = entry.get("server_count"), entry.get("status")
        if count is not None and str(count) != str(servers):
            self.problems.append(f"server_count is {count}, but server_list has {servers}")
        if status not in (None, "completed"):
            self.problems.append(f"status is {status!r}, expected 'completed': the table is not ready")
        self.missing += [name for name in ("version", "server_count", "status") if entry.get(name) is None]

    def _check_ids(self, servers: tuple[Server, ...], all_read: bool) -> None:
        for name, times in _repeated(server.server_id for server in servers):
            self.problems.append(f"server_id {name} comes {times} times, expected once")
        ranks = sorted(device.rank for server in servers for device in server.devices)
        if all_read and ranks != list(range(len(ranks))):
            self.problems.append(f"it has the ranks {_shown(ranks)}; expected each of 0 to {len(ranks) - 1} once")
        for server in servers:
            for device, times in _repeated(server.device_ids):
                owners = [d.rank for d in server.devices if d.device_id == device][:9]
                self.problems.append(
                    f"device {device} of {server.server_id} is given to {times} ranks: {', '.join(map(str, owners))}"
                )

    def _check_super_pods(self, servers: tuple[Server, ...], pods: tuple[SuperPod, ...]) -> None:
        listed = [name for pod in pods for name in pod.server_ids]
        if pods and sorted(listed) != sorted(server.server_id for server in servers):
            self.problems.append(
                f"super_pod_list has the servers {_shown(listed)}; expected each of server_list once: "
                f"{_shown([server.server_id for server in servers])}"
            )

    # --- single values

    def _entry(self, value: Any, place: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self.problems.append(f"{place} is {_shown(value)}, expected an object in braces")
        return {}

    def _entries(self, entry: dict[str, Any], key: str, place: str, needed: bool = True) -> list[Any]:
        value = entry.get(key)
        if value is None and not needed:
            return []
        if isinstance(value, list) and value:
            return value
        got = f"is {_shown(value)}" if key in entry else "is missing"
        self.problems.append(f"{key} of {place} {got}, expected a list of at least one")
        return []

    def _text(self, entry: dict[str, Any], key: str, place: str) -> str | None:
        value = entry.get(key)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        self.problems.append(f"{place}.{key} is {_shown(value)}, expected a string")
        return None

    def _needed(self, entry: dict[str, Any], key: str, place: str) -> str | None:
        text = self._text(entry, key, place)
        if entry.get(key) is None:
            self.problems.append(f"{place}.{key} is missing")
        return text

    def _number(self, entry: dict[str, Any], key: str, place: str) -> int:
        text = self._needed(entry, key, place)
        if text is not None and re.fullmatch(r"[0-9]{1,9}", text):
            return int(text)
        if text is not None:
            self.problems.append(f"{place}.{key} is {_shown(text)}, expected a whole number from 0 on")
        return 0

    def _name(self, entry: dict[str, Any], key: str, place: str) -> str | None:
        text = self._needed(entry, key, place)
        if text is not None and not is_host_name(text):
            self.problems.append(f"{place}.{key} is {_shown(text)}, expected the name or address of a host")
        return text

    def _address(self, entry: dict[str, Any], key: str, place: str) -> str | None:
        text = self._text(entry, key, place)
        if text is not None and not is_address(text):
            self.problems.append(f"{place}.{key} is {_shown(text)}, expected an IP address")
        return text


def is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _repeated(values: Iterable[_V]) -> list[tuple[_V, int]]:
    return [(value, times) for value, times in Counter(values).items() if times > 1]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
