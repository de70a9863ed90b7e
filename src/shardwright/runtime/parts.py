"""The sizes of the parts that ranks pass with ``batch="local"``.

A rank that passes what it passed before expects the same of the others, and computes until it has to talk to them. On
GPUs it has asked at the beginning of the step, and in a steady one all have answered by then. On the cores of a CPU the
threads that carry the question would take them from the forward: it is asked with the first thing that the program has
to say. Where the answer is another one, what was computed is thrown away and computed anew: nothing of it was kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.pulse import own_pulse
from shardwright.compiler.mesh.processes import all_gather_single, at_once
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.backends.segment.flats import is_plain
from shardwright.distributed.control import control_group
from shardwright.distributed.lockstep import Lockstep
from shardwright.errors import ShardwrightError, UsageError, WorldError
from shardwright.runtime.programs.inputs import Rows, global_shapes, in_turn, shown

_MOST = 256  # answers that are remembered
# What each rank tells: its rows, on what its program depends, what is to be the same beside rows, what it expects, how
# many bytes it adds behind that, and its call of the model.
_HEAD = struct.Struct("=6q")
# In all, so that small gathers come with the question; fixed, since all ranks gather as much whatever they add. Written
# and read by Python, since each call of torch takes microseconds.
_BYTES = 1024


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
        meanwhile: whether ranks ask at the beginning of a step, and compute while the question is on its way.
    """

    def __init__(self, lockstep: Lockstep, meanwhile: bool) -> None:
        self.lockstep, self.pulse = lockstep, own_pulse()
        self._meanwhile = meanwhile
        self._answers: dict[tuple[int, int], Rows] = {}  # Cached as what is expected: ranks confirm it in each step
        self._letter: _Letter | None = None

    def ask(self, tensors: Sequence[Tensor], height: int, key: str, alike: Sequence[str] = ()) -> Asked:
        """The question to all ranks for the sizes of their parts, of which this one has ``tensors`` of ``height`` rows.

        They are asked for in the memory of the CPU: a step need not wait for what a GPU still has to do.

        Args:
            key: what the program depends on beside sizes.
            alike: what all ranks are to have passed alike, in words.
        """
        mine = height, _number(key, global_shapes(tensors, _any_rows(height)))
        if self._letter is None or self._letter.under_way:
            with torch.inference_mode(False):  # in which later questions may be asked
                self._letter = _Letter(dist.get_world_size())
        asked = Asked(self, tensors, mine, alike, self._answers.get(mine), self._letter)
        if self._meanwhile:
            asked.begin()
        return asked

    def remember(self, mine: tuple[int, int], rows: Rows) -> None:
        """What all ranks have passed when this one passed ``mine``."""
        if len(self._answers) >= _MOST:
            self._answers.clear()
        self._answers[mine] = rows


class _Letter:
    """What this rank tells the others, and what all have told: one serves for many questions."""

    def __init__(self, ranks: int) -> None:
        self.under_way = False  # whether others may still write to it
        self.told, self.everyone = bytearray(_BYTES), bytearray(ranks * _BYTES)
        self.sent = torch.frombuffer(self.told, dtype=torch.uint8)
        self.received = torch.frombuffer(self.everyone, dtype=torch.uint8)
        self._room = self.sent.data_ptr() + _HEAD.size
        self._rooms = [self.received.data_ptr() + start + _HEAD.size for start in range(0, len(self.everyone), _BYTES)]

    def add(self, tensor: Tensor) -> None:
        ctypes.memmove(self._room, tensor.data_ptr(), tensor.nbytes)

    def take(self, rows: Tensor, nbytes: int) -> None:
        """What each rank has added."""
        start = rows.data_ptr()
        for rank, room in enumerate(self._rooms):
            ctypes.memmove(start + rank * nbytes, room, nbytes)


class Asked:
    """A question to all ranks. ``expected`` is what the same one was answered last time, None the first time."""

    def __init__(
        self,
        parts: Parts,
        tensors: Sequence[Tensor],
        mine: tuple[int, int],
        alike: Sequence[str],
        expected: Rows | None,
        letter: _Letter,
    ) -> None:
        self.expected, self._letter = expected, letter
        self._parts, self._tensors, self._mine, self._alike = parts, tensors, mine, alike
        self._wait: Callable[[], object] | None = None
        self._answer: Rows | None = None
        self._told: list[tuple[int, ...]] = []
        self._added = 0

    def begin(self, added: Tensor | None = None, *, waits: bool = False) -> None:
        """Ask, with what is to be gathered from all ranks, where it is small. ``waits``: for the answer, at once."""
        letter, lockstep = self._letter, self._parts.lockstep
        letter.under_way = True
        if added is not None and added.is_cpu and added.nbytes <= _BYTES - _HEAD.size and is_plain(added):
            self._added = added.nbytes
            letter.add(added)
        expected = 0 if self.expected is None else _number("", self.expected.all_ranks)
        alike = _number("", tuple(self._alike)) if self._alike else 0
        _HEAD.pack_into(letter.told, 0, *self._mine, alike, expected, self._added, lockstep.number)
        group = control_group()
        begun = at_once(group, "gather_at_once", letter.received, letter.sent) if waits else False
        if begun is False:
            self._wait = lockstep.begin(all_gather_single, letter.received, letter.sent, group=group)
        else:
            self._wait = partial(lockstep.finish, None if begun is True else begun)

    @property
    def under_way(self) -> bool:
        """Whether this rank has asked, and the answers have not come."""
        return self._wait is not None and not self._told

    def rows(self, added: Tensor | None = None) -> Rows:
        """Which rows each rank has.

        Raises:
            UsageError: on every rank, where parts differ in more than their number of rows, or what is beside rows.
            WorldError: as `Lockstep.run`; or where others answer for an earlier call, in which this rank failed.
        """
        if self._answer is None:
            if self._wait is None:
                self.begin(added, waits=True)
            self._answer = self._awaited()
        return self._answer

    def confirm(self, come: Callable[[], object], added: Tensor | None, into: Tensor | None) -> bool:
        """Wait, and ``come`` to the others if their answer is the expected one.

        Args:
            into: where what all ranks have ``added`` is to go, as rows.

        Returns: whether it is there, since all have added theirs to this question.

        Raises:
            NotAsExpected: where it is not, or there is an error.
        """
        pulse = self._parts.pulse
        try:
            if pulse.follows:
                rows = self.rows(added)
            else:
                with pulse.again(b"all_gather"):
                    rows = self.rows(added)
            if rows == self.expected:
                come()
                return into is not None and self._gathered(into)
        except ShardwrightError as error:
            raise NotAsExpected(error) from None
        raise NotAsExpected

    def _gathered(self, into: Tensor) -> bool:
        """Not where some rank expected another step or none, or had begun to ask before, which added nothing here."""
        if not self._added or any(theirs[2:] != self._told[0][2:] for theirs in self._told):
            return False
        self._letter.take(into, self._added)
        return True

    def _awaited(self) -> Rows:
        assert self._wait is not None
        self._wait()
        self._letter.under_way = False
        everyone = self._letter.everyone
        self._told = [_HEAD.unpack_from(everyone, at) for at in range(0, len(everyone), _BYTES)]
        counts, numbers, alike, *_, calls = zip(*self._told, strict=True)
        if len(set(calls)) != 1:
            raise WorldError(
                f"ranks answer for different calls of the model ({', '.join(map(str, calls))}, rank by rank), since an "
                "earlier one failed on some of them while others waited; let such an error end the job"
            )
        if len(set(numbers)) == 1:
            if len(set(alike)) > 1:
                self._refuse_unlike()
            rows = _agreed(counts, dist.get_rank())
            self._parts.remember(self._mine, rows)
            return rows
        passed = from_all_ranks(shown(self._tensors))
        other = next(rank for rank, theirs in enumerate(numbers) if theirs != numbers[0])
        raise UsageError(
            f"the parts of the batch do not fit together: rank 0 passed {passed[0]}, rank {other} passed "
            f"{passed[other]}; parts may differ in their number of rows alone: pad all to one length, and have the "
            "same values beside tensors, and model.train() or eval(), on all ranks"
        )

    def _refuse_unlike(self) -> None:
        passed = from_all_ranks(", ".join(self._alike) or "none")
        other = next(rank for rank, theirs in enumerate(passed) if theirs != passed[0])
        raise UsageError(
            "with batch='local' ranks pass rows of their own in tensors whose dim 0 is as long as the first one's, and "
            f"all others alike, but rank 0 passed {passed[0]} and rank {other} passed {passed[other]}; let dim 0 count "
            "the samples in what is cut, or pass the whole batch on all ranks with batch='global'"
        )


@lru_cache(maxsize=_MOST)
def _number(key: str, shapes: object) -> int:
    """A number of 7 bytes.

    Cached by all that it hashes: ``shapes`` has words, or plain tuples of whole numbers, so that equal ones are written
    alike.
    """
    return int.from_bytes(hashlib.sha256(f"{key} {shapes}".encode()).digest()[:7])


def _any_rows(height: int) -> Rows:
    """The rows of a rank that does not know how many there are in all."""
    return Rows((0, height), -1, None)


@lru_cache(maxsize=_MOST)
def _agreed(counts: tuple[int, ...], rank: int) -> Rows:
    """The rows of this rank, where all have said how many they have.

    Cached by all that it follows from, the counts and this rank, which another world may have given another number.
    """
    return replace(in_turn(counts), agreed=True)
