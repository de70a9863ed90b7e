"""The sources that are read on a host: files, commands and variables.

Nothing here comes from a host, and no command passes through a shell.
"""

from __future__ import annotations

FILES = (
    "/etc/os-release",
    "/proc/meminfo",
    "/proc/net/route",
    "/proc/sys/kernel/numa_balancing",
    "/proc/sys/net/ipv4/ip_local_port_range",
    "/sys/bus/pci/devices/*/vendor",
    "/sys/bus/pci/devices/*/class",
    "/sys/class/infiniband/*/ports/*/state",
    "/sys/class/infiniband/*/ports/*/rate",
    "/sys/class/infiniband/*/ports/*/link_layer",
    "/sys/class/infiniband/*/ports/*/gid_attrs/ndevs/0",
    "/sys/class/net/*/mtu",
    "/sys/class/net/*/operstate",
    "/sys/class/net/*/speed",
    "/sys/class/net/*/type",
    "/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor",
    "/sys/devices/system/node/node[0-9]*/cpulist",
    "/sys/module/nvidia_peermem/refcnt",
)
"""Patterns of paths. A file that is not there is left out; one that cannot be read is told with the reason."""

NVIDIA_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,driver_version,persistence_mode,ecc.errors.uncorrected.volatile.total",
    "--format=csv,noheader",
)
NVIDIA_CAPABILITY = ("nvidia-smi", "--query-gpu=index,compute_cap", "--format=csv,noheader")
NVIDIA_TOPOLOGY = ("nvidia-smi", "topo", "-m")
NVCC = ("nvcc", "--version")
MPIRUN = ("mpirun", "--version")
IBSTAT = ("ibstat",)
IBDEV2NETDEV = ("ibdev2netdev",)
NPU = ("npu-smi", "info")
CLOCK = ("timedatectl", "show", "-p", "NTPSynchronized", "--value")
COMMANDS = (NVIDIA_QUERY, NVIDIA_CAPABILITY, NVIDIA_TOPOLOGY, NVCC, MPIRUN, IBSTAT, IBDEV2NETDEV, NPU, CLOCK)

VARIABLES = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS")
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")
"""Of the environment nothing else leaves the host."""


def nccl_package(cuda: int | str) -> str:
    """Return the package that has the NCCL of a major version of CUDA."""
    return f"nvidia-nccl-cu{cuda}"


NCCL_PACKAGES = tuple(nccl_package(major) for major in (11, 12, 13))
PACKAGES = ("torch", "shardwright", "numpy", *NCCL_PACKAGES)
LIBRARIES = ("libnccl.so", "libcudart.so", "libcudnn.so", "libcublas.so", "libstdc++.so", "libmpi.so", "libcuda.so")
"""Those that another one of the same name shadows to nobody's joy."""
PROGRAMS = ("ssh", "sshd", "ufw", "firewall-cmd", "iptables", "nft", "sudo", "chronyd", "cpupower")
