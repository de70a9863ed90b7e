"""The checks of a host before a job starts there, all at once, by the agent on that host.

Each problem is a line that says what was found and what to type. Nothing of it imports torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from shardwright.errors import LaunchError, UsageError
from shardwright.launch.host.agent_protocol import Check, Checked, Hello
from shardwright.launch.host.program import Program
from shardwright.launch.hosts import interfaces
from shardwright.launch.hosts.gpus import count_gpus
from shardwright.launch.hosts.hosts import own_slots
from shardwright.launch.hosts.port import PortLease, lease_port
from shardwright.launch.options.variables import wrong_on_this_host
from shardwright.launch.supervisor.zygote import can_preload

_SCRATCH_BYTES = 1 << 20


def introduce(scratch: Path) -> Hello:
    """Return the first message of an agent. ``scratch`` is the folder that the job has on this host."""
    return Hello(
        sys.version.split()[0], sys.executable, own_slots(), count_gpus({}), socket.gethostname(), os.fspath(scratch)
    )


def check(
    order: Check, environment: Mapping[str, str], scratch: Path
) -> tuple[Checked, PortLease | None, socket.socket | None]:
    """Return the problems and facts of this host; on the first host also its port, and a socket for trials of others.

    Changes into the working directory, which the order must have.
    """
    assert order.wdir is not None
    problems = [*_check_folder(order.wdir), *_check_scratch(scratch), *_check_log_dir(order.log_dir)]
    problems += wrong_on_this_host(environment, among_hosts=True)
    if not problems:
        problems += _check_program(order.program, environment)
    folders = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    torch, ours = version("torch", folders), version("shardwright", folders)
    if torch is None and order.preload and can_preload(order.program):
        problems.append(f"{sys.executable} has no torch; type `{sys.executable} -m pip install torch` there")
    if order.ours and ours is None:
        problems.append(
            f"{sys.executable} has no shardwright; type `{sys.executable} -m pip install shardwright` there"
        )
    lease, listening = None, None
    if order.first:
        try:
            lease = lease_port(order.port)
            listening = interfaces.listen()
        except (UsageError, LaunchError, OSError) as error:
            problems.append(str(error))
    answer = Checked(
        tuple(problems), torch, ours,
        port=lease.port if lease else None, probe=listening.getsockname()[1] if listening else None,
        addresses=tuple((a.interface, a.address, a.mbits_per_s) for a in interfaces.own_addresses()),
        loopback=interfaces.own_loopback(), infiniband=tuple(interfaces.infiniband_ports()),
    )  # fmt: skip
    return answer, lease, listening


def version(name: str, folders: list[str]) -> str | None:
    """Return the version of an installed package, which is not imported. None where there is none."""
    distribution = next(iter(importlib.metadata.distributions(name=name, path=folders)), None)
    return distribution.version if distribution is not None else None


def _check_folder(wdir: str) -> list[str]:
    try:
        os.chdir(wdir)
    except OSError as error:
        return [
            f"the working directory {wdir} cannot be entered: {error.strerror}; make it there, or type --wdir DIR with "
            "a folder that every host has"
        ]
    return []


def _check_scratch(scratch: Path) -> list[str]:
    usage = os.statvfs(scratch)
    if usage.f_bavail * usage.f_frsize < _SCRATCH_BYTES:
        return [f"the disk of {scratch.parent} is full there; make room, or set TMPDIR in the shell's start file"]
    return []


def _check_log_dir(name: str | None) -> list[str]:
    if name is None:
        return []
    try:
        os.makedirs(name, exist_ok=True)
        usage = os.statvfs(name)
    except OSError as error:
        return [f"the logs cannot be written to {name} there: {error.strerror}; type --log-dir DIR, or --collect-logs"]
    if usage.f_bavail * usage.f_frsize < _SCRATCH_BYTES:
        return [f"the disk of {name} is full there; type --log-dir DIR, or --collect-logs"]
    return []


def _check_program(program: Program, environment: Mapping[str, str]) -> list[str]:
    name = program.arguments[0]
    if program.kind == "script" and not os.path.exists(name):
        return [f"there is no {name} in {os.getcwd()}; copy it there (--stage), or type --wdir DIR with its folder"]
    if program.kind == "program" and shutil.which(name, path=environment.get("PATH")) is None:
        return [f"there is no program {name} on its PATH; install it, or type the whole path"]
    return []
