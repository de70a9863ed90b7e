"""Checks of variables: those that hurt, those that name what does not exist, and folders of libraries."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import groupby

from shardwright.cluster.doctor import wanted
from shardwright.cluster.doctor.checks.infiniband import ports
from shardwright.cluster.doctor.finding import Check, Finding, note, ok, problem, warning
from shardwright.cluster.doctor.reading import Reading, typed
from shardwright.hosts.device_names import wrong_names

_ON = ("1", "true", "TRUE", "yes")

Hurts = Callable[[str, Reading], bool]


def _on(value: str, _: Reading) -> bool:
    return value in _ON


def _too_many(value: str, reading: Reading) -> bool:
    return value.isdecimal() and int(value) > reading.fact("cpus", int)


# Variables that hurt, whether a value does, and how.
HURTING: dict[str, tuple[Hurts, str]] = {
    "CUDA_LAUNCH_BLOCKING": (_on, "every kernel is waited for"),
    "CUDA_VISIBLE_DEVICES": (lambda value, _: value.strip() in ("", "-1"), "hides all GPUs"),
    "OMP_NUM_THREADS": (_too_many, "more threads than cores, in every rank"),
    "NCCL_P2P_DISABLE": (_on, "GPUs of one host do not talk directly"),
    "NCCL_SHM_DISABLE": (_on, "ranks of one host talk over the network"),
    "NCCL_IB_DISABLE": (_on, "InfiniBand is not used"),
    "NCCL_NET_GDR_DISABLE": (_on, "the network does not reach the GPUs' memory directly"),
    "NCCL_DEBUG": (lambda value, _: value in ("TRACE", "INFO"), "much is written to every log"),
    "NCCL_ALGO": (lambda value, _: bool(value), "NCCL does not choose how itself"),
    "NCCL_PROTO": (lambda value, _: bool(value), "NCCL does not choose how itself"),
    "TORCH_DISTRIBUTED_DEBUG": (lambda value, _: value == "DETAIL", "every collective is checked, which is slow"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (lambda value, _: value == "0", "a rank that fails leaves others hanging"),
}


def variables(reading: Reading) -> Finding:
    """Those that make a job slow or hide a device."""
    environment = _environment(reading)
    bad = [name for name, (hurts, _) in HURTING.items() if name in environment and hurts(environment[name], reading)]
    if bad:
        what = "; ".join(f"{name}={environment[name]}: {HURTING[name][1]}" for name in bad)
        return warning(what, *(f"unset {name}" for name in bad))
    return ok(f"none that hurts, of {len(environment)} that were looked at")


def _environment(reading: Reading) -> Mapping[str, str]:
    return {str(name): str(value) for name, value in reading.fact("environment", dict).items()}


def names_of_devices(reading: Reading) -> Finding:
    """Variables that name network devices name some that exist."""
    environment = _environment(reading)
    interfaces = {path.split("/")[4] for path in reading.glob("/sys/class/net/*/operstate")}
    hcas = {port.device for port in ports(reading)}
    if bad := wrong_names(environment, interfaces, hcas):
        what = "; ".join(
            f"{name}={environment[name]} names none of {', '.join(sorted(there)) or 'the devices: none is here'}"
            for name, there in bad.items()
        )
        return problem(what, *(f"unset {name}" for name in bad))
    return ok("those that name network devices name some that exist")


def library_path(reading: Reading) -> Finding:
    """Folders of LD_LIBRARY_PATH that do not exist, and libraries in them that go before those of torch."""
    folders = reading.fact("library_folders", list)
    if not folders:
        return ok("LD_LIBRARY_PATH is not set")
    missing = [str(folder["path"]) for folder in folders if folder["error"]]
    shadowing = [f"{folder['path']}/{name}" for folder in folders for name in _torch_has(folder["libraries"])]
    kept = [str(folder["path"]) for folder in folders if not folder["error"] and not _torch_has(folder["libraries"])]
    remedy = f"export LD_LIBRARY_PATH={typed(':'.join(kept))}" if kept else "unset LD_LIBRARY_PATH"
    if missing or shadowing:
        said = [f"{', '.join(missing)} cannot be entered"] if missing else []
        said += [f"{', '.join(shadowing)} goes before what torch brings"] if shadowing else []
        return warning("; ".join(said), remedy)
    return ok(f"torch does not mind LD_LIBRARY_PATH: {len(folders)} folders exist, none shadows")


def _torch_has(libraries: object) -> list[str]:
    """One name of each library that torch's packages bring too."""
    names = [str(name) for name in libraries] if isinstance(libraries, list) else []
    kinds = [stem for stem in wanted.LIBRARIES if stem not in ("libmpi.so", "libcuda.so")]
    ours = sorted(name for name in names if name.startswith(tuple(kinds)))
    return [next(group) for _, group in groupby(ours, key=lambda name: re.split(r"\.so", name)[0])]


def nccl_choice(reading: Reading) -> Finding:
    """The devices that NCCL would choose, as variables that say so."""
    active = [port for port in ports(reading) if port.active]
    real = [port for port in active if port.link_layer == "InfiniBand"] or active
    if not real:
        return note("NCCL would use TCP, for want of InfiniBand")
    chosen = ",".join(f"{port.device}:{port.port}" for port in real)
    lines = [typed("export", f"NCCL_IB_HCA=={chosen}")]
    if front := next((port.network_device for port in real if port.network_device and port.address), None):
        lines.append(typed("export", f"NCCL_SOCKET_IFNAME=={front}"))
    return ok(f"NCCL would use {chosen}; launch sets what says so, elsewhere type", *lines)


CHECKS = (
    Check("environment", "variables", variables),
    Check("environment", "device names", names_of_devices),
    Check("environment", "library path", library_path),
    Check("InfiniBand", "NCCL", nccl_choice),
)
