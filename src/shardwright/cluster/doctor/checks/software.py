"""Checks of what is installed (Python, torch, this package, MPI), and the lines that install it on a host."""

from __future__ import annotations

import re

from shardwright.cluster.doctor import sources
from shardwright.cluster.doctor.finding import Check, Finding, note, ok, problem, warning
from shardwright.cluster.doctor.reading import HostReading, Unreadable, typed
from shardwright.common.words import plain

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
    "nvcc": dict.fromkeys(_INSTALL, "cuda-toolkit-{cuda}"),
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
    "clock": dict.fromkeys(_INSTALL, "chrony"),
    "infiniband": dict.fromkeys(_INSTALL, "infiniband-diags rdma-core"),
}
# Packages of NVIDIA come from its own repository in these families.
_NVIDIA_PAGE = "https://developer.nvidia.com/cuda-downloads"


def family(reading: HostReading) -> str | None:
    """Return how packages are installed on a host; None where its distribution is none that we know."""
    try:
        text = reading.file("/etc/os-release") or ""
    except Unreadable:
        return None
    said = dict(re.findall(r'^(ID|ID_LIKE)="?([^"\n]*)"?$', text, re.MULTILINE))
    names = [*said.get("ID", "").lower().split(), *said.get("ID_LIKE", "").lower().split()]
    return next((_FAMILIES[name] for name in names if name in _FAMILIES), None)


def install(reading: HostReading, need: str, branch: str = "570", cuda: str = "12-8") -> tuple[str, ...]:
    """Return the lines that install what is needed on a host."""
    if (name := family(reading)) is None:
        return (f"# install {need} with the packages of this distribution, which is none that is known here",)
    line = f"{_INSTALL[name]} {_PACKAGES[need][name].format(branch=branch, cuda=cuda)}"
    ours = need == "nvcc" or (need == "driver" and name in ("rhel", "suse"))
    first = (f"# these packages are in NVIDIA's repository: {_NVIDIA_PAGE}",) if ours else ()
    update = (reading.as_root("apt-get update"),) if name in ("ubuntu", "debian") else ()
    return (*first, *update, reading.as_root(line))


def pip(reading: HostReading, *words: str) -> str:
    """Return a line that has pip of the host's interpreter do something."""
    return typed(plain(reading.facts.get("executable", "python3")), "-m", "pip", *words)


_LOWEST_PYTHON = (3, 11)
_LOWEST_TORCH = (2, 11)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with. Raises `Unreadable` where it begins with none.

    >>> numbers("2.13.0+cpu")
    (2, 13, 0)
    """
    if (match := re.match(r"\d{1,6}(\.\d{1,6})*", version)) is None:
        raise Unreadable(f"{version!r} is no version")
    return tuple(map(int, match[0].split(".")))


def python(reading: HostReading) -> Finding:
    """Check that Python is new enough."""
    version = reading.fact("python", str)
    if numbers(version) < _LOWEST_PYTHON:
        what = f"Python {version}, expected 3.11 or newer; name another one with --python"
        return problem(what, *install(reading, "python"), "python3.11 -m venv ~/train")
    return ok(f"{version}, {reading.fact('executable', str)}")


def torch(reading: HostReading) -> Finding:
    """Check that torch is installed and new enough."""
    version = reading.package("torch")
    if version is None:
        return problem("torch is not installed", pip(reading, "install", "torch"))
    if numbers(version) < _LOWEST_TORCH:
        return problem(f"torch {version}, expected 2.11 or newer", pip(reading, "install", "--upgrade", "torch"))
    cuda = reading.facts.get("torch_cuda")
    return ok(f"{version}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}")


def package(reading: HostReading) -> Finding:
    """Check that shardwright is installed."""
    version = reading.package("shardwright")
    if version is None:
        return warning("shardwright is not installed, which scripts import", pip(reading, "install", "shardwright"))
    return ok(f"{version}, sources {reading.fact('code', str)}")


def mpi(reading: HostReading) -> Finding:
    """Report the version of mpirun, with a note where there is none."""
    said = reading.ran(sources.MPIRUN)
    if said is None:
        lines = (pip(reading, "install", "shardwright[mpi]"), *install(reading, "mpi"))
        return note("no mpirun beside the interpreter or on the PATH; --backend mpi and --via mpirun need one", *lines)
    first = said.strip().splitlines()[0] if said.strip() else ""
    if not re.search(r"\d+\.\d+", first):
        raise Unreadable("`mpirun --version` names no version")
    return ok(first)


CHECKS = (
    Check("software", "Python", python),
    Check("software", "torch", torch),
    Check("software", "shardwright", package),
    Check("software", "MPI", mpi),
)
