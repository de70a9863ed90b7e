"""At the end of a run: the bytes that the devices of each host moved, beside those that its plan predicted.

Devices count per host, so one rank of each host reads them before the first step and after the last. What is predicted
is what the collectives of the plan send, with the headers of the backend, and what rank 0 tells all others meanwhile,
as the plans of other shapes. What is measured beside it are the bytes of all packets less their headers of Ethernet, IP
and TCP, which are shown on their own. Whatever else used the devices in that time is in what was measured: the data,
checkpoints on a network, other programs.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.compiler.report.text import size_text
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.backends.table import Backend, backend_moving
from shardwright.distributed.ranks import broadcast_bytes
from shardwright.distributed.world import World
from shardwright.launch.hosts.network import SYSFS, Device, Moved, NetworkReading, counted_once, moved, read_devices
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.programs.execute import Execution, Pass
from shardwright.training.network.nccl_network import chosen_network, over_sockets
from shardwright.training.network.prediction import Flows, collectives_of, flows_between, flows_from_rank_zero

# Ethernet 14 (which the loopback does not count), IPv4 20, TCP with time stamps 32. IPv6 would be 20 more.
_PACKET_HEADER_BYTES = {"ethernet": 66, "other": 66, "ip over infiniband": 56, "loopback": 52}


@dataclass(frozen=True)
class DeviceTraffic:
    """The bytes that one device of a host moved during the run."""

    device: Device
    total: Moved

    def headers(self) -> tuple[int, int]:
        """The bytes of the headers of Ethernet, IP and TCP, in and out; an InfiniBand port counts no such packets."""
        each = _PACKET_HEADER_BYTES.get(self.device.kind, 0)
        total = self.total
        return min(total.in_packets * each, total.in_bytes), min(total.out_packets * each, total.out_bytes)

    def payload(self) -> tuple[int, int]:
        headers = self.headers()
        return self.total.in_bytes - headers[0], self.total.out_bytes - headers[1]

    def __str__(self) -> str:
        into, out = self.payload()
        troubles = [f"{count} {name}" for name, count in self.total.troubles.items() if count]
        return f"{self.device.name}: {', '.join([f'{size_text(into)} in', f'{size_text(out)} out', *troubles])}"


@dataclass(frozen=True)
class HostTraffic:
    """The devices that carry bytes to and from a host, its loopback, and what NCCL said that it used there."""

    host: str
    between: tuple[DeviceTraffic, ...]
    within: tuple[DeviceTraffic, ...]
    nccl: str | None = None


class TrafficWatch:
    """Measures a run: all ranks make one together before the first step, and call `end` after the last."""

    def __init__(self, parallel: ParallelModel, world: World, sysfs: Path = SYSFS) -> None:
        self._parallel, self._world, self._sysfs = parallel, world, sysfs
        self._before: NetworkReading | None = None
        self._places: list[str] = []
        self._runs_before: list[tuple[Execution, Counter[Pass]]] = []
        self._broadcast_before = broadcast_bytes()
        if world.size > 1:
            self._places = from_all_ranks(f"{world.host}\n{_network_namespace()}")
            self._before = read_devices(sysfs) if self._places.index(self._places[world.rank]) == world.rank else None
            self._runs_before = [(execution, execution.runs.copy()) for execution in parallel.executions()]

    def end(self) -> None:
        """Rank 0 prints what was moved; a world of one rank has nothing to say."""
        if self._world.size == 1:
            return
        from_all_ranks(None)  # nobody reads while another still sends
        mine = None if self._before is None else self._measure(self._before)
        hosts = [host for host in from_all_ranks(mine) if host is not None]
        if self._world.rank == 0:
            backend = _backend(self._world)
            for line in traffic_lines(hosts, self._predicted(backend), backend):
                print(line, flush=True)

    def _measure(self, before: NetworkReading) -> HostTraffic:
        between, within = measure(before, read_devices(self._sysfs))
        nccl = chosen_network(os.environ) if _backend(self._world).names_network else None
        return HostTraffic(self._names()[self._world.rank], between, within, nccl)

    def _names(self) -> list[str]:
        """The host of every rank; ranks of one host in several network namespaces are told apart by a number."""
        places = list(dict.fromkeys(self._places))
        hosts = [place.split("\n")[0] for place in places]
        names = {
            place: host if hosts.count(host) == 1 else f"{host}/{hosts[:i].count(host)}"
            for i, (place, host) in enumerate(zip(places, hosts, strict=True))
        }
        return [names[place] for place in self._places]

    def _predicted(self, backend: Backend) -> Flows | None:
        if self._parallel.plan is None:
            return None
        flows: defaultdict[tuple[str, str], float] = defaultdict(float)
        earlier = {id(execution): runs for execution, runs in self._runs_before}
        for execution in self._parallel.executions():
            runs: Counter[Pass] = execution.runs - earlier.get(id(execution), Counter())
            collectives = collectives_of(execution.program, runs)
            for pair, sent in flows_between(collectives, execution.program.mesh, self._names(), backend).items():
                flows[pair] += sent
        for pair, sent in flows_from_rank_zero(broadcast_bytes() - self._broadcast_before, self._names()).items():
            flows[pair] += sent
        return flows


def measure(
    before: NetworkReading, after: NetworkReading
) -> tuple[tuple[DeviceTraffic, ...], tuple[DeviceTraffic, ...]]:
    """Return what the devices moved that carry bytes to and from the host, and what the loopback did."""
    seconds = after.time_s - before.time_s
    loopbacks = [device for device in after.devices.values() if device.kind == "loopback"]

    def measured(devices: Sequence[Device]) -> tuple[DeviceTraffic, ...]:
        known = [device for device in devices if device.name in before.devices]
        return tuple(DeviceTraffic(device, moved(before.devices[device.name], device, seconds)) for device in known)

    return measured(counted_once(after)), measured(loopbacks)


def traffic_lines(hosts: Sequence[HostTraffic], predicted: Flows | None, backend: Backend) -> list[str]:
    """The report: a line for each host with its bytes to and from others, and one for those between its own ranks."""
    lines = []
    for here in hosts:
        flows = predicted or {}
        incoming = sum(sent for (a, b), sent in flows.items() if a != b == here.host)
        outgoing = sum(sent for (a, b), sent in flows.items() if here.host == a != b)
        inside = flows.get((here.host, here.host), 0.0)
        if len(hosts) > 1:
            lines.append(_line(f"{here.host}, with other hosts", (incoming, outgoing), predicted, here.between))
            if backend.names_network:
                devices = [(measured.device, measured.total.out_bytes) for measured in here.between]
                lines += over_sockets(here.host, devices, outgoing, here.nccl)
        if inside and not backend.within_host_by_loopback:
            lines.append(f"traffic | {here.host}, within it | predicted: {size_text(inside)} | not over the network")
        elif inside or len(hosts) == 1:
            lines.append(_line(f"{here.host}, within it", (inside, inside), predicted, here.within))
    return lines


def _line(where: str, expected: tuple[float, float], predicted: Flows | None, devices: Sequence[DeviceTraffic]) -> str:
    said = "nothing, since the model runs without a plan"
    if predicted is not None:
        said = f"{size_text(expected[0])} in, {size_text(expected[1])} out"
    seen = [measured for measured in devices if measured.total.in_bytes or measured.total.out_bytes]
    parts = [f"traffic | {where}", f"predicted: {said}", *map(str, seen)]
    if not seen:
        parts.append("no device moved anything")
    elif all(expected):
        into, out = (sum(measured.payload()[way] for measured in seen) / expected[way] - 1 for way in (0, 1))
        parts.append(f"{into:+.1%} in, {out:+.1%} out")
    headers = [sum(measured.headers()[way] for measured in seen) for way in (0, 1)]
    if any(headers):
        parts.append(f"besides, headers: {size_text(headers[0])} in, {size_text(headers[1])} out")
    return " | ".join(parts)


def _backend(world: World) -> Backend:
    return backend_moving(world.device.type, world.backend)


def _network_namespace() -> str:
    """Return which network this process sees: containers of one machine have one each."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
