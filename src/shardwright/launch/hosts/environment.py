"""The rank, world size and meeting point that the launcher of this process has set in its environment.

The names of each launcher's variables stand in `LAUNCHERS`, beside the function that reads them. When several
launchers left their variables (torchrun inside a Slurm allocation, our launcher inside mpirun), the innermost
wins: the table's order, since torchrun and msrun start processes inside the jobs of mpirun and Slurm, mpirun inside
a Slurm allocation, and never the other way round. A set that lacks a variable loses to a complete one; if
none is complete, the missing variables are named.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from os import getuid
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.common.pulse import JOB_VARIABLE
from shardwright.errors import UsageError, WorldError
from shardwright.launch.hosts.hosts import expand_hosts, expand_tasks
from shardwright.launch.hosts.job_name import check_printable

if TYPE_CHECKING:
    from shardwright.launch.hosts.rank_table import RankTable

SECRET_VARIABLE = "SHARDWRIGHT_SECRET"
"""Tells the ranks of a job what nobody else knows."""
# Ports below Linux's ephemeral range, so that no outgoing connection holds the one that a job derives.
_DERIVED_PORTS = range(20000, 32000)


@dataclass(frozen=True)
class TcpMeeting:
    """The ranks meet at ``address:port``, served by rank ``server_rank`` or, if None, by the launcher."""

    address: str
    port: int
    server_rank: int | None = 0


@dataclass(frozen=True)
class FileMeeting:
    """Rank 0 takes a free port and writes where it listens into ``path``, which every rank can read."""

    path: Path
    one_host: bool = False


@dataclass(frozen=True)
class MpiMeeting:
    """Several hosts without a known address: rank 0's address is broadcast by mpi4py."""


Meeting = TcpMeeting | FileMeeting | MpiMeeting


@dataclass(frozen=True)
class LaunchEnvironment:
    """The rank of this process in its job, as its launcher has set it.

    ``local_rank`` and ``local_size`` are None where the launcher does not say; ``meeting`` is None for one
    process alone; ``job`` separates two jobs that reach the same meeting point; ``device_id`` is the device that
    the launcher assigned; ``rank`` is None for a process that only serves the meeting point (msrun's scheduler).
    ``secret`` is known to the ranks of the job alone, where the launcher gives them one.
    """

    launcher: str
    rank: int | None
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    meeting: Meeting | None = None
    job: str = ""
    host: str | None = None
    device_id: int | None = None
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class LauncherVariables:
    """The variables of a launcher: any of ``markers`` says that it was here, ``required`` must all be set."""

    name: str
    markers: tuple[str, ...]
    required: tuple[str, ...]
    read: Callable[[Mapping[str, str]], LaunchEnvironment]


def read_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Return the values that the innermost launcher has set, or a world of one process where there was none.

    Raises `WorldError` when a launcher's variables are incomplete, are no numbers, or contradict each other.

    >>> env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    >>> place = read_environment(env)
    >>> place.launcher, place.rank, place.size, place.meeting
    ('torchrun', 1, 2, TcpMeeting(address='127.0.0.1', port=29500, server_rank=0))
    """
    present = [launcher for launcher in LAUNCHERS if any(environ.get(name) for name in launcher.markers)]
    for launcher in present:
        if all(environ.get(name) for name in launcher.required):
            return _checked(launcher.read(environ))
    if present:
        launcher = present[0]
        seen = ", ".join(f"{name}={environ[name]}" for name in launcher.markers if environ.get(name))
        missing = ", ".join(name for name in launcher.required if not environ.get(name))
        raise WorldError(
            f"{seen} says that {launcher.name} started this process, but {missing} is not set; "
            f"{launcher.name} sets {', '.join(launcher.required)}: set what is missing, or unset them all to run "
            "one process"
        )
    if environ.get("RANK_ID") and environ.get("RANK_SIZE", "1") != "1":
        raise WorldError(
            f"RANK_ID={environ['RANK_ID']} and RANK_SIZE={environ['RANK_SIZE']} say that this is one of several ranks, "
            "but RANK_TABLE_FILE is not set; set it to the rank table, as `shardwright ranktable make` writes it"
        )
    return LaunchEnvironment(launcher="none", rank=0, size=1, local_rank=0, local_size=1)


def _checked(place: LaunchEnvironment) -> LaunchEnvironment:
    try:
        check_printable(place.job, f"the job of {place.launcher}")
    except UsageError as error:
        raise WorldError(str(error)) from None
    if place.size < 1 or (place.rank is not None and not 0 <= place.rank < place.size):
        raise WorldError(
            f"{place.launcher} says rank {place.rank} of {place.size}; ranks go from 0 to the world size - 1"
        )
    local_rank, local_size = place.local_rank, place.local_size
    if local_rank is not None and local_size is not None and not 0 <= local_rank < local_size <= place.size:
        raise WorldError(
            f"{place.launcher} says local rank {local_rank} of {local_size} on a host, in a world of {place.size}; "
            "local ranks go from 0 to the local size - 1, and a host has no more ranks than the world"
        )
    return place


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise WorldError(f"{name}={environ[name]!r} is not a whole number") from None


def _optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    return _integer(environ, name) if environ.get(name) else None


def _master(environ: Mapping[str, str]) -> TcpMeeting | None:
    """Return the meeting point that a job script exported itself, as many do before ``srun`` or ``mpirun``."""
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return TcpMeeting(environ["MASTER_ADDR"], _integer(environ, "MASTER_PORT"))
    return None


def derived_port(text: str) -> int:
    """Return a port that every process derives from ``text`` alike, below the ephemeral range."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    return _DERIVED_PORTS[digest % len(_DERIVED_PORTS)]


def _torchrun(environ: Mapping[str, str]) -> LaunchEnvironment:
    meeting = _master(environ)
    assert meeting is not None  # both variables are required
    _refuse_unstarted(environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        meeting = replace(meeting, server_rank=None)
    # A restarted group of workers meets at the store of its predecessors, which still holds their entries.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchEnvironment(
        launcher="shardwright launch" if environ.get(JOB_VARIABLE) else "torchrun",
        rank=_integer(environ, "RANK"),
        size=_integer(environ, "WORLD_SIZE"),
        local_rank=_optional_integer(environ, "LOCAL_RANK"),
        local_size=_optional_integer(environ, "LOCAL_WORLD_SIZE"),
        meeting=meeting,
        job=f"{environ.get('TORCHELASTIC_RUN_ID', 'none')}/{attempt}",
        secret=environ.get(SECRET_VARIABLE, ""),
    )


def _refuse_unstarted(environ: Mapping[str, str]) -> None:
    """Raise `WorldError` in a pod of Kubeflow's PyTorchJob whose several ranks nobody has started.

    Such a pod counts the ranks of all pods, and calls its own number RANK.
    """
    each = environ.get("PET_NPROC_PER_NODE", "1")
    if each.isdecimal() and int(each) > 1 and not environ.get("LOCAL_RANK"):
        raise WorldError(
            f"PET_NPROC_PER_NODE={each} says that this pod of a PyTorchJob has {each} ranks, but LOCAL_RANK is not "
            "set: nobody has started them; run the script by torchrun, which reads these variables, or set "
            'nprocPerNode: "1" in the manifest'
        )


def _msrun(environ: Mapping[str, str]) -> LaunchEnvironment:
    # msrun runs the script once more as the scheduler, on the host and port where the workers are to meet.
    scheduler = environ["MS_ROLE"] == "MS_SCHED"
    if not scheduler and not environ.get("MS_NODE_ID"):
        raise WorldError(
            f"MS_ROLE={environ['MS_ROLE']} says that msrun started this process, but MS_NODE_ID is not set; start "
            "msrun with --node_rank, so that it numbers its workers"
        )
    return LaunchEnvironment(
        launcher="msrun",
        rank=None if scheduler else _integer(environ, "MS_NODE_ID"),
        size=_integer(environ, "MS_WORKER_NUM"),
        meeting=TcpMeeting(environ["MS_SCHED_HOST"], _integer(environ, "MS_SCHED_PORT"), server_rank=None),
        device_id=_optional_integer(environ, "DEVICE_ID"),
    )


def _open_mpi(environ: Mapping[str, str]) -> LaunchEnvironment:
    size = _integer(environ, "OMPI_COMM_WORLD_SIZE")
    local_size = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE", "")
    meeting: Meeting = MpiMeeting()
    if job and local_size == size:
        # The namespace is mpirun's host and process id, which come again; its server's address sets the jobs apart.
        key = hashlib.sha256(f"{job} {environ.get('PMIX_SERVER_URI2', '')}".encode()).hexdigest()[:16]
        meeting = FileMeeting(Path(tempfile.gettempdir()) / f"shardwright-{getuid()}" / f"{key}.meet", one_host=True)
    return LaunchEnvironment(
        launcher="OpenMPI",
        rank=_integer(environ, "OMPI_COMM_WORLD_RANK"),
        size=size,
        local_rank=_integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=local_size,
        meeting=_master(environ) or meeting,
        job=job,
    )


def _mpich(environ: Mapping[str, str]) -> LaunchEnvironment:
    return LaunchEnvironment(
        launcher="MPICH",
        rank=_integer(environ, "PMI_RANK"),
        size=_integer(environ, "PMI_SIZE"),
        local_rank=_optional_integer(environ, "MPI_LOCALRANKID"),
        local_size=_optional_integer(environ, "MPI_LOCALNRANKS"),
        meeting=_master(environ) or MpiMeeting(),
    )


def _slurm(environ: Mapping[str, str]) -> LaunchEnvironment:
    hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    tasks = expand_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_TASKS_PER_NODE"])
    node, size = _integer(environ, "SLURM_NODEID"), _integer(environ, "SLURM_NTASKS")
    if len(hosts) != len(tasks) or node >= len(hosts) or sum(tasks) != size:
        raise WorldError(
            f"Slurm's variables contradict each other: node {node} of the hosts {hosts}, with {tasks} tasks on them, "
            f"and {size} tasks in all (SLURM_NODEID, SLURM_STEP_NODELIST, SLURM_TASKS_PER_NODE, SLURM_NTASKS)"
        )
    job = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}"
    return LaunchEnvironment(
        launcher="Slurm",
        rank=_integer(environ, "SLURM_PROCID"),
        size=size,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_size=tasks[node],
        meeting=_master(environ) or TcpMeeting(hosts[0], derived_port(f"slurm {job}")),
        job=job,
        host=hosts[node],
    )


def _rank_table(environ: Mapping[str, str]) -> LaunchEnvironment:
    path = Path(environ["RANK_TABLE_FILE"])
    table, text = _read_table(path)
    rank = _integer(environ, "RANK_ID")
    if rank not in table.placed:
        raise WorldError(f"RANK_ID={rank} is not in {path}, which has the ranks 0 to {table.size - 1}")
    server, device = table.placed[rank]
    # DEVICE_NUM is what the host has, or what the job uses of it: scripts set both.
    size, device_id = _optional_integer(environ, "RANK_SIZE"), _optional_integer(environ, "DEVICE_ID")
    if size not in (None, table.size):
        raise WorldError(f"RANK_SIZE={size}, but {path} has {table.size} ranks")
    if device_id not in (None, device.device_id):
        raise WorldError(
            f"DEVICE_ID={device_id}, but {path} gives rank {rank} device {device.device_id} of {server.server_id}; "
            f"set DEVICE_ID={device.device_id}, or unset it"
        )
    local = sorted(device.rank for device in server.devices)
    # The meeting point is the first server of the table, whichever ranks it holds; a single one is this host, whatever
    # address of it the table has.
    first = table.servers[0]
    address = first.address if len(table.servers) > 1 else "127.0.0.1"
    port = _optional_integer(environ, "MASTER_PORT") or derived_port(text)
    return LaunchEnvironment(
        launcher="rank table",
        rank=rank,
        size=table.size,
        local_rank=local.index(rank),
        local_size=len(local),
        meeting=TcpMeeting(address, port, min(device.rank for device in first.devices)),
        host=server.server_id,
        device_id=device.device_id,
    )


def _read_table(path: Path) -> tuple[RankTable, str]:
    from shardwright.launch.hosts.table_check import check_rank_table

    try:
        checked = check_rank_table(path)
        return checked.required(), checked.text
    except UsageError as error:
        raise WorldError(f"RANK_TABLE_FILE: {error}") from None


# Innermost first.
LAUNCHERS: tuple[LauncherVariables, ...] = (
    LauncherVariables(
        "torchrun", ("RANK", "WORLD_SIZE"), ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), _torchrun
    ),
    LauncherVariables("msrun", ("MS_ROLE",), ("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM"), _msrun),
    LauncherVariables("a rank table", ("RANK_TABLE_FILE",), ("RANK_TABLE_FILE", "RANK_ID"), _rank_table),
    LauncherVariables(
        "OpenMPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        _open_mpi,
    ),
    LauncherVariables("MPICH", ("PMI_RANK", "MPI_LOCALRANKID"), ("PMI_RANK", "PMI_SIZE"), _mpich),
    # A batch script and the shell of an allocation are one process; only a step that srun started has a node list.
    LauncherVariables(
        "Slurm",
        ("SLURM_STEP_NODELIST",),
        tuple(
            f"SLURM_{name}"
            for name in ("PROCID", "LOCALID", "NODEID", "NTASKS", "JOB_ID", "STEP_NODELIST", "TASKS_PER_NODE")
        ),
        _slurm,
    ),
)
