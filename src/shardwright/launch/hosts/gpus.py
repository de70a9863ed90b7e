"""The GPUs of this host, and the cores near each, from the files of the driver and the kernel, without loading CUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from shardwright.launch.host.system_files import text_of


def count_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs that ranks will see, by CUDA_VISIBLE_DEVICES or the driver's list."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def cores_near(visible: int, environment: Mapping[str, str], root: Path = Path("/")) -> frozenset[int]:
    """Return the cores near the GPU that a rank sees as ``visible``; none where the files do not say it for sure."""
    addresses = _visible(environment, root)
    if not 0 <= visible < len(addresses):
        return frozenset()
    return _cores(root / "sys/bus/pci/devices" / addresses[visible].lower() / "local_cpulist")


def _visible(environment: Mapping[str, str], root: Path) -> list[str]:
    """Return the PCI addresses of the GPUs as CUDA numbers those that a rank sees; none where that is not sure."""
    facts = {folder.name: _facts(folder / "information") for folder in (root / "proc/driver/nvidia/gpus").glob("*")}
    by_address = sorted(facts)
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    names = [name.strip() for name in listed.split(",")] if listed is not None else list(map(str, range(len(facts))))
    if all(name.isdecimal() for name in names):
        if len({fact.get("Model") for fact in facts.values()}) > 1 and not by_bus:
            return []
        return [by_address[int(name)] for name in names] if all(int(name) < len(facts) for name in names) else []
    found = [[address for address in by_address if facts[address].get("GPU UUID", "").startswith(n)] for n in names]
    return [addresses[0] for addresses in found] if all(len(addresses) == 1 for addresses in found) else []


def _facts(file: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in text_of(file).splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _cores(file: Path) -> frozenset[int]:
    """Return the cores of a list as the kernel writes it, such as ``0-15,32-47``; none where there is no such list."""
    with contextlib.suppress(ValueError):
        spans = [span.split("-") for span in text_of(file).split(",") if span]
        return frozenset(core for span in spans for core in range(int(span[0]), int(span[-1]) + 1))
    return frozenset()
