"""The backends, which move data between ranks, as one table: what each can do. The standard library alone is imported.

What else a backend needs stands in its own module, which its row names. torch knows backends without a row, too: they
are taken to be able to do what the defaults of a row say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

from shardwright.launch.hosts.environment import LaunchEnvironment

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Way:
    """The route of a collective: around a ring, or from every member to every other.

    In both each member sends as many bytes, in as many ``messages(members, bytes)`` with a header each.
    """

    route: Literal["ring", "pairs"]
    messages: Callable[[int, int], float] = lambda members, buffer_bytes: 0


_RING, _PAIRS = Way("ring"), Way("pairs")
# NCCL may choose trees, which cross hosts with as few as half of a ring's bytes for an all-reduce.
_WAYS = {"all_reduce": _RING, "all_gather": _RING, "reduce_scatter": _RING, "all_to_all": _PAIRS, "shift": _RING}


# What ProcessGroupGloo and ProcessGroupNCCL have a name for; NCCL has more on some GPUs, in 8 bits.
_DTYPES = frozenset(["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"])


def _gloo_segments(members: int, buffer_bytes: int) -> float:
    """Messages of an all-reduce: each of twice as many segments as members, none below an element, goes round twice."""
    return 2 * (members - 1) / members * min(2 * members, max(buffer_bytes // 4, 1))


@dataclass(frozen=True)
class Buckets:
    """The way in which gradients are joined for all-reduces.

    ``bytes`` at most for one; a gradient with a quarter of that and more is not copied for it. ``first_bytes`` of those
    that the backward comes to first, so that communication begins early.
    """

    bytes: int = 32 * 2**20
    first_bytes: int = 2**20


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The abilities of a backend.

    Attributes:
        name: what is typed after ``--backend`` and given to `sw.init`.
        says: what stands behind the name where the choices are listed.
        device: where ranks compute that ask for it and for no device.
        shared: whether it is the usual one where all ranks, several, are on one host.
        instead: the name of the one that takes its place, aloud, where there is not what it needs.
        moves: the devices whose tensors it moves.
        torch_name: what torch calls it, where that is another name.
        module: the module whose ``prepare(environment)`` makes it known to torch before the ranks meet.
        sends_messages: whether two ranks can send each other tensors of the CPU with a time limit, so that the end of
            one is an error of its connections alone.
        waits_in_turns: whether a collective can be waited for with a time limit, and then again, as if without one.
        reduce_scatters: whether its reduce-scatter is quicker than an all-to-all and a local sum.
        buckets: how gradients are joined where all ranks share a host.
        buckets_between: the same where they stand on several.
        overlaps: whether collectives of sharded parameters are begun early, and waited for late: all-gathers, and the
            reduce-scatters of their gradients.
        infiniband: whether it goes over InfiniBand where there is one; else over TCP alone.
        within_host_by_loopback: whether ranks of one host talk through a network device, which counts their bytes.
        dtypes: the dtypes of the tensors that its collectives take, as torch names them; empty where they take all.
        names_network: whether it writes which network it took, as `shardwright.training.network.nccl_network` reads it.
        ways: how each kind of collective travels.
        header_bytes: what goes over the network with each message, the acknowledgement included.
    """

    name: str
    says: str = ""
    device: DeviceType = "cpu"
    shared: bool = False
    instead: str = ""
    moves: tuple[DeviceType, ...] = ("cpu", "cuda")
    torch_name: str = ""
    module: str | None = None
    sends_messages: bool = False
    waits_in_turns: bool = False
    reduce_scatters: bool = True
    buckets: Buckets = Buckets()
    buckets_between: Buckets = Buckets()
    overlaps: bool = False
    infiniband: bool = True
    within_host_by_loopback: bool = False
    dtypes: frozenset[str] = frozenset()
    names_network: bool = False
    ways: Mapping[str, Way] = field(default_factory=lambda: _WAYS)
    header_bytes: int = 0

    @property
    def registered(self) -> str:
        """The name by which torch knows it."""
        return self.torch_name or self.name

    def prepare(self, environment: LaunchEnvironment) -> None:
        """Make it known to torch; raises `WorldError` where this host, or the launcher, has not what it needs."""
        if self.module is not None:
            import_module(self.module).prepare(environment)


GLOO = Backend(
    name="gloo",
    says="CPU",
    sends_messages=True,
    waits_in_turns=True,
    # 4 ranks: 15 ms against 1.5 ms for 4 kB, 44-65 ms against 30-42 ms for 4 MB each.
    reduce_scatters=False,
    # On one host its threads compete with the backward for the cores: one large bucket at the end is quicker than
    # several early ones (early buckets of 4 MiB took 0.99 to 1.08 of one at the end). Over a network they mostly wait.
    buckets=Buckets(first_bytes=32 * 2**20),
    buckets_between=Buckets(4 * 2**20, first_bytes=4 * 2**20),
    infiniband=False,
    within_host_by_loopback=True,
    dtypes=_DTYPES,
    # Measured on the loopback of an empty network namespace with 2, 3 and 4 ranks and buffers from 4 bytes to 8 MB: a
    # header of 72 bytes goes with every message, and another 72 bytes come back to say that it may be sent.
    ways={
        "all_reduce": Way("ring", _gloo_segments),
        "all_gather": Way("ring", lambda members, buffer_bytes: 2 * (members - 1)),
        "reduce_scatter": Way("pairs", lambda members, buffer_bytes: members - 1),
        "all_to_all": Way("pairs", lambda members, buffer_bytes: members - 1),
        "shift": Way("ring", lambda members, buffer_bytes: members - 1),
    },
    header_bytes=144,
)
NCCL = Backend(
    name="nccl", says="GPU", device="cuda", moves=("cuda",), overlaps=True, dtypes=_DTYPES, names_network=True
)
# torch has taken the name "mpi" for a backend that it must be built with.
MPI = Backend(
    name="mpi", says="CPU, started by mpirun", moves=("cpu",), torch_name="shardwright_mpi",
    module="shardwright.distributed.backends.mpi",
)  # fmt: skip
SHM = Backend(
    name="shm", says="CPU, in memory that ranks share", shared=True, instead="gloo", moves=("cpu",),
    module="shardwright.distributed.backends.shm", sends_messages=True, waits_in_turns=True, infiniband=False,
    buckets=Buckets(8 * 2**20, first_bytes=4 * 2**20),
    dtypes=_DTYPES,  # those of gloo, which may take its place
)  # fmt: skip
BACKENDS: Mapping[str, Backend] = {row.name: row for row in (GLOO, NCCL, MPI, SHM)}


def usual_backend(device: DeviceType, shared: bool = False) -> Backend:
    """Return the default backend of ranks that compute on such devices.

    ``shared``: all are on one host, and several, which may have a backend of their own.
    """
    rows = [row for row in BACKENDS.values() if row.device == device and (shared or not row.shared)]
    return max(rows, key=lambda row: row.shared)


def choices() -> str:
    """The backends as an error lists them.

    >>> choices()
    "'gloo' (CPU), 'nccl' (GPU), 'mpi' (CPU, started by mpirun) or 'shm' (CPU, in memory that ranks share)"
    """
    *others, last = [f"{row.name!r} ({row.says})" for row in BACKENDS.values()]
    return f"{', '.join(others)} or {last}"


def backend_called(name: str) -> Backend:
    """The backend that we, or torch, call so; a row of defaults where there is none.

    >>> backend_called("shardwright_mpi").name
    'mpi'
    """
    rows = [row for row in BACKENDS.values() if name in (row.name, row.registered)]
    return rows[0] if rows else Backend(name=name)


def backends_by_device(text: str) -> dict[str, Backend]:
    """The backends that a text names, by the device whose tensors each moves; "" for one that moves all.

    >>> {device: row.name for device, row in backends_by_device("cpu:gloo,cuda:nccl").items()}
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    parts = [part.rpartition(":") for part in text.lower().split(",")]
    return {device: backend_called(name) for device, _, name in parts}


def backend_moving(device: str, text: str) -> Backend:
    """The one of the backends that a text names that moves tensors of such devices.

    >>> backend_moving("cuda", "cpu:gloo,cuda:nccl").name, backend_moving("cpu", "gloo").name
    ('nccl', 'gloo')
    """
    rows = backends_by_device(text)
    return rows.get(device) or next(iter(rows.values()))


def moves(device: str, text: str) -> bool:
    """Return whether one of the backends that a text names moves tensors of such devices.

    >>> [[moves(device, text) for device in ("cpu", "cuda")] for text in ("gloo", "nccl", "cpu:gloo,cuda:nccl")]
    [[True, True], [False, True], [True, True]]
    """
    rows = backends_by_device(text)
    row = rows.get(device) or rows.get("")
    return row is not None and device in row.moves


def on_gpus(text: str) -> bool:
    """Return whether ranks with these backends compute on GPUs."""
    return any(row.device == "cuda" for row in backends_by_device(text).values())
