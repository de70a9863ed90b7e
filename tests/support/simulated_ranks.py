"""Ranks that are threads of one process, talking through queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from shardwright.distributed.ranks import Lost, Purpose, Ranks
from shardwright.errors import CheckpointError


class SimulatedRanks:
    """``SimulatedRanks.run(4, function)`` calls it on four."""

    purpose = Purpose("trying", CheckpointError)

    def __init__(self, rank: int, inboxes: Sequence[SimpleQueue[Any]], answers: Sequence[SimpleQueue[Any]]) -> None:
        self.rank = rank
        self.size = len(inboxes)
        self.inboxes = inboxes
        self.answers = answers

    @staticmethod
    def run(size: int, function: Callable[[Ranks], Any]) -> list[Any]:
        """What ``function`` returns or raises on each of ``size`` ranks."""
        inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(size)]
        answers: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(size)]

        def call(rank: int) -> Any:
            try:
                return function(SimulatedRanks(rank, inboxes, answers))
            except Exception as error:
                return error

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(call, range(size)))

    def gather(self, value: Any) -> list[Any] | None:
        if self.rank:
            self.inboxes[self.rank].put(value)
            return None
        return [value, *(self._next(inbox) for inbox in self.inboxes[1:])]

    def broadcast(self, value: Any) -> Any:
        if self.rank:
            answer = self._next(self.answers[self.rank])
            if isinstance(answer, Lost):
                raise CheckpointError(f"rank 0 {answer}")
            return answer
        for answers in self.answers[1:]:
            answers.put(value)
        return value

    def _next(self, queue: SimpleQueue[Any]) -> Any:
        try:
            return queue.get(timeout=60)
        except Empty:
            return Lost("did not answer within 60 s")
