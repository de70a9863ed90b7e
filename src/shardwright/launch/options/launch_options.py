"""A job as the command line asks for it, read and checked before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.errors import UsageError
from shardwright.launch.host.program import Program, check_program
from shardwright.launch.hosts.gpus import count_gpus
from shardwright.launch.options.carrier_facts import (
    CARRIERS,
    LOCAL,
    CarrierFacts,
    StartCommand,
    carrier_facts,
    check_mca,
)
from shardwright.launch.options.request import NO_RESTARTS, LaunchRequest, RemoteOptions, RestartOptions, read_count
from shardwright.launch.options.save_graphs import VARIABLE, SaveGraphs
from shardwright.launch.options.variables import (
    read_backend,
    read_variables,
    split_variables,
    visible_devices,
    wrong_on_this_host,
)

if TYPE_CHECKING:
    from shardwright.launch.hosts.rank_table import RankTable

_SHORTEST_STALL_S = 0.5


@dataclass(frozen=True)
class LaunchOptions:
    """A job, on this host or, with ``remote``, on several; there ``ranks`` is 0 until the hosts have answered.

    ``environment`` is what its ranks have in common beyond the environment of the launcher, ``rank_environments`` what
    single ranks have beside torchrun's variables. ``start_command`` starts the ranks where the carrier has one.
    ``bind`` gives each rank cores of its own (`shardwright.launch.supervisor.rank_start`). A job that hangs for
    ``stall_timeout_s`` is ended where ``stall_ends``, and shown in any case. ``by_torchrun``: each rank is a torchrun.
    """

    program: Program
    ranks: int
    preload: bool = True
    shown: frozenset[int] = frozenset({0})
    job: str | None = None
    log_dir: Path = Path("log_output")
    port: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    grace_s: float = 10.0
    detach: bool = False
    rank_environments: dict[int, dict[str, str]] = field(default_factory=dict)
    carrier: CarrierFacts = LOCAL
    start_command: StartCommand | None = None
    remote: RemoteOptions | None = None
    bind: bool = True
    restarts: RestartOptions = NO_RESTARTS
    stall_timeout_s: float | None = None
    stall_ends: bool = True
    by_torchrun: bool = False

    @property
    def logs_stay(self) -> bool:
        """Return whether the output of ranks stays on their hosts."""
        return self.remote is not None and not self.remote.collect_logs


def read_options(request: LaunchRequest) -> LaunchOptions:
    """Return the checked options of a job. Raises `UsageError` for what is not supported."""
    chosen = carrier_facts(request.via)
    for_all, by_host = split_variables(request.variables)
    variables = read_variables(for_all, os.environ)
    own_variables = {host: read_variables(words, os.environ) for host, words in by_host.items()}
    table = read_table(request, variables)
    tee = request.tee or ("none" if request.detach else "0")
    place = request.where.read(request.ranks, table, chosen, tee, own_variables)
    remote = None if isinstance(place, int) else _with_stage(place, request)
    table_path = Path(request.rank_table or "")
    by_rank = {} if table is None else {rank: table.variables(rank, table_path) for rank in table.placed}
    _check_mca(request.mca, chosen, remote is not None)
    environment = variables | _read_environment(request, chosen, variables, {} if remote is not None else by_rank)
    whole = os.environ | environment
    program = _read_program(request, remote, whole)
    ranks = 0
    if isinstance(place, int):
        ranks = table.size if table is not None else place or read_ranks(request.ranks, whole)
    if remote is None and (wrong := wrong_on_this_host(whole, among_hosts=False)):
        raise UsageError("\n".join(wrong))
    request.restarts.check(None if remote is not None else ranks, by_table=table is not None, carrier=chosen)
    check_numbers(request)
    start_command = None if chosen.start_command is None else chosen.start_command(ranks, request.mca, whole)
    return LaunchOptions(
        program=program, ranks=ranks, preload=request.preload and start_command is None,
        shown=frozenset() if remote is not None else read_tee(tee, ranks),
        job=request.job, log_dir=Path(request.log_dir), port=request.port, environment=environment,
        grace_s=request.grace_s, detach=request.detach, rank_environments=by_rank,
        carrier=chosen.settled(remote is not None), start_command=start_command, remote=remote,
        bind=request.bind_to == "core", restarts=request.restarts, stall_timeout_s=request.stall_timeout_s,
        stall_ends=request.on_stall != "report",
    )  # fmt: skip


def _with_stage(remote: RemoteOptions, request: LaunchRequest) -> RemoteOptions:
    """Return the hosts of the job with what is copied to them."""
    from shardwright.launch.host.stage import Stage

    return replace(remote, stage=Stage.read(request.where.stage, request.where.keep_stage, Path(request.log_dir)))


def _read_environment(
    request: LaunchRequest, carrier: CarrierFacts, variables: Mapping[str, str], by_rank: Mapping[int, dict[str, str]]
) -> dict[str, str]:
    """Return what options other than ``-x`` put into the environment; ``by_rank`` is of a rank table for this host.

    Raises `UsageError` for an option that is not for the carrier.
    """
    devices = table_gpus(by_rank, os.environ | variables) if by_rank else request.devices
    environment = visible_devices(devices, os.environ) | read_backend(request.backend, carrier)
    if request.save_graphs is not None:
        environment[VARIABLE] = str(SaveGraphs.parse(request.save_graphs))
    return environment


def _check_mca(words: Sequence[tuple[str, str]], carrier: CarrierFacts, on_hosts: bool) -> None:
    if words and not carrier.takes_mca:
        owner = next(row.name for row in CARRIERS.values() if row.takes_mca)
        remedy = "which starts no ranks here: not needed, leave it out"
        if not on_hosts:
            remedy = f"leave it out, or type --via {owner} too"
        raise UsageError(f"--mca {' '.join(words[0])} is a setting of {owner}{',' if on_hosts else ';'} {remedy}")
    check_mca(words)


def _read_program(request: LaunchRequest, remote: RemoteOptions | None, environment: Mapping[str, str]) -> Program:
    """Return the program, checked unless only the hosts can check it: a script need not be here, too."""
    if remote is not None and _is_there(request, remote):
        program = Program(request.kind, tuple(request.arguments))
    else:
        program = check_program(request.kind, request.arguments, environment)
    return replace(program, tells_local_rank=request.local_rank)


def _is_there(request: LaunchRequest, remote: RemoteOptions) -> bool:
    if not request.arguments:
        return False
    name = request.arguments[0]
    path = request.kind == "script" and (os.sep in name or name.endswith(".py"))
    return bool(remote.wdir) or remote.stage is not None or (path and not os.path.exists(name))


def check_numbers(request: LaunchRequest) -> None:
    """Raise `UsageError` for a port or a time that is none."""
    port, grace_s, stall_timeout_s = request.port, request.grace_s, request.stall_timeout_s
    if port is not None and not 0 < port < 65_536:
        raise UsageError(f"--port {port} is no TCP port; type one from 1 to 65535, or leave it out")
    if not grace_s >= 0:
        raise UsageError(f"--grace {grace_s} is no time; type the seconds that ranks get to end by themselves")
    if request.on_stall is not None and stall_timeout_s is None:
        raise UsageError(f"--on-stall {request.on_stall} without --stall-timeout: nobody looks for hangs; type both")
    if stall_timeout_s is not None and not _SHORTEST_STALL_S <= stall_timeout_s < float("inf"):
        raise UsageError(
            f"--stall-timeout {stall_timeout_s:g} is no time to wait for a sign of life; type seconds, at least "
            f"{_SHORTEST_STALL_S:g} and more than a step or a silent phase of the program may take"
        )


def read_ranks(text: str | None, environment: Mapping[str, str]) -> int:
    """Return the number of ``-n``; without it, or with ``auto``, one rank per visible GPU, and one without GPUs."""
    return read_count(text, "-n auto for one per GPU") or max(1, count_gpus(environment))


def read_tee(text: str, ranks: int) -> frozenset[int]:
    """Return the ranks that ``all``, ``none``, ``0,3`` or ``0-3,7`` names.

    >>> sorted(read_tee("0-2,7", 8))
    [0, 1, 2, 7]
    """
    if text in ("all", "none"):
        return frozenset(range(ranks if text == "all" else 0))
    shown: set[int] = set()
    for part in text.split(","):
        span = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if span is None:
            raise UsageError(f"--tee {text} names no ranks; type all, none, or ranks as 0,3 or 0-3")
        first, last = int(span[1]), int(span[2] or span[1])
        if first > last or last >= ranks:
            raise UsageError(f"--tee {text}: the {ranks} ranks of this job are 0 to {ranks - 1}")
        shown.update(range(first, last + 1))
    return frozenset(shown)


def read_table(request: LaunchRequest, variables: Mapping[str, str]) -> RankTable | None:
    """Return the rank table, where one is named. ``variables`` are what ``-x`` sets for all hosts.

    Raises `UsageError` where it is broken, or the other words of the command contradict it.
    """
    if request.rank_table is None:
        return None
    from shardwright.launch.hosts.rank_table import TABLE_VARIABLES
    from shardwright.launch.hosts.table_check import read_rank_table

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
    """Return the devices of a rank table as GPUs, where this host has any: local rank N sees its own as number N."""
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
