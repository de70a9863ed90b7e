"""Checks of environment variables: harmful values, values that name missing devices, and library paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import groupby

from shardwright.cluster.doctor import sources
from shardwright.cluster.doctor.checks.infiniband import ports
from shardwright.cluster.doctor.checks.network import interfaces
from shardwright.cluster.doctor.finding import Check, Finding, note, ok, problem, warning
from shardwright.cluster.doctor.reading import HostReading, typed
from shardwright.launch.hosts.interfaces import wrong_names

_ON = ("1", "true", "TRUE", "yes")

Hurts = Callable[[str, HostReading], bool]


def _on(value: str, _: HostReading) -> bool:
    return value in _ON


# Variables that hurt, whether a value does, and how.
HURTING: dict[str, tuple[Hurts, str]] = {
    "CUDA_LAUNCH_BLOCKING": (_on, "every kernel is waited for"),
    "CUDA_VISIBLE_DEVICES": (lambda value, _: value.strip() in ("", "-1"), "hides all GPUs"),
    "OMP_NUM_THREADS": (
        lambda value, reading: value.isdecimal() and int(value) > reading.fact("cpus", int),
        "more threads than cores, in every rank",
    ),
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


def variables(reading: HostReading) -> Finding:
    """Check for variables that make a job slow or hide a device."""
    environment = _environment(reading)
    bad = [name for name, (hurts, _) in HURTING.items() if name in environment and hurts(environment[name], reading)]
    if bad:
        what = "; ".join(f"{name}={environment[name]}: {HURTING[name][1]}" for name in bad)
        return warning(what, *(f"unset {name}" for name in bad))
    return ok(f"none that hurts, of {len(environment)} that were looked at")


def _environment(reading: HostReading) -> Mapping[str, str]:
    return {str(name): str(value) for name, value in reading.fact("environment", dict).items()}


def names_of_devices(reading: HostReading) -> Finding:
    """Check that variables which name network devices name some that exist."""
    environment = _environment(reading)
    there = {path.split("/")[4] for path in reading.glob("/sys/class/net/*/operstate")}
    hcas = {port.device for port in ports(reading)}
    if bad := wrong_names(environment, there, hcas):
        what = "; ".join(
            f"{name}={environment[name]} names none of {', '.join(sorted(known)) or 'the devices: none is here'}"
            for name, known in bad.items()
        )
        return problem(what, *(f"unset {name}" for name in bad))
    return ok("those that name network devices name some that exist")


def library_path(reading: HostReading) -> Finding:
    """Check LD_LIBRARY_PATH for folders that do not exist, and libraries that go before those of torch."""
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
    names = [str(name) for name in libraries] if isinstance(libraries, list) else []
    kinds = [stem for stem in sources.LIBRARIES if stem not in ("libmpi.so", "libcuda.so")]
    ours = sorted(name for name in names if name.startswith(tuple(kinds)))
    return [next(group) for _, group in groupby(ours, key=lambda name: re.split(r"\.so", name)[0])]


def nccl_choice(reading: HostReading) -> Finding:
    """Return the devices that NCCL and gloo would best use, as variables that say so."""
    active = [port for port in ports(reading) if port.active]
    real = [port for port in active if port.link_layer == "InfiniBand"] or active
    if not real:
        return _by_tcp(reading)
    chosen = ",".join(f"{port.device}:{port.port}" for port in real)
    front = next((port.network_device for port in real if port.network_device and port.address), None)
    lines = [typed("export", f"NCCL_IB_HCA=={chosen}"), *_sockets(front or _way_out(reading))]
    return ok(f"NCCL would use {chosen}; launch sets what says so, elsewhere type", *lines)


def _by_tcp(reading: HostReading) -> Finding:
    several = _with_addresses(reading)
    if len(several) < 2:
        return note("NCCL would use TCP, for want of InfiniBand")
    what = f"NCCL would use TCP, for want of InfiniBand, by one of {', '.join(several)}"
    if (way_out := _way_out(reading)) is None:
        return note(f"{what}; which of them leads to other hosts is not known here")
    why = "leads to the other hosts" if reading.facts.get("leads_out") == way_out else "has the default route"
    return note(f"{what}; {way_out} {why}: launch sets what says so, elsewhere type", *_sockets(way_out))


def _sockets(interface: str | None) -> list[str]:
    """Return lines that name the interface: for NCCL after a second `=`, as it would take a name for a prefix."""
    if interface is None:
        return []
    return [typed("export", f"NCCL_SOCKET_IFNAME=={interface}"), typed("export", f"GLOO_SOCKET_IFNAME={interface}")]


def _with_addresses(reading: HostReading) -> list[str]:
    return [one.name for one in interfaces(reading) if one.addresses]


def _way_out(reading: HostReading) -> str | None:
    """Return the interface that was found to lead to the other hosts, or the one with the default route."""
    several = _with_addresses(reading)
    known = (reading.facts.get("leads_out"), _default_route(reading))
    return next((name for name in known if name in several), None)


def _default_route(reading: HostReading) -> str | None:
    """Return the interface of the default route, of several that of the least metric."""
    rows = [line.split() for line in (reading.file("/proc/net/route") or "").splitlines()[1:]]
    default = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(default)[1] if default else None


CHECKS = (
    Check("environment", "variables", variables),
    Check("environment", "device names", names_of_devices),
    Check("environment", "library path", library_path),
    Check("InfiniBand", "NCCL", nccl_choice),
)
