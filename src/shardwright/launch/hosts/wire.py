"""What the network devices of this host have moved, for somebody who looks now and then."""

from __future__ import annotations

import time
from pathlib import Path

from shardwright.launch.hosts.network import SYSFS, counted_once, read_devices

_EVERY_S = 10.0  # a host of many devices has hundreds of counters


class Wire:
    """The bytes that this host's devices have taken in and sent out, and those of its loopback, since it was booted."""

    def __init__(self, sysfs: Path = SYSFS) -> None:
        self._sysfs = sysfs
        self._due_s = 0.0

    def __call__(self) -> dict[str, int] | None:
        """None where it is too early to look again."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + _EVERY_S
        reading = read_devices(self._sysfs)
        between = counted_once(reading)
        within = [device for device in reading.devices.values() if device.kind == "loopback"]
        return {
            "in": sum(device.in_bytes for device in between),
            "out": sum(device.out_bytes for device in between),
            "within": sum(device.out_bytes for device in within),
        }
