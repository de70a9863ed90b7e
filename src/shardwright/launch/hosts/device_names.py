"""The variables that name network devices for gloo and NCCL, and which of them name none that there is."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from pathlib import Path

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ADAPTERS = ("NCCL_IB_HCA",)


def wrong_names(
    environment: Mapping[str, str], interfaces: Collection[str], adapters: Collection[str]
) -> dict[str, Collection[str]]:
    """The variables that name no device of a host with these network interfaces and InfiniBand adapters, each with
    those there are.

    >>> wrong_names({"NCCL_SOCKET_IFNAME": "ib,eth", "GLOO_SOCKET_IFNAME": "eth"}, ["eth0"], [])
    {'GLOO_SOCKET_IFNAME': ['eth0']}
    """
    there = dict.fromkeys(INTERFACES, interfaces) | dict.fromkeys(ADAPTERS, adapters)
    return {
        name: known
        for name, known in there.items()
        if environment.get(name) and not _names_one(name, environment[name], known)
    }


def _names_one(variable: str, value: str, known: Collection[str]) -> bool:
    """By NCCL's rules: names are prefixes, unless ``=`` stands first; ``^`` leaves out. Gloo takes whole names."""
    gloo = variable.startswith("GLOO")
    if value.startswith("^") and not gloo:
        return True
    exact = gloo or value.startswith("=")
    words = [word.partition(":")[0] for word in (value if gloo else value.lstrip("=")).split(",")]
    return any(device == word or (not exact and device.startswith(word)) for word in words for device in known)


def own_interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def own_adapters(sysfs: Path = Path("/sys")) -> list[str]:
    return sorted(path.name for path in sysfs.glob("class/infiniband/*"))
