"""How the members of a group come to memory that they share, or to gloo where there is none, all of them alike."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
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


def create(options: Any) -> dist.ProcessGroup | dist.ProcessGroupGloo:
    """The group of the ranks that torch's ``options`` name: each of them calls this.

    Raises `WorldError`, on all ranks alike, where they are not on one host.
    """
    meeting = _Meeting(options)
    cards = meeting.exchange("card", _card())
    made = meeting.told(lambda: _make(cards, meeting.layout, meeting.names))
    memory, library, problem = None, None, made.get("problem", "")
    if not problem:
        memory, library, problem = _join(made, meeting, cards)
    arena = None if library is None else _own_arena(made)
    found = meeting.exchange("joined", {
        "problem": problem, "native": library is not None, "address": 0 if memory is None else memory.address,
        "arena": None if arena is None else arena.file,
    })  # fmt: skip
    if meeting.rank == 0 and "file" in made:
        os.close(made["file"])
    problem = next((joined["problem"] for joined in found if joined["problem"]), "")
    if made.get("error"):
        raise WorldError(made["error"])
    if memory is None or problem:
        if meeting.rank == 0:
            sys.stderr.write(f"shardwright: backend='shm' cannot share memory, gloo takes its place: {problem}\n")
        if arena is not None:
            arena.close()
        return dist.ProcessGroupGloo(meeting.store, meeting.rank, len(meeting.names), options.timeout)
    if not all(joined["native"] for joined in found):
        library = None
    token = bytes.fromhex(made["token"])
    reads = all(can_read(card["pid"], joined["address"], token) for card, joined in zip(cards, found, strict=True))
    files = [(card["pid"], joined["arena"]) for card, joined in zip(cards, found, strict=True)]
    arenas = None if arena is None else _all_arenas(arena, meeting.rank, files, token)
    answers = meeting.exchange("reaches", {"reads": reads, "writes": arenas is not None})
    if arena is not None and not all(answer["writes"] for answer in answers):
        arena.close()
        arenas = None
    if meeting.rank == 0:
        _say(library is not None, arenas is not None)
    members = Members(
        meeting.names, [Process(card["pid"], card["started"]) for card in cards], memory, library, arenas,
        all(answer["reads"] for answer in answers), _crowded(cards),
    )  # fmt: skip
    return ShmGroup(members, meeting.store, options.timeout)


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

    def exchange(self, what: str, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every member says, in their order."""
        self.store.set(f"{what}/{self.rank}", json.dumps(mine))
        return [self._get(f"{what}/{rank}", name) for rank, name in enumerate(self.names)]

    def told(self, made: Any) -> dict[str, Any]:
        """What the first member makes, for all."""
        if self.rank == 0:
            self.store.set("made", json.dumps(made()))
        return self._get("made", self.names[0])

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


def _make(cards: Sequence[Mapping[str, Any]], layout: Layout, names: Sequence[int]) -> dict[str, Any]:
    """By the first member: where the others find the memory, or why there is none."""
    hosts = {card["machine"]: card["host"] for card in cards}
    if len(hosts) > 1:
        places = list(zip(names, (card["machine"] for card in cards), strict=True))
        text = "; ".join(
            f"{host} has {', '.join(str(name) for name, machine in places if machine == here)}"
            for here, host in hosts.items()
        )
        error = f"backend='shm' is for ranks of one host, and these are on {len(hosts)} ({text}); choose backend='gloo'"
        return {"problem": error, "error": error}
    if len({card["processes"] for card in cards}) > 1:
        return {"problem": "the ranks are in several containers, which do not see each other's processes"}
    try:
        return _made(layout)
    except OSError as error:
        mib = layout.wide_at / 2**20
        return {"problem": f"there are no {mib:.0f} MiB of memory for {len(cards)} ranks: {error.strerror or error}"}
    except Exception as error:  # whatever it is, the others wait for an answer
        return {"problem": f"making it failed with {type(error).__name__}: {error}"}


def _made(layout: Layout) -> dict[str, Any]:
    token = secrets.token_bytes(TOKEN_BYTES)
    file = make_file(layout.total_bytes, token, layout.wide_at)
    try:
        make_semaphores(Memory(file, layout, 0))
        built = native.built()
    except BaseException:
        os.close(file)
        raise
    return {"file": file, "token": token.hex(), "native": None if built is None else str(built)}


def _join(
    made: Mapping[str, Any], meeting: _Meeting, cards: Sequence[Mapping[str, Any]]
) -> tuple[Memory | None, native.Native | None, str]:
    """The memory and the native code, which may be missing; and what is in the way."""
    token = bytes.fromhex(made["token"])
    try:
        file = open_file(cards[0]["pid"], made["file"], meeting.layout.total_bytes, token)
        try:
            memory = Memory(file, meeting.layout, meeting.rank)
        finally:
            os.close(file)
    except OSError as error:
        here, maker = meeting.names[meeting.rank], meeting.names[0]
        return None, None, f"rank {here} cannot open the memory that rank {maker} has made: {error}"
    try:
        return memory, native.Native(Path(made["native"])) if made["native"] else None, ""
    except (OSError, AttributeError):  # a folder whose files may not be run
        return memory, None, ""


def _own_arena(made: Mapping[str, Any]) -> Arena | None:
    try:
        return Arena(bytes.fromhex(made["token"]))
    except (OSError, ValueError):  # files, or addresses, are limited: tensors are then copied in and out
        return None


def _all_arenas(own: Arena, rank: int, files: Sequence[tuple[int, int | None]], token: bytes) -> Arenas | None:
    numbers = [(pid, number) for pid, number in files if number is not None]
    try:
        return Arenas(own, rank, numbers, token) if len(numbers) == len(files) else None
    except (OSError, ValueError):
        return None


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
