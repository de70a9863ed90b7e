"""The check of Ascend NPUs, by their devices and by `npu-smi info`."""

from __future__ import annotations

import re

from shardwright.cluster.doctor import wanted
from shardwright.cluster.doctor.finding import Check, Finding, note, ok, problem
from shardwright.cluster.doctor.reading import Reading, Unreadable, plain

# | 0     910A           | OK            | 70.9        42                15   / 15            |
_DEVICE = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*([A-Za-z]+)\s*\|", re.MULTILINE)
_VERSION = re.compile(r"npu-smi\s+(\S+)")


def npus(reading: Reading) -> Finding:
    """What each NPU says of its health."""
    devices, said = reading.fact("davinci", int), reading.ran(wanted.NPU)
    if said is None:
        if devices == 0:
            return note("no NPU here")
        path = "/usr/local/Ascend/driver/tools"
        return problem(f"{devices} NPUs, but no npu-smi on the PATH: is the driver installed?", f"ls {path}")
    found = _DEVICE.findall(said)
    version = _VERSION.search(said)
    if version is None or not found:
        raise Unreadable("`npu-smi info` has no rows of NPUs")
    if bad := [(index, health) for index, _, health in found if health != "OK"]:
        what = ", ".join(f"NPU {index} says {health}" for index, health in bad)
        return problem(what, *(f"npu-smi info -t health -i {index}" for index, _ in bad))
    kinds = ", ".join(dict.fromkeys(plain(name) for _, name, _ in found))
    return ok(f"{len(found)} x {kinds}, npu-smi {version[1]}")


CHECKS = (Check("NPUs", "health", npus),)
