"""The sizes of the parts that ranks pass with ``batch="local"``: asked for at the beginning of a step.

A rank that passes what it passed before expects the same of the others, and computes until it has to talk to them. In a
steady step all have answered by then. Where the answer is another one, what was computed is thrown away and computed
anew: nothing of it has been kept or sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import ShardwrightError, UsageError
from shardwright.run.programs.inputs import Rows, Shape, global_shapes, height_of, in_turn, shown
from shardwright.world.agreement import from_all_ranks
from shardwright.world.control import control_group
from shardwright.world.lockstep import Lockstep

_MOST = 256  # answers that are remembered


class NotAsExpected(BaseException):
    """Ranks have come to something else than this one expected: its forward must not talk to them.

    No handler of errors is to see it on its way: the ``error``, where there is one, is raised when nothing runs any
    more, as it would have been had this rank waited.
    """

    def __init__(self, error: ShardwrightError | None = None) -> None:
        super().__init__()
        self.error = error


class Parts:
    """What ranks have passed to a model until now.

    Args:
        meanwhile: whether ranks compute before they know what the others pass. It pays where a device computes: on the
            cores of a CPU the threads that carry the question would take them from the forward.
    """

    def __init__(self, lockstep: Lockstep, meanwhile: bool = True) -> None:
        self._lockstep, self._meanwhile = lockstep, meanwhile
        self._answers: dict[tuple[int, int], Rows] = {}

    def ask(self, tensors: Sequence[Tensor], key: str) -> Asked:
        """Begin to ask all ranks for the sizes of their parts, of which this one has ``tensors``.

        They are asked for in the memory of the CPU: a step need not wait for what a GPU still has to do.

        Args:
            key: what the program depends on beside sizes.
        """
        height = height_of(tensors)
        mine = height, _number(key, global_shapes(tensors, Rows((0, height), -1, None)))  # -1: the rows of all
        told = torch.tensor(mine)
        everyone = [torch.empty_like(told) for _ in range(dist.get_world_size())]
        wait = self._lockstep.begin(dist.all_gather, everyone, told, group=control_group())
        expected = self._answers.get(mine) if self._meanwhile else None
        return Asked(tensors, everyone, wait, expected, lambda rows: self._remember(mine, rows))

    def _remember(self, mine: tuple[int, int], rows: Rows) -> None:
        if len(self._answers) >= _MOST:
            self._answers.clear()
        self._answers[mine] = rows


class Asked:
    """A question to all ranks. ``expected`` is what the same one was answered last time, None the first time."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        everyone: Sequence[Tensor],
        wait: Callable[[], object],
        expected: Rows | None,
        remember: Callable[[Rows], None],
    ) -> None:
        self.expected = expected
        self._tensors, self._everyone, self._wait, self._remember = tensors, everyone, wait, remember
        self._answer: Rows | None = None

    def rows(self) -> Rows:
        """Which rows each rank has.

        Raises:
            UsageError: on every rank, where parts differ in more than their number of rows.
            WorldError: as `Lockstep.run`.
        """
        if self._answer is None:
            self._answer = self._awaited()
        return self._answer

    def confirm(self, come: Callable[[], object]) -> None:
        """Wait, and ``come`` to the others if their answer is the expected one.

        Raises:
            NotAsExpected: where it is not, or there is an error.
        """
        try:
            if self.rows() == self.expected:
                come()
                return
        except ShardwrightError as error:
            raise NotAsExpected(error) from None
        raise NotAsExpected

    def _awaited(self) -> Rows:
        self._wait()
        counts, numbers = zip(*(theirs.tolist() for theirs in self._everyone), strict=True)
        if len(set(numbers)) == 1:
            rows = replace(in_turn(counts), agreed=True)
            self._remember(rows)
            return rows
        everyone = from_all_ranks(shown(self._tensors))
        other = next(rank for rank, theirs in enumerate(numbers) if theirs != numbers[0])
        raise UsageError(
            f"the parts of the batch do not fit together: rank 0 passed {everyone[0]}, rank {other} passed "
            f"{everyone[other]}; parts may differ in their number of rows alone: pad all to one length, and have the "
            "same values beside tensors, and model.train() or eval(), on all ranks"
        )


@lru_cache(maxsize=_MOST)
def _number(key: str, shapes: tuple[Shape, ...]) -> int:
    return int.from_bytes(hashlib.sha256(f"{key} {shapes}".encode()).digest()[:7])
