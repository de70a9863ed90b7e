"""The environment that the words of a command line give to ranks: ``-x``, ``--devices`` and ``--backend``."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright.common.pulse import PULSE_VARIABLE
from shardwright.common.step_lines import STEPS_VARIABLE, TELLS_VARIABLE
from shardwright.errors import UsageError
from shardwright.launch.host.folders import TEMPORARY_VARIABLE
from shardwright.launch.hosts.environment import SECRET_VARIABLE
from shardwright.launch.hosts.gpus import count_gpus
from shardwright.launch.hosts.interfaces import wrong_names
from shardwright.launch.options.carrier_facts import CarrierFacts, carrier_of_backend

NCCL = "nccl"
# What `shardwright launch --backend` says to sw.init(), where a script names no backend there.
BACKEND_VARIABLE = "SHARDWRIGHT_BACKEND"
# What the launcher itself decides for each rank: not to be set with -x.
RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE",
    PULSE_VARIABLE, STEPS_VARIABLE, TELLS_VARIABLE, TEMPORARY_VARIABLE, SECRET_VARIABLE,
})  # fmt: skip


def split_variables(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the words for all hosts, and by host those of ``-x HOST:NAME=value``: no name has a colon.

    >>> split_variables(["A=b:c", "fd00::1:A=b"])
    (['A=b:c'], {'fd00::1': ['A=b']})
    """
    for_all: list[str] = []
    by_host: dict[str, list[str]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        host, colon, name = name.rpartition(":")
        if colon:
            by_host.setdefault(host, []).append(name + equals + value)
        else:
            for_all.append(word)
    return for_all, by_host


def read_variables(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Read ``-x``: ``NAME=value`` sets, ``NAME`` passes on, ``PREFIX*`` passes on all that begin so."""
    read: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and name.endswith("*"):
            read |= {key: environment[key] for key in environment if key.startswith(name[:-1])}
            continue
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"-x {word} names no variable; type -x NAME=value, -x NAME or -x 'PREFIX*'")
        if name in RANK_VARIABLES:
            hint = "; type --port" if name == "MASTER_PORT" else ""
            raise UsageError(f"-x {name}: the launcher sets {name} for each rank itself{hint}")
        if not equals and name not in environment:
            raise UsageError(f"-x {name}: {name} is not set here; type -x {name}=value")
        read[name] = value if equals else environment[name]
    return read


def visible_devices(devices: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``--devices 4,5`` as CUDA_VISIBLE_DEVICES, within those that it has where it is set already."""
    if devices is None:
        return {}
    names = [name.strip() for name in devices.split(",")]
    if not all(re.fullmatch(r"[0-9]+|(GPU|MIG)-[\w/-]+", name) for name in names) or len(set(names)) < len(names):
        raise UsageError(f"--devices {devices} names no GPUs; type their numbers once each, as 4,5")
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        refused = [name for name in names if name not in [a.strip() for a in allowed.split(",")]]
        if refused:
            raise UsageError(
                f"--devices {devices}: CUDA_VISIBLE_DEVICES={allowed} leaves no device {', '.join(refused)}; "
                "name some of those, or unset it"
            )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def read_backend(backend: str | None, carrier: CarrierFacts) -> dict[str, str]:
    """Return ``--backend`` as the variable of sw.init(). Raises `UsageError` where the carrier cannot start it.

    >>> from shardwright.launch.options.carrier_facts import SSH
    >>> read_backend("gloo", SSH)
    {'SHARDWRIGHT_BACKEND': 'gloo'}
    """
    needed = carrier_of_backend(backend)
    if needed.backends and needed is not carrier:
        name = needed.name
        raise UsageError(f"--backend {backend} needs ranks that {name} starts; type --via {name} --backend {backend}")
    return {} if backend is None else {BACKEND_VARIABLE: backend}


def wrong_on_this_host(environment: Mapping[str, str], among_hosts: bool) -> list[str]:
    """Return a line for each variable of ranks that does not fit the host that this runs on.

    Within one host without GPUs nobody reads what is meant for NCCL. Between hosts it is looked at in any case.
    """
    gpus = count_gpus(environment)
    interfaces = sorted(name for _, name in socket.if_nameindex())
    adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    lines = [
        f"{name}={environment[name]} names none of its devices, which are {', '.join(known) or 'none'}; leave it out, "
        f"or set one of those{f' by -x HOST:{name}=VALUE' if among_hosts else ''}"
        for name, known in wrong_names(environment, interfaces, adapters).items()
        if among_hosts or gpus or not name.startswith("NCCL")
    ]
    if environment.get(BACKEND_VARIABLE) == NCCL and not gpus:
        lines.append("--backend nccl needs GPUs, of which ranks see none; type --backend gloo")
    return lines
