"""The world of this process: which rank it is, of how many, on which host and device."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.common.pulse import own_pulse
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.backends import shm
from shardwright.distributed.backends.group import backends_of
from shardwright.distributed.backends.table import (
    BACKENDS,
    DeviceType,
    backend_called,
    backends_by_device,
    choices,
    on_gpus,
    usual_backend,
)
from shardwright.distributed.control import bound_collectives, control_group, world_group
from shardwright.distributed.device_reports import follow_device, measure_steps, switch_on_recorder
from shardwright.distributed.devices import asked_device, device_type, gpu_index, host_names
from shardwright.distributed.gloo_threads import calm_receivers, leave_at_exit
from shardwright.distributed.meeting import (
    Card,
    Deadline,
    job_store,
    meeting_from_url,
    open_part,
    open_store,
    roll_call,
    serve_until_all_left,
)
from shardwright.errors import UsageError, WorldError
from shardwright.launch.host.folders import use_temporary
from shardwright.launch.hosts.environment import FileMeeting, LaunchEnvironment, TcpMeeting, read_environment
from shardwright.launch.hosts.interfaces import own_loopback
from shardwright.launch.options.variables import BACKEND_VARIABLE

_MEETING_TIMEOUT_S = 300.0

# Cached by the process group: a world goes with it, and a new group gets a new one.
_worlds: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()


@dataclass(frozen=True)
class World:
    """This process among those that train together.

    ``local_rank`` counts the ranks on the same ``host``, ``local_size`` says how many there are, ``device`` is where
    this rank computes, ``backend`` moves the data between ranks, and ``hosts`` names the host of every rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    device: torch.device
    backend: str
    hosts: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        here = f"local rank {self.local_rank} of {self.local_size} on {self.host}"
        return f"rank {self.rank} of {self.size} ({here}), {self.device}, {self.backend}"


def init(
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta | None = None,
    device: str | torch.device | None = None,
) -> World:
    """Join the other ranks as the launcher's environment variables say; without a launcher, a world of one rank.

    Understands torchrun, ``shardwright launch``, PyTorchJobs and Ray Train, msrun, rank tables, OpenMPI, MPICH and
    Intel MPI, and Slurm; where several left their variables, the innermost counts (`launch.hosts.environment`).

    ``device`` is where this rank computes: "cpu", "cuda" (the GPU that its place on its host gives it) or "cuda:N"; all
    ranks of a host may have one GPU with backend="gloo". Unless given it is what the backend serves.
    ``backend`` is nccl where torch sees GPUs, else shm where all ranks, several, are on one host, else gloo, unless
    given here or by ``shardwright launch --backend``; "shm" goes by gloo between hosts, and "mpi" is for ranks that
    mpirun started (`shardwright.distributed.backends.table`).
    ``init_method`` (``tcp://HOST:PORT`` or ``file:///PATH``), ``rank`` and ``world_size`` take the place of what the
    launcher says. ``timeout`` (seconds or timedelta) bounds the wait for the other ranks, 300 s unless given, and every
    collective of every group, torch's default unless given. A second call returns the same world; a process group that
    the script has made itself is adopted: it keeps its own timeout, and groups that are made beside it get this one.

    Raises `WorldError` when the environment is incomplete, a rank is missing, comes twice or disagrees with
    the others, when a host has more ranks than GPUs, or when an earlier call set up another world; `UsageError` when
    the arguments make no sense.
    """
    own_pulse().beat()
    use_temporary(os.environ)
    asked = asked_device(device)
    shm.register()  # also for groups; where the package is not installed torch has not found it by itself
    limit = _timeout(timeout)
    if dist.is_initialized():
        world = _existing(backend, rank, world_size, asked)
        if limit is not None:
            bound_collectives(limit)
        return world
    backend = backend or os.environ.get(BACKEND_VARIABLE) or None
    _check_backend(backend)
    launched = _launch_environment(init_method, rank, world_size)
    if backend is not None:
        backend_called(backend).prepare(launched)
    chosen = backend or _usual(asked)
    deadline = Deadline.after(_MEETING_TIMEOUT_S if limit is None else limit.total_seconds())
    introduced = partial(_introduce, launched, chosen, device_type(asked, chosen), backend is not None)
    plain, store, cards = _meet(launched, introduced, deadline)
    cards = _by_place(cards)
    if backend is None:
        backend_called(cards[0].backend).prepare(launched)
    world = _world(cards, launched, asked)
    if on_gpus(world.backend):  # whose watchdogs would call Python at any time, also at its end
        store = open_part(plain, launched.job, launched.secret)
    return _start(world, store, launched, limit)


def _timeout(given: float | timedelta | None) -> timedelta | None:
    """Return the timeout that was given; raises `UsageError` where it is none."""
    limit = timedelta(seconds=given) if isinstance(given, int | float) else given
    if limit is not None and limit <= timedelta():
        raise UsageError(f"timeout={given} must be more than 0 seconds")
    return limit


def _usual(asked: torch.device | None) -> str:
    """Return the default backend for a device type, or for the available devices."""
    on_gpu = asked.type == "cuda" if asked is not None else torch.cuda.is_available()
    return usual_backend("cuda" if on_gpu else "cpu").name


def _check_backend(backend: str | None) -> None:
    """Raises `UsageError` where neither we nor torch know a backend of that name; ``cpu:gloo,cuda:nccl`` names two."""
    known = {*BACKENDS, *dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
    if backend and any(row.name not in known for row in backends_by_device(backend).values()):
        raise UsageError(f"backend={backend!r} is unknown; choose {choices()}")


def current_world() -> World:
    """The world that `init` set up; raises `WorldError` before that."""
    return _current(None)


def _current(device: torch.device | None) -> World:
    if not dist.is_initialized():
        raise WorldError("there is no world yet; call sw.init() first")
    group = world_group()
    if group not in _worlds:
        _worlds[group] = _adopt(device)
        _tell(_worlds[group])
    return _worlds[group]


def _existing(backend: str | None, rank: int | None, world_size: int | None, device: torch.device | None) -> World:
    world = _current(device)
    same_device = device is None or (device.type == world.device.type and device.index in (None, world.device.index))
    for name, given, actual in (
        ("device", None if same_device else str(device), str(world.device)),
        ("backend", None if backend == _asked() else backend, world.backend),
        ("rank", rank, world.rank),
        ("world_size", world_size, world.size),
    ):
        if given not in (None, actual):
            raise WorldError(
                f"sw.init({name}={given!r}), but the world is already there with {name}={actual!r}; "
                "call torch.distributed.destroy_process_group() first to set up another"
            )
    return world


def _asked() -> str:
    """The backend that was requested; `World.backend` may be another that took its place."""
    return backend_called(str(dist.get_backend())).name


def _adopt(asked: torch.device | None) -> World:
    """The world of a process group that the script has set up itself; every rank must take part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = backend_called(backends_of()).name
    hosts = from_all_ranks(socket.gethostname())
    local = [r for r in range(size) if hosts[r] == hosts[rank]]
    if asked is not None and asked.index is not None:
        torch.cuda.set_device(asked)
    on_gpu = device_type(asked, backend) == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return World(rank, size, local.index(rank), len(local), hosts[rank], device, backend, tuple(hosts))


def _launch_environment(init_method: str | None, rank: int | None, world_size: int | None) -> LaunchEnvironment:
    """Return the launcher's settings, overridden by the caller's arguments."""
    if (rank is None) != (world_size is None):
        given, lacking = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise UsageError(f"sw.init({given}=...) needs {lacking}=... too")
    if rank is None or world_size is None:
        launched = read_environment(os.environ)
    else:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank={rank} is not within world_size={world_size}; ranks go from 0 to the size - 1")
        launched = LaunchEnvironment(launcher="sw.init", rank=rank, size=world_size)
        if init_method in (None, "env://") and os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
            init_method = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if init_method in (None, "env://"):
        return launched
    return replace(launched, meeting=meeting_from_url(init_method))


def _meet(
    launched: LaunchEnvironment, introduced: Callable[[], Card], deadline: Deadline
) -> tuple[Store, Store, tuple[Card, ...]]:
    """Rendezvous: return the store that is served, the job's part of it, and the cards of all ranks."""
    try:
        plain = open_store(launched, deadline)
        store = job_store(plain, launched.job, launched.secret)
        if launched.rank is None:
            serve_until_all_left(store, launched.size)
            raise SystemExit(0)
        server_rank = launched.meeting.server_rank if isinstance(launched.meeting, TcpMeeting) else 0
        return plain, store, roll_call(store, introduced(), deadline, serves=launched.rank == server_rank)
    finally:
        if isinstance(launched.meeting, FileMeeting) and launched.rank == 0:
            launched.meeting.path.unlink(missing_ok=True)


def _introduce(launched: LaunchEnvironment, backend: str, device: DeviceType, asked: bool) -> Card:
    assert launched.rank is not None
    seen = torch.cuda.device_count() if device == "cuda" else 0
    gpus = [str(torch.cuda.get_device_properties(i).uuid) for i in range(seen)]
    return Card(
        rank=launched.rank,
        size=launched.size,
        backend=backend,
        host=launched.host or socket.gethostname(),
        machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid=os.getpid(),
        local_rank=launched.local_rank,
        gpus=tuple(gpus),
        device=device,
        asked=asked,
    )


def _by_place(cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """Return the cards with the default backend for these hosts, unless one of the ranks named a backend."""
    if any(card.asked for card in cards):
        return cards
    name = usual_backend(cards[0].device, shared=len(cards) > 1 == len(set(host_names(cards)))).name
    return tuple(replace(card, backend=name) for card in cards)


def _world(cards: Sequence[Card], launched: LaunchEnvironment, asked: torch.device | None) -> World:
    mine = cards[launched.rank or 0]
    hosts = host_names(cards)
    local = [card for card in cards if hosts[card.rank] == hosts[mine.rank]]
    local_rank = [card.rank for card in local].index(mine.rank) if mine.local_rank is None else mine.local_rank
    local_size = launched.local_size or len(local)
    device = torch.device("cpu")
    if asked is not None and asked.index is not None:
        device = asked
    elif mine.device == "cuda":
        shared = asked is not None and not on_gpus(mine.backend)
        device = torch.device("cuda", gpu_index(cards, mine.rank, launched.device_id, shared))
    return World(mine.rank, mine.size, local_rank, local_size, hosts[mine.rank], device, mine.backend, hosts)


def _start(world: World, store: Store, launched: LaunchEnvironment, timeout: timedelta | None) -> World:
    """The world with its process group, and with the backend that moves its data."""
    bound = on_gpus(world.backend)  # the backend has to know on which GPU it works
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if bound:
        switch_on_recorder()
    if len(set(world.hosts)) == 1:
        # gloo would resolve this host's own name, which can take seconds or fail; within a host the loopback will do.
        loopback = own_loopback()
        if loopback is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        backend_called(world.backend).registered,
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=world.device if bound else None,
    )
    if timeout is not None:
        bound_collectives(timeout)
    calm_receivers()
    # A rank that left at once would break the connections that others are still making.
    dist.barrier(control_group())
    if backends_of() != str(dist.get_backend()):
        world = replace(world, backend=backends_of())
    _worlds[world_group()] = world
    _tell(world)
    leave_at_exit(store if launched.launcher == "msrun" else None)
    return world


def _tell(world: World) -> None:
    """Report the load and memory of this rank's device to whoever watches the job."""
    follow_device(own_pulse(), world.device)
    measure_steps(own_pulse().steps, world.device, first_of_host=world.local_rank == 0)
