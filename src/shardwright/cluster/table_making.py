"""Making, merging and converting rank tables, which `shardwright.launch.hosts.rank_table` reads and writes.

What a product allows is told by `shardwright.launch.hosts.table_check`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardwright.common.whole_file import write_whole
from shardwright.errors import UsageError
from shardwright.launch.hosts.hosts import Hosts, is_host_name, read_text
from shardwright.launch.hosts.rank_table import RankTable, Server, SuperPod, TableDevice, is_address
from shardwright.launch.hosts.table_check import PRODUCTS, product_of, read_rank_table

ADDRESS_FILE = Path("/etc/hccn.conf")
_TOOL_TIMEOUT_S = 30.0
_MOST_DEVICES = 1024


def _allowed(table: RankTable, named: str | None) -> RankTable:
    """Return the table, which names its product where it would count as one of another without."""
    name, usual = product_of(table, named), product_of(replace(table, product=None))
    if problems := PRODUCTS[name].problems(table.servers):
        raise UsageError("; ".join(problems) + " (other servers: --product any)")
    return replace(table, product=None if name == usual else name)


def read_devices(text: str) -> tuple[int, ...]:
    """Return the devices of ``[4,8)``, without its end, or of a list.

    >>> read_devices("[4,8)"), read_devices("{1,2}"), read_devices("0")
    ((4, 5, 6, 7), (1, 2), (0,))
    """
    span = re.fullmatch(r"\s*\[\s*([0-9]{1,4})\s*,\s*([0-9]{1,4})\s*\)\s*", text)
    if span:
        ids = tuple(range(int(span[1]), int(span[2])))
    else:
        inner = re.fullmatch(r"\s*(\{)?([0-9,\s]*[0-9][0-9,\s]*)(?(1)\})\s*", text)
        words = [word.strip() for word in inner[2].split(",")] if inner else []
        if not words or not all(re.fullmatch(r"[0-9]{1,4}", word) for word in words):
            raise UsageError(f'{text} names no devices; type a range without its end, "[4,8)", or a list, "{{1,2}}"')
        ids = tuple(map(int, words))
    if not ids or len(ids) > _MOST_DEVICES:
        raise UsageError(f"{text} has {len(ids)} devices; expected 1 to {_MOST_DEVICES}")
    if len(set(ids)) < len(ids):
        raise UsageError(f"{text} has a device twice; expected each once")
    return ids


def make(devices: Sequence[int], addresses: Mapping[int, str], server_id: str, product: str | None = None) -> RankTable:
    """Return the table of one server, its ranks from 0 on in the order of ``devices``.

    Raises `UsageError` where the product does not allow these devices, or the server's name can be none.
    """
    if not is_host_name(server_id):
        raise UsageError(f"--server-id {server_id!r} is no host; type the address by which other hosts reach this one")
    entries = tuple(TableDevice(device, rank, addresses.get(device)) for rank, device in enumerate(devices))
    return _allowed(RankTable((Server(server_id, entries),)), product)


def find_addresses(devices: Sequence[int], address_file: Path | None) -> tuple[dict[int, str], str | None]:
    """Return the address of each device, or no address and the reason.

    They come from ``address_file``, else from /etc/hccn.conf, else from hccn_tool, where this host has them.
    Raises `UsageError` where the source that there is lacks a device or cannot be read.
    """
    if address_file is None and ADDRESS_FILE.exists():
        address_file = ADDRESS_FILE
    if address_file is not None:
        known = read_addresses(address_file)
        if missing := [device for device in devices if device not in known]:
            raise UsageError(
                f"{address_file} has no line `address_{missing[0]}=IP`; it has the addresses of the devices "
                f"{', '.join(map(str, sorted(known))) or '(none)'}"
            )
        return {device: known[device] for device in devices}, None
    if tool := shutil.which("hccn_tool"):
        return {device: _ask_tool(tool, device) for device in devices}, None
    return {}, (
        f"no {ADDRESS_FILE} and no hccn_tool on this host: the table has no device addresses, which HCCL needs across "
        "servers; type --address-file FILE with lines address_N=IP"
    )


def read_addresses(path: Path) -> dict[int, str]:
    """Return the lines ``address_N=IP`` of a file; its other lines are about other things."""
    addresses: dict[int, str] = {}
    for number, line in enumerate(read_text(path, "the address file").split("\n"), 1):
        if not line.strip().startswith("address"):
            continue
        match = re.fullmatch(r"\s*address_([0-9]{1,4})\s*=\s*(\S+)\s*", line)
        if not match or not is_address(match[2]):
            raise UsageError(
                f"{path}:{number}: got {line.strip()!r}, expected address_N=IP, as address_0=192.168.100.101"
            )
        device = int(match[1])
        if addresses.setdefault(device, match[2]) != match[2]:
            raise UsageError(
                f"{path}:{number}: got {match[2]} for device {device}, which has {addresses[device]} above"
            )
    return addresses


def _ask_tool(tool: str, device: int) -> str:
    command = [tool, "-i", str(device), "-ip", "-g"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TOOL_TIMEOUT_S)
        output = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        output = str(error)
    match = re.search(r"ipaddr:\s*(\S+)", output)
    if not match or not is_address(match[1]):
        raise UsageError(
            f"`{' '.join(command)}` gave no address: {output.strip()[:200] or 'nothing'}; expected `ipaddr:IP`. Type "
            "--address-file FILE with lines address_N=IP"
        )
    return match[1]


def merge(paths: Sequence[Path], product: str | None = None) -> RankTable:
    """Return one table of all servers, with ranks by sorted server ids and, on a server, in the order that they had.

    Raises `UsageError` where a server is in two of them, or versions differ.
    """
    if len(paths) < 2:
        raise UsageError("type the rank tables of at least two servers: `shardwright ranktable merge A.json B.json`")
    tables = [(path, read_rank_table(path, product)) for path in paths]
    versions = {f"version {table.version}": path for path, table in tables}
    products = {f"product {product_of(table, product)}": path for path, table in tables}
    for known in (versions, products):
        if len(known) > 1:
            listed = " and ".join(f"{path} is of {what}" for what, path in known.items())
            raise UsageError(f"{listed}; tables of one {next(iter(known)).split()[0]} can be merged")
    owner: dict[str, Path] = {}
    servers: list[Server] = []
    pods: dict[str, tuple[str, ...]] = {}
    for path, table in tables:
        for server in table.servers:
            if server.server_id in owner:
                raise UsageError(
                    f"{owner[server.server_id]} and {path} both have the server {server.server_id}; make each with the "
                    "address of its own host: `shardwright ranktable make ... --server-id ADDRESS`"
                )
            owner[server.server_id] = path
            servers.append(server)
        for pod in table.super_pods:
            pods[pod.super_pod_id] = pods.get(pod.super_pod_id, ()) + pod.server_ids
    servers.sort(key=lambda server: server.server_id)
    first = tables[0][1]
    all_pods = tuple(SuperPod(name, ids) for name, ids in pods.items())
    merged = RankTable(_numbered(servers), first.version, all_pods, first.product)
    return _allowed(merged, product)


def _numbered(servers: Iterable[Server]) -> tuple[Server, ...]:
    numbered, rank = [], 0
    for server in servers:
        devices = sorted(server.devices, key=lambda device: device.rank)
        numbered.append(replace(server, devices=tuple(replace(d, rank=rank + i) for i, d in enumerate(devices))))
        rank += len(devices)
    return tuple(numbered)


def from_hostfile(path: Path, product: str | None = None) -> tuple[RankTable, list[str]]:
    """Return a table with as many devices of each host as it has slots, and notes on what it cannot say."""
    hosts = Hosts.from_hostfile(path)
    users = [host.address for host in hosts if host.user]
    notes = [f"a rank table has no users: {', '.join(users)} lost theirs"] if users else []
    return _allowed(RankTable.from_hosts(hosts), product), notes


def write(text: str, out: str | None, name: str, force: bool) -> Path:
    """Write a text whole or not at all, to ``out``, or under ``name`` in the folder ``out`` or the current one.

    Raises `UsageError` where another file is there already, unless ``force``, or it cannot be written.
    """
    path = Path(out) if out is not None else Path(name)
    if path.is_dir():
        path = path / name
    data = text.encode()
    try:
        if not force and path.exists():
            if path.read_bytes() == data:
                return path
            raise UsageError(f"{path} is there already and differs; type --force to replace it, or another --out")
        write_whole(path, lambda draft: draft.write_bytes(data))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    return path
