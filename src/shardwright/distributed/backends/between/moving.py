"""Messages between ranks of several hosts, over gloo, and the reason why a rank has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.errors import WorldError

_GIVEN_UP = "given up"
_TELL_S = 1.0  # within which who knows why a connection has ended tells of it
_PAUSE_S = 0.02
_AT_ONCE = timedelta(milliseconds=1)


class Awaited(Protocol):
    """Something of others that is under way."""

    def wait(self, timeout_s: float) -> bool:
        """Return whether it is there; waits for at most so long, and may be asked again."""


class Word:
    """The reason why a group can do nothing more, in the store that all its ranks reach."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def tell(self, reason: str) -> str:
        """Return what was told first, by this rank or another one."""
        with suppress(RuntimeError):  # the store has gone with the rank that served it
            self._store.compare_set(_GIVEN_UP, "", reason)
        return self.told() or reason

    def told(self) -> str:
        """Return the reason, empty as long as nobody has told one, or where nobody can be asked."""
        with suppress(RuntimeError):
            if self._store.check([_GIVEN_UP]):
                return str(self._store.get(_GIVEN_UP).decode())
        return ""

    def told_soon(self) -> str:
        """Return the reason, waiting for it a little."""
        end_s = time.monotonic() + _TELL_S
        while not (reason := self.told()) and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
        return reason


class Moves:
    """Moves bytes between ranks, ``names`` as their users number them, by a group of gloo that serves nothing else."""

    def __init__(self, gloo: dist.ProcessGroupGloo, names: Sequence[int], word: Word) -> None:
        self._gloo: Any = gloo  # whose methods are in no list of torch's
        self.names, self._word = tuple(names), word
        self.rank, self.size = gloo.rank(), gloo.size()

    @property
    def others(self) -> str:
        """In words."""
        named = [str(name) for rank, name in enumerate(self.names) if rank != self.rank]
        return f"rank {named[0]}" if len(named) == 1 else f"one of the ranks {', '.join(named)}"

    def broadcast(self, tensor: Tensor, root: int) -> list[Moving]:
        """A flat tensor of the root into those of the others; nothing is under way where there is nothing in it."""
        return [self._begun(self._gloo.broadcast(_bytes(tensor), root))] if tensor.numel() else []

    def to_all(self, rows: Sequence[Tensor]) -> list[Moving]:
        """The row of each rank into those of the others, which have as much room there.

        Broadcasts of one row after the other would use the network in one direction at a time. Among more than two the
        price is memory for as much again.
        """
        if not any(map(len, rows)):
            return []
        others = [row for rank, row in enumerate(rows) if rank != self.rank]
        awaited = [len(row) * (rank != self.rank) for rank, row in enumerate(rows)]
        sent = [len(rows[self.rank]) * (rank != self.rank) for rank in range(self.size)]
        if len(others) == 1:
            return [self.exchange(others[0], rows[self.rank], awaited, sent)]
        into, out = others[0].new_empty(sum(awaited)), torch.cat([rows[self.rank]] * len(others))

        def spread() -> None:
            for row, part in zip(others, torch.split(into, [len(row) for row in others]), strict=True):
                row.copy_(part)

        return [self.exchange(into, out, awaited, sent, spread)]

    def gather(self, rows: Tensor, row: Tensor) -> Moving:
        """A small row of each rank, as many bytes from all."""
        return self._begun(self._gloo.allgather(list(_bytes(rows).view(self.size, -1)), _bytes(row)))

    def exchange(
        self,
        into: Tensor,
        out: Tensor,
        awaited: Sequence[int],
        sent: Sequence[int],
        finish: Callable[[], None] = lambda: None,
    ) -> Moving:
        """Parts of flat tensors, of so many elements for each rank and from each; then ``finish`` is called."""
        sizes = [[length * into.element_size() for length in lengths] for lengths in (awaited, sent)]
        return self._begun(self._gloo.alltoall_base(_bytes(into), _bytes(out), *sizes), finish)

    def _begun(self, work: dist.Work, finish: Callable[[], None] = lambda: None) -> Moving:
        return Moving(work, self, finish)

    def lost(self, error: RuntimeError) -> WorldError:
        """Return what to raise where gloo has raised ``error``."""
        said = f"lost the connection to {self.others}, and knows no reason; see its log: {error}"
        return WorldError(self._word.told_soon() or f"rank {self.names[self.rank]} has {said}")

    def break_off(self) -> None:
        """Let what is under way end with errors, here and on the other ranks.

        gloo has no call for that, but it gives up all connections when it has waited in vain for a message.
        """
        with suppress(RuntimeError):
            self._gloo.recv([torch.empty(1, device="cpu")], (self.rank + 1) % self.size, 0).wait(_AT_ONCE)


class Moving:
    """The kind of number that gloo moves."""

    def __init__(self, work: dist.Work, moves: Moves, finish: Callable[[], None]) -> None:
        self._work, self._moves, self._finish = work, moves, finish

    def wait(self, timeout_s: float) -> bool:
        """Raises `WorldError` where it cannot end."""
        if timeout_s > 0 and not self._work.is_completed():
            with suppress(RuntimeError):  # the time is over, or it has failed, which is raised again below
                self._work.wait(max(_AT_ONCE, timedelta(seconds=timeout_s)))
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._moves.lost(error) from error
        self._finish()
        return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
