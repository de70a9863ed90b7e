"""Slurm's srun as the way to the hosts of an allocation: one agent per node, where ssh is not let in or not wanted.

    launcher (batch script or shell) ─┬─ srun ── slurmstepd ── agent ── supervisor ── ranks 0-1     node a
                                      └─ srun ── slurmstepd ── agent ── supervisor ── ranks 2-3     node b

The agents are those of `ssh`, so that checks, logs, leases and the verdict are the same; srun only carries their
streams. Each is a step of its own which has all of the node's part of the allocation: its cores, memory and GPUs.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwright.errors import UsageError
from shardwright.launch.carriers.agent_connection import AgentConnection
from shardwright.launch.carriers.packed import BOOT
from shardwright.launch.carriers.ssh import SshCarrier
from shardwright.launch.host.agent_protocol import TooOld
from shardwright.launch.hosts.hosts import Host, Hosts
from shardwright.launch.hosts.table_check import read_rank_table
from shardwright.launch.options.carrier_facts import SRUN
from shardwright.launch.options.launch_options import check_numbers
from shardwright.launch.options.request import LaunchRequest, read_count

# Without a terminal srun would hold back what does not end with a line's end: -u has it pass everything on at once.
_SRUN = (
    "srun", "--unbuffered", "--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none",
    "--kill-on-bad-exit=0",
)  # fmt: skip
# Everything else that sbatch and salloc leave in the environment would be taken as wishes for the agent's step.
_KEPT = frozenset({"SLURM_CONF", "SLURM_JOB_ID", "SLURM_CLUSTERS", "SLURM_WORKING_CLUSTER", "SLURM_JWT"})
# What Slurm says to each node by itself.
_OF_A_NODE = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL"})
_EARLIEST_S = 65_535  # that --signal takes
_NO_SUCH_NODE = ("node configuration is not available", "Invalid node name", "not in this job", "nodes are not in")


class SrunCarrier(SshCarrier):
    """Reaches the nodes of the allocation in which the launcher runs, each by a step of its own."""

    client, package = "srun", "slurm-client"

    def is_here(self, host: Host) -> bool:
        """Slurm decides what a process may use also on this node."""
        return False

    def command(self, host: Host) -> list[str]:
        wait = f"--immediate={max(1, round(self.remote.connect_timeout_s))}"
        return [*_SRUN, wait, f"--nodelist={host.name}", self.python(host), "-c", BOOT]

    def client_environment(self) -> dict[str, str]:
        return {
            name: value
            for name, value in os.environ.items()
            if name in _KEPT or not name.startswith(("SLURM_", "SRUN_", "SBATCH_", "SALLOC_"))
        }

    def shared_environment(self) -> dict[str, str]:
        return {
            name: value
            for name, value in super().shared_environment().items()
            if not name.startswith("SLURM_") and name not in _OF_A_NODE
        }

    def other_way(self) -> str:
        return ""

    def closer_look(self) -> str:
        return ""  # doctor goes by ssh, which an allocation need not let in

    def why_silent(self, connection: AgentConnection) -> str:
        said = connection.said_lines()
        if connection.has(TooOld) or not any(line.startswith(("srun:", "slurmstepd")) for line in said):
            return super().why_silent(connection)
        python = self.python(connection.host)
        if any(word in line for line in said for word in _NO_SUCH_NODE):
            names = os.environ.get("SLURM_JOB_NODELIST", "?")
            return f"it is no node of this allocation, which has {names}; name some of those, or leave -H out"
        if any("execve()" in line for line in said):
            return f"there is no {python} there, or it cannot be run ({said[0]}); type --python PATH, one that each has"
        if connection.exit_code is None:
            return f"{super().why_silent(connection)} ({said[-1]})"
        return f"srun failed: {said[-1]}; try `srun --overlap -N 1 -n 1 -w {connection.name} true`"


def batch_script(words: Sequence[str], request: LaunchRequest) -> str:
    """Return a script for sbatch that runs `shardwright launch` with ``words``, which make the ``request``, here."""
    if not request.arguments:
        raise UsageError("nothing to launch; type --print slurm -n 8 train.py ARGS")
    check_numbers(request)
    if 2 * request.grace_s > _EARLIEST_S:
        raise UsageError(
            f"--grace {request.grace_s:g}: Slurm tells a job at most {_EARLIEST_S} s before its time is over; type "
            f"at most {_EARLIEST_S // 2}"
        )
    table = None if request.rank_table is None else read_rank_table(Path(request.rank_table))
    hosts, _ = request.where.named(table)
    count = table.size if table is not None else read_count(request.ranks)
    kept = [*([] if request.via else ["--via", SRUN.name]), *_without_printing(words)]
    name = request.job or re.sub(r"[^\w.+-]+", "-", Path(request.arguments[0]).stem)
    return _script([sys.executable, "-m", "shardwright", "launch", *kept], name, hosts, count, request.grace_s)


def _without_printing(words: Sequence[str]) -> list[str]:
    """Return the words without the first that says what is to be printed; the program may have one of that name."""
    names = [word.partition("=")[0].replace("_", "-") for word in words]
    at = next(place for place, name in enumerate(names) if name in ("--print", "--print-sbatch"))
    return [*words[:at], *words[at + (2 if words[at] == "--print" else 1) :]]


def _sbatch_word(word: str) -> str:
    """Return a word as sbatch reads it in a script, where unlike in a shell a backslash quotes within quotes, too."""
    if re.fullmatch(r"[\w.+-]+", word):
        return word
    return "'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _script(words: Sequence[str], name: str, hosts: Hosts | None, ranks: int | None, grace_s: float) -> str:
    asked = [f"--job-name={_sbatch_word(name)}"]
    if hosts is not None:
        asked += [f"--nodes={len(hosts)}", f"--nodelist={','.join(host.name for host in hosts)}"]
        counts = {host.slots for host in hosts}
        asked += [f"--ntasks-per-node={counts.pop()}"] if len(counts) == 1 and None not in counts else []
        if counts and hosts.slots is not None:
            asked.append(f"--ntasks={hosts.slots}")
    elif ranks is not None:
        asked.append(f"--ntasks={ranks}")
    warning_s = max(60, 2 * round(grace_s))
    lines = [
        "#!/bin/bash",
        "# `sbatch --partition P --time 1:00:00 FILE` submits this; what is typed there goes before what stands here.",
        *(f"#SBATCH {word}" for word in asked),
        f"# The job is told {warning_s} s before its time is over, so that its ranks can end by themselves.",
        f"#SBATCH --signal=B:TERM@{warning_s}",
        f"cd {shlex.quote(str(Path.cwd()))} || exit",
        f"exec {shlex.join(words)}",
    ]
    return "\n".join(lines) + "\n"
