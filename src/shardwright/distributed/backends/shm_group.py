"""The process groups of the shm backend: collectives in memory that ranks share, and messages by gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.torch_private import add_gloo_inside
from shardwright.distributed.backends import table
from shardwright.distributed.backends.group import CpuGroup, Steps, Task
from shardwright.distributed.backends.segment.collectives import Collectives
from shardwright.distributed.backends.segment.memory import Memory, Process
from shardwright.distributed.backends.segment.native import Group, Native, Rendezvous
from shardwright.distributed.backends.segment.reducing import DONE, NativeCollectives, RepeatedCollective
from shardwright.distributed.backends.segment.reduction import Reduction
from shardwright.distributed.backends.shm_work import CollectiveQueue, ShmWork, SteppedCollective

_Options = dist.AllreduceOptions
_SOON_NS = 5_000_000  # within which the ranks of a host mostly come to a collective
_MOST_SUMS = 16  # that are remembered: batches may have ever new sizes
_SUM: Any = dist.ReduceOp.SUM  # with which torch compares operations, and does not say so


@dataclass(frozen=True)
class Members:
    """Ranks of one host, ``names`` in the world, and what they have found that they share.

    ``library`` is native code. ``crowded``: there are more ranks than cores.
    """

    names: Sequence[int]
    processes: Sequence[Process]
    memory: Memory
    library: Native
    crowded: bool


class ShmGroup(CpuGroup):
    """The group of some ranks of one host, whose collectives run in a queue, and whose messages go by gloo."""

    def __init__(self, members: Members, gloo: dist.ProcessGroupGloo, timeout: timedelta) -> None:
        group = Group.of(members.memory, members.crowded)
        rendezvous = Rendezvous(members.library, group)
        collectives = Collectives(members.memory, rendezvous, members.names, table.SHM.name)
        super().__init__(table.SHM, collectives)
        self.queue = CollectiveQueue(collectives, members.processes, timeout.total_seconds())
        self._native = NativeCollectives(collectives, members.library, group)
        # Cached by all that a sum is made of beside this group; others are made in their place where there are many.
        self._sums: dict[tuple[type, torch.device, torch.dtype, int], RepeatedCollective] = {}
        self._gloo: Any = gloo  # whose methods are in no list of torch's
        add_gloo_inside(self, gloo)
        self._closed = False

    def shutdown(self) -> None:
        """Close the group after its pending collectives; ranks that wait for this one are told that it has left.

        A forked child that ends leaves alone what its parent goes on with.
        """
        if not self._closed and not self.queue.forked:
            self._closed = True
            self.queue.close()

    def begin(self, what: str, outputs: Sequence[Tensor], task: Task, asynchronous: bool) -> ShmWork:
        collective = SteppedCollective(task, self.queue.collectives)
        return self.queue.begin(what, outputs, collective, sum(tensor.nbytes for tensor in outputs), asynchronous)

    def allreduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> dist.Work | None:
        """Reduce as torch asks for it; None where it has ended.

        A sum for which the caller waits is begun by native code and little else, which mostly ends it: others come
        soon, and a small one takes less than what Python goes through for a collective.
        """
        if not isinstance(opts, _Options) or len(tensors) != 1:
            return super().allreduce(tensors, opts, op, timeout)
        [tensor], queue, collectives = tensors, self.queue, self._native.collectives
        rendezvous = collectives.rendezvous
        waited = not opts.asyncOp and opts.reduceOp == _SUM
        known = self._sums.get((type(tensor), tensor.device, tensor.dtype, tensor.numel())) if waited else None
        free = known is not None and not queue.pending and queue.failed is None and os.getpid() == queue.pid
        plain = free and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        if known is None or not plain or not queue.running.acquire(blocking=False):
            return self._allreduce(tensor, opts, waited)
        try:
            at = tensor.data_ptr()
            collectives.number += 1
            known.answer = known.begin(collectives.number & 0xFFFFFFFF, at, at, rendezvous.stage, _SOON_NS)
            rendezvous.stage = known.call.stage
            if known.answer == DONE:
                return None
            work = ShmWork("all_reduce", tensors, known, queue)
            queue.pending.append(work)
            return work
        finally:
            queue.running.release()

    def _allreduce(self, tensor: Tensor, opts: Any, waited: bool) -> dist.Work:
        """Reduce one tensor, as any collective; such a sum is known from then on, if it is ``waited`` for."""
        self.queue.check_process()
        self.check_memory("all_reduce", tensor)
        if waited:
            if len(self._sums) == _MOST_SUMS:
                self._sums.clear()
            if (known := self._native.repeated(tensor)) is not None:
                self._sums[type(tensor), tensor.device, tensor.dtype, tensor.numel()] = known
        collective = self._native.all_reduce(tensor, opts.reduceOp)
        if collective is None:
            return super().allreduce([tensor], opts)
        return self.queue.begin("all_reduce", [tensor], collective, tensor.nbytes, opts.asyncOp)

    def summed(self, tensor: Tensor, reduction: Reduction) -> Steps:
        """As `allreduce` sums it, which another rank may call for the same tensor."""
        operation = dist.ReduceOp(dist.ReduceOp.RedOpType.__members__[reduction.name])
        collective = self._native.all_reduce(tensor, operation)
        return super().summed(tensor, reduction) if collective is None else [collective]

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        if opts is not None:
            what = "all_gather_into_tensor"
            self.check_whole(what, "output", output, "input", tensor)
            collective = self._native.all_gather(output, tensor)
            if collective is not None:
                return self.queue.begin(what, [output], collective, output.nbytes, opts.asyncOp)
        return super().all_gather_single(output, tensor, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        if opts is not None:
            what = "reduce_scatter_tensor"
            self.check_whole(what, "input", tensor, "output", output)
            collective = self._native.reduce_scatter(output, tensor, opts.reduceOp)
            if collective is not None:
                return self.queue.begin(what, [output], collective, output.nbytes, opts.asyncOp)
        return super().reduce_scatter_single(output, tensor, opts)

    # --- messages

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        self.queue.check_process()
        self.check_memory("send", tensor)
        work: dist.Work = self._gloo.send([tensor.detach().contiguous()], peer, tag)
        return work

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        return self._receive(tensors, lambda whole: self._gloo.recv([whole], peer, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        return self._receive(tensors, lambda whole: self._gloo.recv_anysource([whole], tag))

    def _receive(self, tensors: Sequence[Tensor], begin: Callable[[Tensor], dist.Work]) -> dist.Work:
        (tensor,) = tensors
        self.queue.check_process()
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
