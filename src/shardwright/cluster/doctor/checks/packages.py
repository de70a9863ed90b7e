"""What to type to install something, for the distribution of a host."""

from __future__ import annotations

import re

from shardwright.cluster.doctor.reading import Reading, Unreadable, plain, typed

# ID and ID_LIKE of /etc/os-release -> how packages are installed there.
_FAMILIES = {
    "ubuntu": "ubuntu", "debian": "debian", "rhel": "rhel", "fedora": "rhel", "centos": "rhel", "rocky": "rhel",
    "almalinux": "rhel", "openeuler": "rhel", "kylin": "rhel", "sles": "suse", "suse": "suse", "opensuse": "suse",
    "opensuse-leap": "suse",
}  # fmt: skip
_INSTALL = {
    "ubuntu": "apt-get install -y",
    "debian": "apt-get install -y",
    "rhel": "dnf install -y",
    "suse": "zypper install -y",
}
# What is needed -> its packages in each family. {branch} is of the driver, {cuda} of the toolkit as 12-8.
_PACKAGES: dict[str, dict[str, str]] = {
    "driver": {
        "ubuntu": "nvidia-headless-{branch}-server nvidia-utils-{branch}-server",
        "debian": "nvidia-driver nvidia-smi",
        "rhel": "nvidia-driver nvidia-driver-cuda",
        "suse": "nvidia-open-driver-G06-signed-kmp-default nvidia-compute-utils-G06",
    },
    "nvcc": dict.fromkeys(("ubuntu", "debian", "rhel", "suse"), "cuda-toolkit-{cuda}"),
    "mpi": {
        "ubuntu": "openmpi-bin libopenmpi-dev",
        "debian": "openmpi-bin libopenmpi-dev",
        "rhel": "openmpi openmpi-devel",
        "suse": "openmpi4 openmpi4-devel",
    },
    "ssh": {
        "ubuntu": "openssh-client openssh-server",
        "debian": "openssh-client openssh-server",
        "rhel": "openssh-clients openssh-server",
        "suse": "openssh",
    },
    "python": {
        "ubuntu": "python3.11 python3.11-venv",
        "debian": "python3.11 python3.11-venv",
        "rhel": "python3.11",
        "suse": "python311",
    },
    "clock": dict.fromkeys(("ubuntu", "debian", "rhel", "suse"), "chrony"),
    "infiniband": {
        "ubuntu": "infiniband-diags rdma-core",
        "debian": "infiniband-diags rdma-core",
        "rhel": "infiniband-diags rdma-core",
        "suse": "infiniband-diags rdma-core",
    },
}
# Packages of NVIDIA come from its own repository in these families.
_NVIDIA_PAGE = "https://developer.nvidia.com/cuda-downloads"


def family(reading: Reading) -> str | None:
    """How packages are installed on a host; None where its distribution is none that we know."""
    try:
        text = reading.file("/etc/os-release") or ""
    except Unreadable:
        return None
    said = dict(re.findall(r'^(ID|ID_LIKE)="?([^"\n]*)"?$', text, re.MULTILINE))
    names = [*said.get("ID", "").lower().split(), *said.get("ID_LIKE", "").lower().split()]
    return next((_FAMILIES[name] for name in names if name in _FAMILIES), None)


def install(reading: Reading, need: str, branch: str = "570", cuda: str = "12-8") -> tuple[str, ...]:
    """The lines that install what is needed on a host."""
    if (name := family(reading)) is None:
        return (f"# install {need} with the packages of this distribution, which is none that is known here",)
    line = f"{_INSTALL[name]} {_PACKAGES[need][name].format(branch=branch, cuda=cuda)}"
    ours = need == "nvcc" or (need == "driver" and name in ("rhel", "suse"))
    first = (f"# these packages are in NVIDIA's repository: {_NVIDIA_PAGE}",) if ours else ()
    update = (reading.as_root("apt-get update"),) if name in ("ubuntu", "debian") else ()
    return (*first, *update, reading.as_root(line))


def pip(reading: Reading, *words: str) -> str:
    """A line that has pip of the host's interpreter do something."""
    return typed(plain(reading.facts.get("executable", "python3")), "-m", "pip", *words)
