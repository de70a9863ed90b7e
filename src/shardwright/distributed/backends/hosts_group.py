"""The process group of the shm backend among ranks of several hosts: see `between.collectives`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.distributed.backends.between.collectives import Between
from shardwright.distributed.backends.between.grid import Grid
from shardwright.distributed.backends.between.moving import Moves, Word
from shardwright.distributed.backends.segment.memory import Process
from shardwright.distributed.backends.shm_group import LaneGroup, Members
from shardwright.distributed.backends.shm_work import Lane, ShmWork
from shardwright.errors import WorldError

_GRACE_S = 2.0  # who waits for a rank of its own host says more about it, and may have begun to wait a little later
_GLOO_S = timedelta(seconds=60)  # more than a lane waits, so that it is the one to say who is missing


class HostsLane(Lane):
    """The collectives of ranks on several hosts: what ends one ends the group, since not all ranks may know of it."""

    at_once_bytes = -1  # who has begun one has to go on with it when other hosts answer, while it does other things

    def __init__(self, between: Between, word: Word, processes: Sequence[Process], timeout_s: float) -> None:
        super().__init__(between.inside, processes, timeout_s)
        self._between, self._word = between, word

    def _look(self, work: ShmWork) -> None:
        if reason := self._word.told():
            raise WorldError(reason)
        super()._look(work)
        waited_s = time.monotonic() - work.since_s
        if waited_s > self.timeout_s + _GRACE_S and not self._missing():
            raise WorldError(
                f"rank {self.name} has waited {waited_s:.0f} s in {work.what} for {self._between.column.others} on "
                f"another host, longer than the {self.timeout_s:g} s of sw.init(timeout=...); see its log"
            )

    def limit_s(self) -> float:
        """Those who have come to this collective, too, may wait for another host: who waits for that says more."""
        return self.timeout_s + (2 * _GRACE_S if self._between.met else 0)

    def _refused(self, error: WorldError) -> WorldError:
        if self.failed is None:
            self._give_up(error)
        return self.failed or error

    def _give_up(self, error: WorldError) -> None:
        """All raise what was told first."""
        super()._give_up(WorldError(self._word.tell(str(error))))
        for moves in (self._between.column, self._between.everyone):
            moves.break_off()


class HostsGroup(LaneGroup):
    """The group of some ranks, ``names`` in the world, of whom ``members`` are on the host of this one."""

    def __init__(
        self, members: Members, grid: Grid, rank: int, names: Sequence[int], store: Store, timeout: timedelta
    ) -> None:
        row, index = grid.at(rank)
        column, word = grid.column(index), Word(store)
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, len(names), timeout)
        along = dist.ProcessGroupGloo(PrefixStore(f"column {index}", store), row, len(column), timeout + _GLOO_S)
        between = Between(
            members.collectives(), Moves(along, [names[r] for r in column], word),
            Moves(gloo, names, word), grid, rank, names,
        )  # fmt: skip
        super().__init__(between, HostsLane(between, word, members.processes, timeout.total_seconds()), gloo)
