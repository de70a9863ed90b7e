"""The rendezvous of the ranks of a job: a store that one of them serves, and a roll call on it.

The roll call comes before torch's process group, so that every rank names what is wrong with the world: a rank that is
missing, that came twice, or that has another world size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

# torch documents these four here, but does not list them for type checkers.
from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from shardwright.common.whole_file import write_whole
from shardwright.common.words import describe_ranks
from shardwright.distributed.backends.table import DeviceType
from shardwright.errors import LaunchError, UsageError, WorldError
from shardwright.launch.hosts.environment import FileMeeting, LaunchEnvironment, Meeting, MpiMeeting, TcpMeeting
from shardwright.launch.hosts.interfaces import ipv4_addresses
from shardwright.launch.hosts.port import LOOPBACK, refuse_without_loopback
from shardwright.launch.hosts.seal import Seal

_QUIET_S = 5.0  # for which nobody is told that it is waited
_READERS_S = 5.0  # for which who serves the store waits for those that are to read why the world did not come about


@dataclass(frozen=True)
class Card:
    """The card with which a rank describes itself at the roll call.

    ``gpus`` are the identities of those it can see, where it is to compute on a ``device`` of that type. ``asked`` says
    whether it was told the ``backend``, which else is the usual one.
    """

    rank: int
    size: int
    backend: str
    host: str
    machine: str
    pid: int
    local_rank: int | None
    gpus: tuple[str, ...]
    device: DeviceType = "cpu"
    asked: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


@dataclass(frozen=True)
class Deadline:
    """``timeout_s`` seconds from the moment at which this process began to wait."""

    timeout_s: float
    end: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(timeout_s, time.monotonic() + timeout_s)

    def left_s(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def pauses(self) -> Iterator[None]:
        """Yield until the time is over, sleeping 1 ms at first and 50 ms at last in between."""
        pause_s = 0.001
        while True:
            yield
            if self.left_s() == 0:
                return
            time.sleep(min(pause_s, self.left_s()))
            pause_s = min(1.5 * pause_s, 0.05)


def open_store(told: LaunchEnvironment, deadline: Deadline) -> Store:
    """The store that all ranks of the job share, served by one of them or by the launcher.

    Raises `WorldError` when the port is taken, or nobody serves the store in time.
    """
    if told.size == 1:
        return HashStore()
    match told.meeting:
        case TcpMeeting(address, port, server_rank):
            if told.rank == server_rank:  # msrun's scheduler, which has no rank, serves what it has told the others
                return _serve(_listen(address, port), told.size)
            return _join([address], port, told, deadline)
        case FileMeeting(path, one_host):
            return _meet_by_file(path, one_host, told, deadline)
        case MpiMeeting():
            return _meet_by_mpi(told, deadline)
        case None:
            raise WorldError(
                f"a world of {told.size} ranks has nowhere to meet; set MASTER_ADDR and MASTER_PORT to the host of "
                "rank 0 and a free port on it, or pass init_method='tcp://HOST:PORT'"
            )


def meeting_from_url(url: str) -> Meeting:
    """The meeting point that a user gave as ``init_method``: ``tcp://host:port`` or ``file:///shared/path``."""
    scheme, _, rest = url.partition("://")
    address, _, port = rest.rpartition(":")
    if scheme == "tcp" and address and port.isdecimal():
        return TcpMeeting(address.strip("[]"), int(port))
    if scheme == "file" and rest:
        return FileMeeting(Path(rest))
    raise UsageError(f"init_method={url!r} is no meeting point; expected tcp://HOST:PORT, file:///PATH or env://")


def _listen(address: str, port: int) -> socket.socket:
    """A listening socket; one for a loopback address cannot be reached from other hosts."""
    try:
        if address in (LOOPBACK, "localhost"):
            return socket.create_server((LOOPBACK, port), backlog=2048)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048)
        return socket.create_server(("", port), backlog=2048)
    except OSError as error:
        raise WorldError(
            f"the ranks cannot meet at {address}:{port}: {error.strerror}; another job or program may hold the port: "
            "choose another (MASTER_PORT, or the launcher's --master-port)"
        ) from error


def _check_loopback() -> None:
    """Raise `WorldError` where this host cannot reach itself."""
    try:
        refuse_without_loopback()
    except LaunchError as error:
        raise WorldError(str(error)) from None


def _serve(listener: socket.socket, size: int) -> Store:
    _check_loopback()
    port = listener.getsockname()[1]
    # The server reaches itself by the loopback, so that its own name need not be resolved.
    return TCPStore(LOOPBACK, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _join(addresses: list[str], port: int, told: LaunchEnvironment, deadline: Deadline) -> Store:
    # torch's own client waits a second between attempts and prints each one; a plain socket is quick and quiet.
    if LOOPBACK in addresses or "localhost" in addresses:
        _check_loopback()
    server = _server(told)
    told_at_s = deadline.left_s() - _QUIET_S
    for _ in deadline.pauses():
        for address in addresses:
            if _accepts(address, port, deadline):
                return _connect(address, port, deadline)
        if deadline.left_s() < told_at_s:
            told_at_s = -1.0
            print(
                f"shardwright: rank {told.rank} waits for {server} at {' or '.join(addresses)} port {port}, for up to "
                f"{deadline.timeout_s:g} s; is it running, and may this host reach it?",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    raise WorldError(
        f"{server} did not come to the meeting point {' or '.join(addresses)} port {port} within "
        f"{deadline.timeout_s:g} s; see its log, or raise the time with sw.init(timeout=...)"
    )


def _server(told: LaunchEnvironment) -> str:
    """Return a description of the rank or process that serves the store."""
    server_rank = told.meeting.server_rank if isinstance(told.meeting, TcpMeeting) else 0
    if server_rank is not None:
        return f"rank {server_rank}"
    return "msrun's scheduler" if told.launcher == "msrun" else "the launcher"


def _accepts(address: str, port: int, deadline: Deadline) -> bool:
    try:
        socket.create_connection((address, port), timeout=min(5.0, deadline.left_s() + 0.01)).close()
    except OSError:
        return False
    return True


def _connect(address: str, port: int, deadline: Deadline) -> Store:
    timeout = timedelta(seconds=max(deadline.left_s(), 5.0))
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _meet_by_file(path: Path, one_host: bool, told: LaunchEnvironment, deadline: Deadline) -> Store:
    if told.rank == 0:
        listener = _listen(LOOPBACK if one_host else "", 0)
        note = {"addresses": [LOOPBACK] if one_host else own_addresses(), "port": listener.getsockname()[1]}
        _make_private(path.parent)
        write_whole(path, lambda draft: draft.write_text(json.dumps(note)))
        return _serve(listener, told.size)
    for _ in deadline.pauses():
        # A note left by an earlier job leads to a port that nobody serves: read it anew until it is rank 0's.
        with contextlib.suppress(FileNotFoundError):
            note = json.loads(path.read_text())
            for address in note["addresses"]:
                if _accepts(address, note["port"], deadline):
                    return _connect(address, note["port"], deadline)
    raise WorldError(
        f"rank 0 did not write into {path} where to meet within {deadline.timeout_s:g} s; see its log, or raise the "
        "time with sw.init(timeout=...)"
    )


def _make_private(folder: Path) -> None:
    """Create the folder for its owner alone; a folder that exists must not belong to somebody else."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise WorldError(f"{folder} belongs to another user; remove it, or set TMPDIR to a folder of your own")


def _meet_by_mpi(told: LaunchEnvironment, deadline: Deadline) -> Store:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise WorldError(
            f"{told.launcher} started ranks on several hosts, and they find each other by mpi4py, which is not "
            "installed: pip install shardwright[mpi] (or set MASTER_ADDR and MASTER_PORT)"
        ) from error
    mpi = MPI.COMM_WORLD
    if mpi.Get_size() != told.size:
        raise WorldError(
            f"{told.launcher} says {told.size} ranks, mpi4py sees {mpi.Get_size()}: it was built for another MPI than "
            "the one whose mpirun was used; install the matching mpi4py, or set MASTER_ADDR and MASTER_PORT"
        )
    listener = _listen("", 0) if told.rank == 0 else None
    note = (own_addresses(), listener.getsockname()[1]) if listener else None
    addresses, port = mpi.bcast(note, root=0)
    return _serve(listener, told.size) if listener else _join(addresses, port, told, deadline)


def own_addresses() -> list[str]:
    """The addresses by which other hosts may reach this one; the loopback where there is no other."""
    outer = [address for address in ipv4_addresses().values() if not address.startswith("127.")]
    return outer or [LOOPBACK]


def roll_call(store: Store, card: Card, deadline: Deadline, serves: bool) -> tuple[Card, ...]:
    """Announce this rank and wait for all others; returns the cards of all ranks, in rank order.

    ``serves`` says that the store lives in this process, which then stays until the others have read why the world
    did not come about. Raises `WorldError`, with the same words on every rank that came, when a rank is missing at
    the deadline, came twice, or names another world size or backend.
    """
    try:
        problem = _announce(store, card)
        if problem:
            _judge(store, {"problem": problem})
        else:
            for _ in deadline.pauses():
                if store.check(["verdict"]):
                    break
            else:
                _judge(store, {"problem": _missing(store, card.size, deadline.timeout_s)})
        verdict = json.loads(store.get("verdict"))
        if problem or "problem" in verdict:
            if serves:
                _wait_for_readers(store, 0 if deadline.left_s() == 0 else card.size)
            else:
                store.add("read", 1)
            raise WorldError(verdict.get("problem", problem))
    except DistError as error:
        raise WorldError(
            f"the rank that serves the meeting point left before all {card.size} ranks had come"
        ) from error
    return tuple(_card(entry) for entry in verdict["cards"])


def _announce(store: Store, card: Card) -> str | None:
    """Leave this rank's card; the last to come publishes all of them. Returns what contradicts the others."""
    if store.add("arrived", 1) == 1:  # before all else: the others read it, whatever becomes of this rank
        store.set("first", json.dumps(asdict(card)))
    if store.add(f"came/{card.rank}", 1) > 1:
        first = _card(json.loads(store.get(f"card/{card.rank}")))
        pids = f"{first.pid} on {first.host}, {card.pid} on {card.host}"
        return f"two processes say that they are rank {card.rank}: {pids}"
    store.set(f"card/{card.rank}", json.dumps(asdict(card)))
    first = _card(json.loads(store.get("first")))
    for name, theirs, ours in (
        ("world size", first.size, card.size),
        ("backend", first.backend, card.backend),
        ("device", first.device, card.device),
    ):
        if theirs != ours:
            return f"the ranks disagree on the {name}: {first} says {theirs}, {card} says {ours}"
    if store.add("agreed", 1) == card.size:
        _judge(store, {"cards": [json.loads(store.get(f"card/{rank}")) for rank in range(card.size)]})
    return None


def _judge(store: Store, verdict: dict[str, object]) -> None:
    """Say what came of the meeting; the first to say so is right, so that all ranks raise the same words."""
    store.compare_set("verdict", "", json.dumps(verdict))


def _card(entry: dict[str, object]) -> Card:
    return Card(**(entry | {"gpus": tuple(entry["gpus"])}))  # type: ignore[arg-type]


def _missing(store: Store, size: int, timeout_s: float) -> str:
    came = [rank for rank in range(size) if store.check([f"card/{rank}"])]
    missing = [rank for rank in range(size) if rank not in came]
    cards = [_card(json.loads(store.get(f"card/{rank}"))) for rank in came]
    hosts = {card.host: [c.rank for c in cards if c.host == card.host] for card in cards}
    present = "; ".join(f"{describe_ranks(ranks)} on {host}" for host, ranks in hosts.items())
    return (
        f"{len(missing)} of {size} ranks did not come within {timeout_s:g} s: {describe_ranks(missing)} (came: "
        f"{present}); see the logs of those missing, or raise the time with sw.init(timeout=...)"
    )


def _wait_for_readers(store: Store, expected: int) -> None:
    """Serve the verdict to all that came, and to those of ``expected`` ranks that come a little later."""
    store.add("read", 1)
    for _ in Deadline.after(_READERS_S).pauses():
        if store.add("read", 0) >= max(store.add("arrived", 0), expected):
            return


def serve_until_all_left(store: Store, size: int) -> None:
    """Serve the store, in a process without a rank, until every rank has left."""
    while store.add("left", 0) < size:
        time.sleep(0.1)


class SealedStore(Store):
    """A store encrypted and signed with the secret of a job (`shardwright.launch.hosts.seal`).

    torch's store answers everybody who reaches its port, and lists the keys of all. Counters are added up by the store
    and stay numbers: who reaches the port can change those, remove keys, and put back what a key had before. That stops
    a job, or confuses it, and shows or gives it no data.
    """

    timeout: timedelta

    def __init__(self, store: Any, secret: str) -> None:
        super().__init__()
        self._store, self._sealing = store, Seal(secret)
        self.set_timeout(store.timeout)
        _kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._sealing.name(key), self._sealed(key, value))

    def get(self, key: str) -> bytes:
        self._keep_timeout()
        return self._opened(key, self._store.get(self._sealing.name(key)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted = self._sealed(key, expected) if expected else b""
        return self._opened(key, self._store.compare_set(self._sealing.name(key), wanted, self._sealed(key, desired)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._sealing.name(key), amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._sealing.name(key) for key in keys]))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._keep_timeout()
        self._store.wait([self._sealing.name(key) for key in keys], *timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(self._sealing.name(key)))

    deleteKey = delete_key  # as C++ calls it

    def _keep_timeout(self) -> None:
        """Wait for at most the timeout of this store, which torch does not pass to the store below."""
        if self._store.timeout != self.timeout:
            self._store.set_timeout(self.timeout)

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        return self._sealing.sealed(key, value.encode() if isinstance(value, str) else bytes(value))

    def _opened(self, key: str, written: Any) -> bytes:
        value = self._sealing.opened(key, bytes(written))
        if value is None:
            raise WorldError(
                f"what the store of the job has of {key} was not written by one of its ranks: another program reaches "
                "its port, or ranks were started with different secrets (SHARDWRIGHT_SECRET)"
            )
        return value


_kept: list[SealedStore] = []  # C++ keeps no Python object alive whose methods it calls


def job_store(store: Store, job: str, secret: str) -> Store:
    """Return the part of a store that belongs to one job, where others can reach the same meeting point."""
    return PrefixStore(f"shardwright/{job}", SealedStore(store, secret) if secret else store)


def open_part(store: Store, job: str, secret: str) -> Store:
    """Return a part that belongs to one job, too, and that C++ threads may ask at any time: it is not sealed."""
    return PrefixStore(f"shardwright/{hashlib.sha256(f'{secret} {job}'.encode()).hexdigest()}", store)
