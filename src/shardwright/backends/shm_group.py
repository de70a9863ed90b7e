"""The process group of the shm backend: collectives in memory that its ranks share, and messages by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, but not listed

from shardwright.backends import table
from shardwright.backends.group import CpuGroup
from shardwright.backends.segment.collectives import Collectives
from shardwright.backends.segment.direct import Direct
from shardwright.backends.segment.memory import Memory, Process
from shardwright.backends.segment.native import Group, Native
from shardwright.backends.segment.small import Small
from shardwright.backends.segment.waiting import ByNative, BySemaphores
from shardwright.backends.shm_work import ByStep, Lane, ShmWork
from shardwright.backends.work import Task
from shardwright.torch_private import add_gloo_inside

_Options = dist.AllreduceOptions


class ShmGroup(CpuGroup):
    """Ranks of one host, ``names`` in the world, that share ``memory``; with native code or without.

    ``direct``: their processes may read each other's memory, too.
    """

    def __init__(
        self, memory: Memory, library: Native | None, direct: bool, processes: Sequence[Process], names: Sequence[int],
        store: Store, timeout: timedelta,
    ) -> None:  # fmt: skip
        native = None if library is None else (library, Group.of(memory))
        rendezvous = BySemaphores(memory) if native is None else ByNative(*native)
        pids = [process.pid for process in processes]
        collectives = (
            Direct(memory, rendezvous, names, table.SHM.name, pids)
            if direct
            else Collectives(memory, rendezvous, names, table.SHM.name)
        )
        self._small = None if native is None else Small(collectives, *native)
        super().__init__(table.SHM, collectives)
        self.lane = Lane(collectives, processes, timeout.total_seconds())
        self.collectives: Collectives = collectives
        self._gloo: Any = add_gloo_inside(self, store, timeout)
        self._closed = False

    def shutdown(self) -> None:
        """After what has been asked for; who waits for this rank then, learns that it has left."""
        if not self._closed:
            self._closed = True
            self.lane.close()

    def begin(self, what: str, outputs: Sequence[Tensor], task: Task, asynchronous: bool) -> ShmWork:
        course = ByStep(task, self.collectives)
        return self.lane.begin(what, outputs, course, sum(tensor.nbytes for tensor in outputs), asynchronous)

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist.Work:  # type: ignore[override]
        if self._small is not None and isinstance(opts, _Options) and len(tensors) == 1:
            (tensor,) = tensors
            self.check_memory("all_reduce", tensor)
            course = self._small.of(tensor, opts.reduceOp)
            if course is not None:
                return self.lane.begin("all_reduce", tensors, course, 0, opts.asyncOp)
        return super().allreduce(tensors, opts, op, timeout)

    # --- messages

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        self.check_memory("send", tensor)
        work: dist.Work = self._gloo.send([tensor.detach().contiguous()], peer, tag)
        return work

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        return self._receive(tensors, lambda whole: self._gloo.recv([whole], peer, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        return self._receive(tensors, lambda whole: self._gloo.recv_anysource([whole], tag))

    def _receive(self, tensors: Sequence[Tensor], begin: Callable[[Tensor], dist.Work]) -> dist.Work:
        (tensor,) = tensors
        self.check_memory("recv", tensor)
        target = tensor.data
        if target.is_contiguous():
            return begin(target)
        whole = target.contiguous()
        return _Received(begin(whole), target, whole)


class _Received(dist.Work):
    """A message for a tensor whose elements do not lie in their order."""

    def __init__(self, work: dist.Work, target: Tensor, whole: Tensor) -> None:
        super().__init__()
        self._work, self._target, self._whole = work, target, whole

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait(*(() if timeout is None else (timeout,)))
        self._target.copy_(self._whole)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    source_rank = _source_rank
