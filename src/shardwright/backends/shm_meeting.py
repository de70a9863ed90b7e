"""How the members of a group come to memory that they share, or to gloo where there is none, all of them alike."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.backends.segment import native
from shardwright.backends.segment.arena import Arena, Arenas
from shardwright.backends.segment.direct import can_read
from shardwright.backends.segment.memory import TOKEN_BYTES, Layout, Memory, Process, make_file, open_file
from shardwright.backends.segment.waiting import make_semaphores
from shardwright.backends.shm_group import Members, ShmGroup
from shardwright.errors import WorldError

_log = logging.getLogger("shardwright.shm")
_said: set[str] = set()  # what this process has logged


class _NoMemory(Exception):
    """What keeps the members of a group from sharing memory; all of them come to know it."""


def create(options: Any) -> dist.ProcessGroup | dist.ProcessGroupGloo:
    """The group of the ranks that torch's ``options`` name: each of them calls this.

    Raises `WorldError`, on all ranks alike, where they are not on one host.
    """
    meeting = _Meeting(options)
    try:
        members = _members(meeting)
    except _NoMemory as problem:
        if meeting.rank == 0:
            sys.stderr.write(f"shardwright: backend='shm' cannot share memory, gloo takes its place: {problem}\n")
        return dist.ProcessGroupGloo(meeting.store, meeting.rank, len(meeting.names), options.timeout)
    if meeting.rank == 0:
        _say(members.library is not None, members.arenas is not None)
    return ShmGroup(members, meeting.store, options.timeout)


def _members(meeting: _Meeting) -> Members:
    """Raises `_NoMemory` and `WorldError` on all members alike."""
    cards = meeting.exchange("card", _card)
    _check_places(cards, meeting.names)
    made = meeting.told(partial(_make, meeting.layout))
    part = _Part(meeting, cards, made)
    try:
        found = meeting.exchange("joined", part.join)
        answers = meeting.exchange("reaches", partial(part.reach, found))
    except BaseException:
        part.close_arena()
        raise
    finally:
        if meeting.rank == 0:
            os.close(made["file"])
    if not all(answer["writes"] for answer in answers):
        part.close_arena()
    return Members(
        meeting.names, [Process(card["pid"], card["started"]) for card in cards], part.memory, part.library,
        part.arenas, all(answer["reads"] for answer in answers), _crowded(cards),
    )  # fmt: skip


class _Meeting:
    """The members of one group at its store."""

    def __init__(self, options: Any) -> None:
        self.rank: int = options.group_rank
        self.names = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.layout = Layout(len(self.names))
        self.timeout: timedelta = options.timeout
        # torch gives the name of a group that has ended to the next one of the same ranks.
        number = options.store.add(f"made by {self.rank}", 1)
        self.store: Store = PrefixStore(str(number), options.store)

    def exchange(self, what: str, make: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What every member makes, in their order; raises `_NoMemory` on all of them where it fails on one."""
        self._tell(f"{what}/{self.rank}", make)
        said = [self._get(f"{what}/{rank}", name) for rank, name in enumerate(self.names)]
        return [_checked(answer) for answer in said]

    def told(self, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """What the first member makes, for all; raises as `exchange`."""
        if self.rank == 0:
            self._tell("made", make)
        return _checked(self._get("made", self.names[0]))

    def _tell(self, key: str, make: Callable[[], Mapping[str, Any]]) -> None:
        """Whatever goes wrong is told, too: the others wait for an answer."""
        try:
            mine = make()
        except _NoMemory as problem:
            mine = {"problem": str(problem)}
        except Exception as error:
            mine = {"problem": f"rank {self.names[self.rank]} failed with {type(error).__name__}: {error}"}
        self.store.set(key, json.dumps(mine))

    def _get(self, key: str, name: int) -> dict[str, Any]:
        try:
            self.store.wait([key], self.timeout)
            found: dict[str, Any] = json.loads(self.store.get(key))
        except (DistError, RuntimeError) as error:
            raise WorldError(
                f"rank {name} did not come to make the group of the ranks {', '.join(map(str, self.names))} within "
                f"{self.timeout.total_seconds():g} s; see its log"
            ) from error
        return found


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "problem" in answer:
        raise _NoMemory(answer["problem"])
    return answer


def _card() -> dict[str, Any]:
    process = Process.this()
    return {
        "host": socket.gethostname(),
        "machine": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "processes": os.stat("/proc/self/ns/pid").st_ino,
        "pid": process.pid,
        "started": process.started,
        "cores": sorted(os.sched_getaffinity(0)),
    }


def _crowded(cards: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the ranks of the world, of which the group may have some, are more than the cores of the group."""
    world = dist.get_world_size() if dist.is_initialized() else 0
    return len({core for card in cards for core in card["cores"]}) < max(world, len(cards))


def _check_places(cards: Sequence[Mapping[str, Any]], names: Sequence[int]) -> None:
    """Raise what every member finds in the cards of all."""
    hosts = {card["machine"]: card["host"] for card in cards}
    if len(hosts) > 1:
        places = list(zip(names, (card["machine"] for card in cards), strict=True))
        text = "; ".join(
            f"{host} has {', '.join(str(name) for name, machine in places if machine == here)}"
            for here, host in hosts.items()
        )
        raise WorldError(
            f"backend='shm' is for ranks of one host, and these are on {len(hosts)} ({text}); choose backend='gloo'"
        )
    if len({card["processes"] for card in cards}) > 1:
        raise _NoMemory("the ranks are in several containers, which do not see each other's processes")


def _make(layout: Layout) -> dict[str, Any]:
    """By the first member: where the others find the memory, and native code if there is any."""
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        file = make_file(layout.total_bytes, token, layout.wide_at)
    except OSError as error:
        mib = layout.wide_at / 2**20
        raise _NoMemory(
            f"there are no {mib:.0f} MiB of memory for {layout.size} ranks: {error.strerror or error}"
        ) from error
    try:
        make_semaphores(Memory(file, layout, 0))
        built = native.built()
    except BaseException:
        os.close(file)
        raise
    return {"file": file, "token": token.hex(), "native": None if built is None else str(built)}


class _Part:
    """What one member has of what all share."""

    memory: Memory
    library: native.Native | None = None
    arena: Arena | None = None
    arenas: Arenas | None = None

    def __init__(self, meeting: _Meeting, cards: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> None:
        self._meeting, self._made = meeting, made
        self._pids = [card["pid"] for card in cards]
        self._token = bytes.fromhex(made["token"])

    def join(self) -> dict[str, Any]:
        """Come to the memory, and make what only some hosts allow."""
        self.memory = self._opened()
        with suppress(OSError, AttributeError):  # a folder whose files may not be run
            self.library = native.Native(Path(self._made["native"])) if self._made["native"] else None
        if self.library is not None:
            with suppress(OSError, ValueError):  # files, or addresses, are limited: tensors are copied in and out
                self.arena = Arena(self._token)
        return {
            "native": self.library is not None, "address": self.memory.address,
            "arena": None if self.arena is None else self.arena.file,
        }  # fmt: skip

    def _opened(self) -> Memory:
        meeting = self._meeting
        try:
            file = open_file(self._pids[0], self._made["file"], meeting.layout.total_bytes, self._token)
            try:
                return Memory(file, meeting.layout, meeting.rank)
            finally:
                os.close(file)
        except OSError as error:
            here, maker = meeting.names[meeting.rank], meeting.names[0]
            raise _NoMemory(f"rank {here} cannot open the memory that rank {maker} has made: {error}") from error

    def reach(self, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Try what all have joined with."""
        if not all(joined["native"] for joined in found):
            self.library = None
        files = [(pid, joined["arena"]) for pid, joined in zip(self._pids, found, strict=True)]
        if self.arena is not None and all(number is not None for _, number in files):
            with suppress(OSError, ValueError):
                self.arenas = Arenas(self.arena, self._meeting.rank, files, self._token)
        addresses = [joined["address"] for joined in found]
        reads = all(can_read(pid, address, self._token) for pid, address in zip(self._pids, addresses, strict=True))
        return {"reads": reads, "writes": self.arenas is not None}

    def close_arena(self) -> None:
        """Where not all members reach those of all."""
        if self.arena is not None:
            self.arena.close()
        self.arena = self.arenas = None


def _say(by_native: bool, in_arenas: bool) -> None:
    """Once for each process, whether collectives have native code, and whether they need no copies."""
    if in_arenas:
        text = "shm: by native code"
    elif by_native:
        text = (
            "shm: by native code; large all-reduces copy in and out of shared memory, since the size of files or of "
            "addresses is limited here (`ulimit -f`, `ulimit -v`)"
        )
    else:
        text = (
            "shm: without native code, since no C compiler was found; small collectives take several times as long "
            "(install one, or `pip install ziglang`)"
        )
    if text not in _said:
        _said.add(text)
        _log.log(logging.INFO if in_arenas else logging.WARNING, text)
