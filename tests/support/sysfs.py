"""Trees of files as the kernel shows network devices in /sys."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write(folder: Path, **values: Any) -> None:
    """Files of these contents in ``folder``; two underscores stand for a slash."""
    for name, value in values.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


class Tree:
    """A sysfs with one InfiniBand device of two ports, the second down, ib0 in front of the first, and Ethernet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ports = root / "class/infiniband/mlx5_0/ports"
        self.port = ports / "1"
        for port, state in ((self.port, "4: ACTIVE"), (ports / "2", "1: DOWN")):
            write(port, state=state, rate="100 Gb/sec (4X EDR)", link_layer="InfiniBand", gid_attrs__ndevs__0="ib0")
            write(port / "counters", port_xmit_data=0, port_rcv_data=0, port_xmit_packets=0, port_rcv_packets=0)
            write(port / "counters", symbol_error=0, link_downed=0, port_xmit_wait=0)
        self.eth0 = self.interface("eth0", 1, "up", speed=25000)
        self.ib0 = self.interface("ib0", 32, "up")
        self.interface("lo", 772, "unknown")
        (self.interface("bond0", 1, "up") / "lower_eth0").symlink_to("../eth0")
        write(root / "class/net", bonding_masters="bond0")  # a file among the devices, as the kernel has it

    def interface(self, name: str, kind: int, state: str, **more: Any) -> Path:
        folder = self.root / "class/net" / name
        write(folder, type=kind, operstate=state, mtu=1500, **more)
        counts = {f"{way}_{what}": 0 for way in ("rx", "tx") for what in ("bytes", "packets", "errors", "dropped")}
        write(folder / "statistics", **counts)
        return folder

    def count(self, eth0: dict[str, int] | None = None, port: dict[str, int] | None = None) -> None:
        """Set counters of eth0 and of the first port."""
        write(self.eth0 / "statistics", **(eth0 or {}))
        write(self.port / "counters", **(port or {}))
