"""Bytes and rates in and out of this host's network devices, as they happen: what `shardwright traffic` shows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from shardwright.compiler.report.text import size_text
from shardwright.errors import UsageError
from shardwright.launch.hosts.network import SYSFS, Device, Moved, NetworkReading, moved, read_devices

_LONGEST_S = 24 * 3600.0


@dataclass(frozen=True)
class DeviceSample:
    """One device at one look: what it moved since the look before, and in ``total`` since the first one."""

    device: Device
    last: Moved
    total: Moved
    gone: bool = False

    def to_json(self, time_s: float) -> str:
        """Return the row as one line of JSON; ``time`` is seconds since 1970, errors count from the first look."""
        seconds = self.last.seconds or 1.0
        return json.dumps(
            {
                "time": round(time_s, 3),
                "device": self.device.name,
                "seconds": round(self.total.seconds, 3),
                "in_bytes": self.total.in_bytes,
                "out_bytes": self.total.out_bytes,
                "in_bytes_per_s": round(self.last.in_bytes / seconds),
                "out_bytes_per_s": round(self.last.out_bytes / seconds),
                "errors": dict(self.total.troubles),
                "up": self.device.up and not self.gone,
            }
        )

    def cells(self) -> list[str]:
        """Return device, rates, totals, errors and a note, as text."""
        seconds = self.last.seconds or 1.0
        rates = [f"{size_text(count / seconds)}/s" for count in (self.last.in_bytes, self.last.out_bytes)]
        totals = [size_text(self.total.in_bytes), size_text(self.total.out_bytes)]
        return [self.device.name, *rates, *totals, _troubles(self.total.troubles), self._note()]

    def _note(self) -> str:
        notes = ["gone"] if self.gone else [] if self.device.up else ["down"]
        if self.device.full:
            notes.append("a counter of 32 bits is full: reset it with perfquery -R")
        return ", ".join(notes)


class DeviceSampler:
    """The looks at ``devices``, taken when `look` is called."""

    def __init__(self, names: Sequence[str], sysfs: Path = SYSFS) -> None:
        self._sysfs = sysfs
        self.first = self._last = read_devices(sysfs)
        self.names = choose(self.first, names, sysfs)
        self._totals = {name: moved(self.first.devices[name], self.first.devices[name], 0.0) for name in self.names}
        self._known = {name: self.first.devices[name] for name in self.names}

    def look(self) -> list[DeviceSample]:
        """Return a row for every device; one that is gone stays with its totals, and goes on when it comes back."""
        now = read_devices(self._sysfs)
        seconds, rows = now.time_s - self._last.time_s, []
        for name in self.names:
            before, after = self._known[name], now.devices.get(name)
            last = moved(before, after or before, seconds)
            self._totals[name] += last
            self._known[name] = after or before
            rows.append(DeviceSample(after or before, last, self._totals[name], gone=after is None))
        self._last = now
        return rows


def choose(reading: NetworkReading, names: Sequence[str], sysfs: Path = SYSFS) -> list[str]:
    """Return the devices that ``names`` mean: ``eth0``, a port ``mlx5_0/1`` or all ports of ``mlx5_0``.

    Without any, all that are up but the loopback and what has no carrier of its own.

    Raises:
        UsageError: where a name is not there, or its counters cannot be read; or nothing is there to show.
    """
    if not names:
        chosen = [d.name for d in reading.devices.values() if d.up and d.kind not in ("loopback", "other")]
        if not chosen:
            there = ", ".join(reading.devices) or "none"
            raise UsageError(f"no network device under {sysfs} is up; those there: {there}. Name the ones to show")
        return chosen
    wanted: list[str] = []
    for name in names:
        matching = [device for device in reading.devices if device == name or device.split("/")[0] == name]
        if not matching and name in reading.unreadable:
            raise UsageError(f"the counters of {name} cannot be read: {reading.unreadable[name]}")
        if not matching:
            there = ", ".join(reading.devices) or "none"
            raise UsageError(f"there is no network device {name!r} under {sysfs}; choose of: {there}")
        wanted += matching
    return list(dict.fromkeys(wanted))


def describe(reading: NetworkReading, names: Sequence[str]) -> list[str]:
    """Return a line for each of these devices."""
    lines = []
    for device in (reading.devices[name] for name in names):
        facts = [device.kind, device.speed or "speed unknown", "up" if device.up else "down"]
        facts += [f"MTU {device.mtu}"] if device.mtu else []
        facts += [f"network device {device.network_device}"] if device.network_device else []
        facts += [f"made of {', '.join(device.parts)}"] if device.parts else []
        lines.append(f"{device.name}: {', '.join(facts)}")
    if not any(device.kind == "infiniband" for device in reading.devices.values()):
        lines.append("no InfiniBand device here")
    return lines


def show(
    names: Sequence[str],
    every_s: float,
    count: int | None,
    as_json: bool,
    sysfs: Path = SYSFS,
    console: Console | None = None,
) -> None:
    """Show the devices every ``every_s`` seconds, ``count`` times or until Ctrl-C, and what they moved altogether.

    On a terminal it is a table that stays in place, elsewhere a line for each device and look; ``as_json`` gives lines
    of JSON and nothing else.

    Raises:
        UsageError: for devices that are not there, and numbers that make no sense.
    """
    if not 0 < every_s <= _LONGEST_S:
        raise UsageError(f"expected --every of more than 0 and at most {_LONGEST_S:g} seconds, got {every_s:g}")
    if count is not None and count < 1:
        raise UsageError(f"expected --count of at least 1, got {count}")
    console = console or Console()
    looks = DeviceSampler(names, sysfs)
    try:
        if as_json:
            for rows in _timed(looks, every_s, count):
                for row in rows:
                    _print(console, row.to_json(time.time()))
            return
        for line in describe(looks.first, looks.names):
            _print(console, line)
        _follow(looks, every_s, count, console)
    except KeyboardInterrupt:
        if as_json:
            return
    for row in looks.look():
        bytes_moved = f"{size_text(row.total.in_bytes)} in, {size_text(row.total.out_bytes)} out"
        seconds = f"{row.total.seconds:.1f} s"
        _print(console, f"{row.device.name}: {bytes_moved} in {seconds}; {_troubles(row.total.troubles)}")


def _follow(looks: DeviceSampler, every_s: float, count: int | None, console: Console) -> None:
    if not console.is_terminal:
        for rows in _timed(looks, every_s, count):
            for row in rows:
                device, *cells, note = row.cells()
                shown = zip(("in", "out", "total in", "total out"), cells, strict=False)
                text = ", ".join(f"{name} {cell}" for name, cell in shown)
                _print(console, f"{device}: {text}; {cells[-1]}{f' ({note})' if note else ''}")
        return
    with Live(_table([]), console=console, auto_refresh=False, transient=True) as live:
        for rows in _timed(looks, every_s, count):
            live.update(_table(rows), refresh=True)


def _timed(looks: DeviceSampler, every_s: float, count: int | None) -> Iterator[list[DeviceSample]]:
    """Yield a look every so many seconds, without drifting: a late look is followed by one on time."""
    begin, taken = time.monotonic(), 0
    while count is None or taken < count:
        taken += 1
        time.sleep(max(begin + taken * every_s - time.monotonic(), 0.0))
        yield looks.look()


def _table(rows: Sequence[DeviceSample]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("device", "in", "out", "total in", "total out"):
        table.add_column(column, justify="left" if column == "device" else "right", no_wrap=True)
    table.add_column("errors and drops")
    for row in rows:
        *cells, troubles, note = row.cells()
        table.add_row(*cells, f"{troubles} ({note})" if note else troubles)
    return table


def _troubles(counts: Mapping[str, int]) -> str:
    """Return the counts that are not zero; ticks of waiting are no error, but they explain a slow port."""
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no errors or drops"


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
