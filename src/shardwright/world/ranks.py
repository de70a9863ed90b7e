"""What the ranks of a save say to each other: short messages between rank 0 and the others."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwright.errors import CheckpointError

TIMEOUT_S = 1800.0
"""How long a rank waits for another unless told: the slowest may still be writing when the first is done."""


class Ranks(Protocol):
    """The ranks that save together."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any] | None:
        """Rank 0 gets the values of all, the others None.

        The value of a rank that does not answer is a `Lost`; raises CheckpointError where rank 0 does not.
        """

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on every rank; raises CheckpointError where rank 0 does not answer."""


class Lost(str):
    """Why nothing came from a rank."""


def alone() -> bool:
    """Whether this process has no other to talk to."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


class OneRank:
    """A world of one."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


class ProcessRanks:
    """The processes of a group of ``torch.distributed`` that can move tensors of the CPU, such as gloo.

    The messages go between rank 0 and each other rank alone. So the end of one rank is an error of its connection to
    rank 0, which can still tell the others who ended. No message is waited for longer than ``timeout_s``; when that
    time is up, gloo closes the connections of the whole group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = TIMEOUT_S) -> None:
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
        for tensor in (torch.tensor([len(data)]), data):
            self._wait(dist.isend(tensor, group=self.group, group_dst=to))

    def _receive(self, sender: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self._wait(dist.irecv(length, group=self.group, group_src=sender))
        data = torch.empty(int(length), dtype=torch.uint8)
        self._wait(dist.irecv(data, group=self.group, group_src=sender))
        return pickle.loads(data.numpy().tobytes())

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait(self.timeout)

    def _no_answer(self, error: RuntimeError) -> CheckpointError:
        return CheckpointError(
            f"rank {self.rank} was saving a checkpoint, and rank 0 did not answer within "
            f"{self.timeout.total_seconds():g} s or ended: {_first_line(error)}"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
