"""Finds out whether NCCL went over sockets although InfiniBand is there: by its log, or by counters."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright.launch.hosts.network import Device

# Below this nothing can be told from what else the devices carry.
_ENOUGH_BYTES = 1_000_000
_WORDS = {"NET/IB :": "IB", "NET/Socket :": "Socket", "Using network IB": "IB", "Using network Socket": "Socket"}
_CHECK = (
    "look at NCCL_IB_DISABLE (must not be 1), NCCL_IB_HCA (must name the device, if set), `ulimit -l` (must be "
    "unlimited), /dev/infiniband (must be in the container), and at what NCCL_DEBUG=INFO says after NET/IB"
)


def chosen_network(environment: Mapping[str, str]) -> str | None:
    """IB or Socket, as NCCL wrote into NCCL_DEBUG_FILE for this process with NCCL_DEBUG=INFO; None where it did not.

    The last word counts: NCCL names the networks that it looks at before the one that it uses.
    """
    name = environment.get("NCCL_DEBUG_FILE", "")
    if not name or environment.get("NCCL_DEBUG", "").upper() not in ("INFO", "TRACE"):
        return None
    path = Path(name.replace("%h", socket.gethostname().split(".")[0]).replace("%p", str(os.getpid())))
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    said = [network for line in lines for words, network in _WORDS.items() if words in line]
    return said[-1] if said else None


def over_sockets(
    host: str, sent: Sequence[tuple[Device, int]], predicted_bytes: float, chosen: str | None
) -> list[str]:
    """A line of warning where NCCL should have gone over InfiniBand and did not; else none.

    ``sent`` are the devices of the host with the bytes that each sent; ``predicted_bytes`` should have left it.
    Without NCCL's own word: the ports carried less than a tenth of that, and the network devices more than half.
    """
    ports = [(device, count) for device, count in sent if device.kind == "infiniband" and device.up]
    others = [(device, count) for device, count in sent if device.kind != "infiniband"]
    if not ports or chosen == "IB":
        return []
    by_ports, by_others = sum(count for _, count in ports), sum(count for _, count in others)
    shown = predicted_bytes >= _ENOUGH_BYTES and by_ports < predicted_bytes / 10 and by_others > predicted_bytes / 2
    if chosen is None and not shown:
        return []
    names = ", ".join(f"{port.name} ({port.speed or 'speed unknown'})" for port, _ in ports)
    used = max(others, key=lambda pair: pair[1])[0].name if others else "a socket"
    how = "says that it uses sockets" if chosen == "Socket" else f"sent its bytes over {used}"
    return [f"traffic | {host} | warning: NCCL {how} although InfiniBand is active on {names}; {_CHECK}"]
