"""What the planner believes of the machines: a few numbers per device and per link.

The figures below are for planning before anything was measured; they order plans sensibly and promise no seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.mesh.mesh import Link


@dataclass(frozen=True)
class Hardware:
    """One device and the link between devices.

    Args:
        flops: floating-point operations per second in float32 products.
        memory_bandwidth: bytes per second of a device's memory.
        launch_s: seconds that any operator takes at least.
        link: used along every axis of a mesh that does not say otherwise.
    """

    name: str
    flops: float
    memory_bandwidth: float
    launch_s: float
    link: Link


# One core of a current server, ranks on one host talking through gloo (1.3 ms per small collective, measured).
CPU_HOST = Hardware("cpu", flops=4e10, memory_bandwidth=8e9, launch_s=5e-6, link=Link(1.3e-3, 1.5e9))
# NVIDIA H100 SXM data sheet: 989 dense bf16 and 67 float32 TFLOP/s, 3.35 TB/s, NVLink 450 GB/s each way; half of each.
H100 = Hardware("h100", flops=3e14, memory_bandwidth=1.7e12, launch_s=5e-6, link=Link(2e-5, 2.2e11))


def for_device(device_type: str) -> Hardware:
    """The figures for ``cpu`` or ``cuda``."""
    return H100 if device_type == "cuda" else CPU_HOST
