"""A job as a script with one mpirun of Open MPI in it, whose ranks have torchrun's variables too."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace

from shardwright.errors import UsageError
from shardwright.launch.carriers.connection import ALLOCATOR_VARIABLES, default_environment, where_unset
from shardwright.launch.carriers.torchrun import PORT, placement_of
from shardwright.launch.manifests.unserved import for_all_hosts, left_out
from shardwright.launch.options.carrier_facts import MPIRUN, check_mca, mpirun_command
from shardwright.launch.options.launch_options import LaunchOptions, read_options
from shardwright.launch.options.request import LaunchRequest
from shardwright.launch.options.variables import read_backend

_STARTER = "mpirun"
_SERVED = (
    "ranks", "variables", "port", "devices", "save_graphs", "backend", "mca", "python", "wdir", "oversubscribe",
)  # fmt: skip
_PLACES = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
# mpirun says each rank's place in variables of its own; scripts of torch read torchrun's.
_TELL = f'export {" ".join(f"{ours}=$OMPI_COMM_WORLD_{its}" for ours, its in _PLACES.items())}; exec "$@"'


def script(request: LaunchRequest) -> tuple[str, list[str]]:
    """Return the script, for a shell of the first host, and notes for the person.

    Raises `UsageError` where mpirun cannot run what is asked for.
    """
    note = left_out(request, _STARTER, _SERVED)
    check_mca(request.mca)
    options = read_options(replace(request, mca=(), backend=None))
    python = for_all_hosts("--python", request.where.python, _STARTER) or sys.executable
    wdir = for_all_hosts("--wdir", request.where.wdir, _STARTER) or os.getcwd()
    hosts, ranks, most, first = _placed(options)
    defaults = default_environment(len(os.sched_getaffinity(0)), most)
    chosen = {name: os.environ[name] for name in (*defaults, *ALLOCATOR_VARIABLES) if name in os.environ}
    variables = where_unset(defaults, chosen | options.environment) | chosen
    variables |= options.environment | read_backend(request.backend, MPIRUN)
    variables |= {"MASTER_ADDR": first, "MASTER_PORT": str(request.port or PORT)}
    start = mpirun_command("mpirun", ranks, request.mca, root=os.geteuid() == 0, hosts=hosts)
    command = options.program.command_line()
    if options.program.kind != "program":
        command[0] = python
    lines = [
        shlex.join(start),
        shlex.join(word for name, value in variables.items() for word in ("-x", f"{name}={value}")),
        f"sh -c {shlex.quote(_TELL)} sh",
        shlex.join(command),
    ]
    text = " \\\n    ".join(lines)
    return f"#!/bin/sh\ncd {shlex.quote(wdir)} || exit\nexec {text}\n", [note] if note else []


def _placed(options: LaunchOptions) -> tuple[str, int, int, str]:
    """Return the hosts as mpirun takes them, the ranks of all and the most of one, and the address where ranks meet."""
    if options.remote is None:
        return f"localhost:{options.ranks}", options.ranks, options.ranks, "127.0.0.1"
    if options.remote.variables:
        raise UsageError(f"-x {next(iter(options.remote.variables))}:...: mpirun gives all hosts the same variables")
    placement = placement_of(options)
    if user := next((host.user for host in placement.hosts if host.user), None):
        raise UsageError(f"{user}@: mpirun logs in as ~/.ssh/config says; set User there, and leave {user}@ out")
    counts = [len(ranks) for ranks in placement.ranks]
    named = [f"{host.name}:{count}" for host, count in zip(placement.hosts, counts, strict=True)]
    return ",".join(named), placement.size, max(counts), placement.hosts[0].name
