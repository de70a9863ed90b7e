"""What a job is asked to be: the words of the command line, read and checked before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwright.errors import UsageError
from shardwright.hosts.gpus import count_gpus
from shardwright.hosts.rank_table import TABLE_VARIABLES, RankTable, read_rank_table
from shardwright.launch.asked.host_options import HostOptions, RemoteOptions
from shardwright.launch.asked.mpirun import find_mpirun, mpirun_command, read_backend, read_mca, runs_as_root
from shardwright.launch.asked.restart_options import ONCE, RestartOptions
from shardwright.launch.asked.save_graphs import VARIABLE, SaveGraphs
from shardwright.launch.host.program import Kind, Program, check_program
from shardwright.launch.host.stage import Stage
from shardwright.pulse import PULSE_VARIABLE

_SHORTEST_STALL_S = 0.5
# What the launcher itself decides for each rank: not to be set with -x.
RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE",
    PULSE_VARIABLE,
})  # fmt: skip


@dataclass(frozen=True)
class LaunchOptions:
    """A job, on this host or, with ``remote``, on several; there ``ranks`` is 0 until the hosts have been asked.

    ``environment`` is what its ranks have in common beyond what the launcher was given, ``rank_environments`` what
    single ranks have beside torchrun's variables. ``carrier`` is mpirun's command line where mpirun starts them.
    ``bind`` gives each rank cores of its own (`shardwright.launch.supervisor.binding`).
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
    carrier: tuple[str, ...] = ()
    remote: RemoteOptions | None = None
    bind: bool = True
    restarts: RestartOptions = ONCE
    stall_timeout_s: float | None = None


def read_options(
    *, module: bool, program: bool, arguments: Sequence[str], ranks: str | None, preload: bool, tee: str | None,
    job: str | None, log_dir: str, port: int | None, devices: str | None, variables: Sequence[str], grace_s: float,
    detach: bool, save_graphs: str | None = None, rank_table: str | None = None, via: str | None = None,
    backend: str | None = None, mca: Sequence[tuple[str, str]] = (), where: HostOptions | None = None,
    bind_to: str = "core", restarts: RestartOptions = ONCE, stall_timeout_s: float | None = None,
) -> LaunchOptions:  # fmt: skip
    """The job that a command line asks for. Raises `UsageError` for what cannot be served.

    Without ``tee``, rank 0 is shown, or nothing if the job is detached. Without ``where`` the job is on this host.
    """
    for_all, by_host = split_variables(variables)
    given = read_variables(for_all, os.environ)
    read_by_host = {host: read_variables(words, os.environ) for host, words in by_host.items()}
    where = replace(where or HostOptions(), variables=read_by_host)
    table = read_table(rank_table, ranks, devices, given)
    tee = tee or ("none" if detach else "0")
    whereabouts = where.read(ranks, table, via, tee)
    remote = whereabouts.remote
    if remote is not None:
        remote = replace(remote, stage=Stage.read(where.stage, where.keep_stage, Path(log_dir)))
    by_rank = {} if table is None else {rank: table.variables(rank, Path(str(rank_table))) for rank in table.placed}
    if table is not None:
        ranks, devices = str(table.size), table_gpus(by_rank, os.environ | given) if remote is None else None
    environment = given | visible_devices(devices, os.environ) | read_backend(backend, via or "local")
    settings = read_mca(mca, via or "local")
    if save_graphs is not None:
        environment[VARIABLE] = str(SaveGraphs.parse(save_graphs))
    kind: Kind = "program" if program else "module" if module else "script"
    whole = os.environ | environment
    # Only its hosts can check it.
    elsewhere = remote is not None and (bool(remote.wdir) or remote.stage is not None) and bool(arguments)
    checked = Program(kind, tuple(arguments)) if elsewhere else check_program(kind, arguments, whole)
    number = 0 if remote is not None else whereabouts.slots_here or read_ranks(ranks, whole)
    restarts.check(None if remote is not None else number, by_table=table is not None, via=via)
    if port is not None and not 0 < port < 65_536:
        raise UsageError(f"--port {port} is no TCP port; type one from 1 to 65535, or leave it out")
    if not grace_s >= 0:
        raise UsageError(f"--grace {grace_s} is no time; type the seconds that ranks get to end by themselves")
    if stall_timeout_s is not None and not _SHORTEST_STALL_S <= stall_timeout_s < float("inf"):
        raise UsageError(
            f"--stall-timeout {stall_timeout_s:g} is no time to wait for a sign of life; type seconds, at least "
            f"{_SHORTEST_STALL_S:g} and more than a step or a silent phase of the program may take"
        )
    carrier = mpirun_command(find_mpirun(whole), number, settings, runs_as_root()) if via == "mpirun" else ()
    return LaunchOptions(
        program=checked, ranks=number, preload=preload and not carrier,
        shown=frozenset() if remote is not None else read_tee(tee, number),
        job=job, log_dir=Path(log_dir), port=port, environment=environment, grace_s=grace_s, detach=detach,
        rank_environments=by_rank, carrier=carrier, remote=remote, bind=bind_to == "core",
        restarts=restarts, stall_timeout_s=stall_timeout_s,
    )  # fmt: skip


def read_ranks(text: str | None, environment: Mapping[str, str]) -> int:
    """``-n``; without it, or with ``auto``, one rank per visible GPU, and one where there is none."""
    if text is None or text == "auto":
        return max(1, count_gpus(environment))
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) == 0:
        raise UsageError(f"-n {text} is no number of ranks; type a whole number from 1 on, or -n auto for one per GPU")
    return int(text)


def read_table(
    rank_table: str | None, ranks: str | None, devices: str | None, given: Mapping[str, str]
) -> RankTable | None:
    """``--rank-table``. Raises `UsageError` where it is broken, or the other words of the command contradict it."""
    if rank_table is None:
        return None
    path = Path(rank_table)
    table = read_rank_table(path)
    if ranks not in (None, "auto", str(table.size)):
        raise UsageError(f"-n {ranks}, but {path} has {table.size} ranks; leave -n out")
    if devices is not None:
        raise UsageError(f"--devices {devices}: the devices are those of {path}; leave --devices out")
    if refused := [name for name in TABLE_VARIABLES if name in given]:
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


def read_tee(text: str, ranks: int) -> frozenset[int]:
    """``all``, ``none``, or ranks: ``0,3`` or ``0-3,7``.

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


def split_variables(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """What all hosts have, and by host what ``-x HOST:NAME=value`` gives to one: no variable has a colon in its name.

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
    """``-x NAME=value`` sets, ``-x NAME`` passes on, ``-x PREFIX*`` passes on every variable that begins so."""
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
    """``--devices 4,5`` as CUDA_VISIBLE_DEVICES. Where that is set already, only devices that it has may be named."""
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
