"""Communication of Python objects between the ranks of a job: gather and broadcast."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import DistError

from shardwright.common.pulse import own_pulse
from shardwright.common.torch_private import job_store
from shardwright.distributed.control import control_group, message_group, world_group
from shardwright.errors import ShardwrightError, WorldError

TIMEOUT_S = 1800.0
"""The time that a rank waits for another by default: the slowest may still be writing when the first is done."""


@dataclass(frozen=True)
class Purpose:
    """The purpose for which ranks talk, so that errors between them use the terms of the caller.

    ``doing`` continues "while", as in "saving a checkpoint". ``error`` is the class of errors that the caller
    promises: other failures are raised as it. Without one, a rank alone raises what it met, and several raise a
    `WorldError`.
    """

    doing: str
    error: type[ShardwrightError] | None = None

    def failed(self, rank: int, why: str) -> ShardwrightError:
        """The error of all ranks where one failed with an error that is not ours."""
        if self.error is not None:
            return self.error(why)
        return WorldError(f"rank {rank} failed while {self.doing}: {why}")

    def lost(self, rank: int, why: Lost) -> ShardwrightError:
        """The error of all ranks where nothing came from one."""
        return (self.error or WorldError)(f"rank {rank} {why}")

    def unanswered(self, rank: int, timeout: timedelta, why: str) -> ShardwrightError:
        """The error of a rank that rank 0 did not answer."""
        return (self.error or WorldError)(
            f"rank {rank} was {self.doing}, and rank 0 did not answer within {timeout.total_seconds():g} s or ended: "
            f"{why}"
        )


class Ranks(Protocol):
    """The ranks that do something together."""

    rank: int
    size: int
    purpose: Purpose

    def gather(self, value: Any) -> list[Any] | None:
        """Rank 0 gets the values of all, the others None.

        The value of a rank that does not answer is a `Lost`; raises the error of the purpose where rank 0 does not.
        """

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on every rank; raises the error of the purpose where rank 0 does not answer."""


class Lost(str):
    """The reason why nothing came from a rank."""


def alone() -> bool:
    """Return whether this process has no other to talk to."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def ranks_by_collectives(doing: str) -> Ranks:
    """The ranks of the default process group, who talk by its collectives, or this process alone."""
    purpose = Purpose(doing)
    return OneRank(purpose) if alone() else CollectiveRanks(purpose)


# How often rank 0 was waited for in each default group, and how many bytes it has broadcast to the others.
_waits: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_bytes_broadcast: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_LONGEST_PAUSE_S = 0.02  # and 0.2 ms more for each rank, so that a thousand do not keep the store busy


def broadcast_bytes() -> int:
    """Return how many bytes rank 0 has broadcast by collectives so far; 0 on other ranks."""
    return 0 if alone() else _bytes_broadcast.get(world_group(), 0)


def ranks_by_messages(purpose: Purpose) -> Ranks:
    """The ranks of the default process group, connected by messages so that one may end early, or this process alone.

    Where the backend of the world sends no such messages, the first call makes a group for them, on all ranks.
    """
    return OneRank(purpose) if alone() else ProcessRanks(purpose, message_group())


class OneRank:
    """A world of one."""

    rank = 0
    size = 1

    def __init__(self, purpose: Purpose) -> None:
        self.purpose = purpose

    def gather(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


class CollectiveRanks:
    """All ranks of a job in a collective: one that ends ends them all, as in training.

    What rank 0 has for the others may take it hours to make. They wait for it for as long as it lives: in a collective
    they would wait for no longer than the timeout of its group, and one of NCCL would take a GPU for that.
    """

    def __init__(self, purpose: Purpose) -> None:
        self.purpose = purpose
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def gather(self, value: Any) -> list[Any] | None:
        everyone = None if self.rank else [value] * self.size
        dist.gather_object(value, everyone, group=control_group())
        return everyone

    def broadcast(self, value: Any) -> Any:
        with own_pulse().inside(b"broadcast from rank 0"):
            self._wait_for_rank_zero()
            answer = [pickle.dumps(value) if self.rank == 0 else b""]
            dist.broadcast_object_list(answer, src=0, group=control_group())
        if self.rank:
            return pickle.loads(answer[0])
        _bytes_broadcast[world_group()] = broadcast_bytes() + len(answer[0])
        return value

    def _wait_for_rank_zero(self) -> None:
        world, store = world_group(), job_store()
        number = _waits[world] = _waits.get(world, 0) + 1
        key, pause_s = f"rank 0 has come/{number}", 0.0005
        try:
            if self.rank == 0:
                store.set(key, "")
            while not store.check([key]):
                time.sleep(pause_s)
                pause_s = min(1.3 * pause_s, _LONGEST_PAUSE_S + self.size / 5000)
        except DistError as error:
            raise self.purpose.lost(0, Lost("has ended, or whoever serves the store of the job")) from error


class ProcessRanks:
    """The processes of a group of ``torch.distributed`` whose backend sends messages.

    The messages go between rank 0 and each other rank alone. So the end of one rank is an error of its connection to
    rank 0, which can still tell the others who ended. No message is waited for longer than ``timeout_s``; when that
    time is up, gloo closes the connections of the whole group.
    """

    def __init__(self, purpose: Purpose, group: dist.ProcessGroup | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.purpose = purpose
        self.group = group
        self.timeout = timedelta(seconds=timeout_s)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any] | None:
        if self.rank:
            try:
                self._send(value, 0)
            except RuntimeError as error:
                raise self._no_answer(error) from error
            return None
        return [value, *(self._from(rank) for rank in range(1, self.size))]

    def broadcast(self, value: Any) -> Any:
        if self.rank:
            try:
                return self._receive(0)
            except RuntimeError as error:
                raise self._no_answer(error) from error
        for rank in range(1, self.size):
            try:
                self._send(value, rank)
            except RuntimeError:
                continue  # that it is lost shows when it is next listened to; the others wait for their message
        return value

    def _from(self, rank: int) -> Any:
        try:
            return self._receive(rank)
        except RuntimeError as error:
            return Lost(f"ended or did not answer within {self.timeout.total_seconds():g} s: {_first_line(error)}")

    def _send(self, value: Any, to: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)], device="cpu"), data):
            self._wait(dist.isend(tensor, group=self.group, group_dst=to))

    def _receive(self, sender: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._wait(dist.irecv(length, group=self.group, group_src=sender))
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self._wait(dist.irecv(data, group=self.group, group_src=sender))
        return pickle.loads(data.numpy().tobytes())

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait(self.timeout)

    def _no_answer(self, error: RuntimeError) -> ShardwrightError:
        return self.purpose.unanswered(self.rank, self.timeout, _first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
