"""Creates a group of the shm backend: its members map shared memory, or all fall back to gloo."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.distributed.backends.group import backends_of
from shardwright.distributed.backends.segment import native
from shardwright.distributed.backends.segment.memory import TOKEN_BYTES, Layout, Memory, Process, make_file, open_file
from shardwright.distributed.backends.shm_group import Members, ShmGroup
from shardwright.distributed.backends.table import GLOO, SHM
from shardwright.errors import WorldError

_COMPILING = timedelta(seconds=60)  # for which the first rank of a host may be at native code
_log = logging.getLogger("shardwright.shm")
_said: set[str] = set()  # what this process has logged


class _NoMemory(Exception):
    """Raised on all members of a group with the reason why they cannot share memory."""

    def say(self, ranks: Sequence[int] | None) -> None:
        """Print the reason; ``ranks`` are the members where only this group, and not the world, uses gloo."""
        text = f"backend='shm' cannot share memory, gloo takes its place: {self}"
        if ranks is not None:
            who = f"the group of the ranks {_listed(ranks)}"
            text = f"{who} shares no memory, gloo takes the place of shm there, and in no other group: {self}"
        sys.stderr.write(f"shardwright: {text}\n")


class _NotHere(_NoMemory):
    """The members of a group are where gloo is to take the place."""

    def say(self, ranks: Sequence[int] | None) -> None:
        _log_once(logging.INFO, str(self) if ranks is None else f"of the group of the ranks {_listed(ranks)}: {self}")


def create(options: Any) -> dist.ProcessGroup | dist.ProcessGroupGloo:
    """The group of the ranks that torch's ``options`` name: each of them calls this."""
    meeting = _Meeting(options)
    try:
        cards = meeting.exchange("card", _card)
        _check_places(cards)
        members = _members(meeting, cards)
    except _NoMemory as problem:
        if meeting.rank == 0 and not (_of_a_world() and backends_of() == GLOO.name):
            problem.say(meeting.names if _of_a_world() else None)
        return _gloo(meeting)
    if meeting.rank == 0 and not _of_a_world():
        _log_once(logging.INFO, "shm: by native code")
    return ShmGroup(members, _gloo(meeting), meeting.timeout)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _of_a_world() -> bool:
    """Return whether this process has a world of this backend already."""
    return dist.is_initialized() and dist.get_backend() == SHM.registered


def _gloo(meeting: _Meeting) -> dist.ProcessGroupGloo:
    store = PrefixStore("gloo", meeting.store)
    return dist.ProcessGroupGloo(store, meeting.rank, len(meeting.names), meeting.timeout)


def _members(meeting: _Meeting, cards: Sequence[Mapping[str, Any]]) -> Members:
    """Return the members; raises `_NoMemory` on all ranks of the group or on none."""
    layout = Layout(len(cards))
    made = meeting.published("made", partial(_make, layout))
    found: list[tuple[Memory, native.Native]] = []

    def join() -> dict[str, Any]:
        found.append(_joined(meeting, cards[0]["pid"], made, layout))
        return {}

    try:
        meeting.exchange("joined", join)
    finally:
        if meeting.rank == 0 and "file" in made:
            os.close(made["file"])
    processes = [Process(card["pid"], card["started"]) for card in cards]
    return Members(meeting.names, processes, *found[0], _crowded(cards))


class _Meeting:
    """The members of one group at its store."""

    def __init__(self, options: Any) -> None:
        self.rank: int = options.group_rank
        self.names = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.timeout: timedelta = options.timeout
        # torch gives the name of a group that has ended to the next one of the same ranks.
        number = options.store.add(f"made by {self.rank}", 1)
        self.store: Store = PrefixStore(str(number), options.store)

    def exchange(self, what: str, make: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return what every member makes, in their order; raises `_NoMemory` on all of them where it fails on one."""
        self._publish(f"{what}/{self.rank}", make)
        said = [self._get(f"{what}/{rank}", name) for rank, name in enumerate(self.names)]
        return [_checked(answer) for answer in said]

    def published(self, key: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the value that the first member publishes, or its error."""
        if self.rank == 0:
            self._publish(key, make)
        return self._get(key, self.names[0])

    def _publish(self, key: str, make: Callable[[], Mapping[str, Any]]) -> None:
        """Publish the result of ``make``, or its error: the others wait for an answer."""
        try:
            mine = make()
        except _NoMemory as problem:
            mine = {"problem": str(problem)}
        except Exception as error:
            mine = {"problem": f"rank {self.names[self.rank]} failed with {type(error).__name__}: {error}"}
        self.store.set(key, json.dumps(mine))

    def _get(self, key: str, name: int) -> dict[str, Any]:
        patience = self.timeout + _COMPILING
        try:
            self.store.wait([key], patience)
            found: dict[str, Any] = json.loads(self.store.get(key))
        except (DistError, RuntimeError) as error:
            raise WorldError(
                f"rank {name} did not come to make the group of the ranks {_listed(self.names)} within "
                f"{patience.total_seconds():g} s; see its log"
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
    """Return whether the ranks are more than the cores of ``cards``, which are those of some of the world's."""
    world = dist.get_world_size() if dist.is_initialized() else 0
    return len({core for card in cards for core in card["cores"]}) < max(world, len(cards))


def _check_places(cards: Sequence[Mapping[str, Any]]) -> None:
    """Raise `_NoMemory` where the members are not in one place."""
    if len({card["machine"] for card in cards}) > 1:
        hosts = ", ".join(dict.fromkeys(card["host"] for card in cards))
        raise _NotHere(f"shm: gloo moves all between hosts ({hosts})")
    if len({card["processes"] for card in cards}) > 1:
        raise _NoMemory("the ranks are in several containers, which do not see each other's processes")


def _make(layout: Layout) -> dict[str, Any]:
    """By the first member: where the others find the memory, and native code."""
    if (library := native.built()) is None:
        raise _NoMemory(
            "there is no native code, since there is no C compiler, or no folder whose files may be written and run "
            "(install one, or `pip install ziglang`, or set XDG_CACHE_HOME)"
        )
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        file = make_file(layout.total_bytes, token, layout.wide_at)
    except OSError as error:
        mib = layout.wide_at / 2**20
        raise _NoMemory(
            f"there are no {mib:.0f} MiB of memory for {layout.size} ranks: {error.strerror or error}"
        ) from error
    return {"file": file, "token": token.hex(), "native": str(library)}


def _joined(meeting: _Meeting, pid: int, made: dict[str, Any], layout: Layout) -> tuple[Memory, native.Native]:
    """Return the memory that process ``pid`` has made, and native code, loaded."""
    _checked(made)
    here, maker = meeting.names[meeting.rank], meeting.names[0]
    try:
        file = open_file(pid, made["file"], layout.total_bytes, bytes.fromhex(made["token"]))
        try:
            memory = Memory(file, layout, meeting.rank)
        finally:
            os.close(file)
    except OSError as error:
        raise _NoMemory(f"rank {here} cannot open the memory that rank {maker} has made: {error}") from error
    try:
        return memory, native.Native(Path(made["native"]))
    except (OSError, AttributeError) as error:  # a folder whose files may not be run
        raise _NoMemory(f"rank {here} cannot load native code: {error}") from error


def _log_once(level: int, text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.log(level, text)
