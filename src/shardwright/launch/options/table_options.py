"""``--rank-table``: the table of a job, and what it says of the GPUs of this host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwright.errors import UsageError
from shardwright.launch.hosts.gpus import count_gpus
from shardwright.launch.hosts.rank_table import TABLE_VARIABLES, RankTable
from shardwright.launch.hosts.table_check import read_rank_table
from shardwright.launch.options.request import LaunchRequest


def read_table(request: LaunchRequest, variables: Mapping[str, str]) -> RankTable | None:
    """The table, where one is named. ``variables`` are what ``-x`` sets for all hosts.

    Raises `UsageError` where it is broken, or the other words of the command contradict it.
    """
    if request.rank_table is None:
        return None
    path, ranks, devices = Path(request.rank_table), request.ranks, request.devices
    table = read_rank_table(path)
    if ranks not in (None, "auto", str(table.size)):
        raise UsageError(f"-n {ranks}, but {path} has {table.size} ranks; leave -n out")
    if devices is not None:
        raise UsageError(f"--devices {devices}: the devices are those of {path}; leave --devices out")
    if refused := [name for name in TABLE_VARIABLES if name in variables]:
        raise UsageError(f"-x {refused[0]}: the launcher sets {refused[0]} for each rank itself, from {path}")
    return table


def table_gpus(by_rank: Mapping[int, Mapping[str, str]], environment: Mapping[str, str]) -> str | None:
    """The devices of a rank table as GPUs, where this host has any: local rank N is to see its own as number N."""
    ids = [variables["DEVICE_ID"] for variables in by_rank.values()]
    gpus = count_gpus(environment)
    if gpus == 0:
        return None
    if environment.get("CUDA_VISIBLE_DEVICES") is None and (beyond := [name for name in ids if int(name) >= gpus]):
        raise UsageError(
            f"the rank table gives out the devices {', '.join(beyond)}, but this host has the GPUs 0 to {gpus - 1}; to "
            "run on its CPUs set CUDA_VISIBLE_DEVICES= (nothing)"
        )
    return ",".join(ids)
