"""The process groups of the shm backend: collectives in memory that ranks share, and messages by gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.common.torch_private import add_gloo_inside
from shardwright.distributed.backends import table
from shardwright.distributed.backends.group import CpuGroup
from shardwright.distributed.backends.segment.arena import Arenas
from shardwright.distributed.backends.segment.collectives import Collectives
from shardwright.distributed.backends.segment.direct import Direct
from shardwright.distributed.backends.segment.flats import is_plain
from shardwright.distributed.backends.segment.memory import SMALL_BYTES, Memory, Process
from shardwright.distributed.backends.segment.native import Group, Native, reduces
from shardwright.distributed.backends.segment.reducing import NativeCollective, NativeCollectives
from shardwright.distributed.backends.segment.reduction import Reduction
from shardwright.distributed.backends.segment.waiting import ByNative, BySemaphores
from shardwright.distributed.backends.shm_work import ByStep, Lane, ShmWork
from shardwright.distributed.backends.work import Collectives as AnyCollectives
from shardwright.distributed.backends.work import EndedWork, Steps, Task
from shardwright.errors import UsageError

_Options = dist.AllreduceOptions
_SUM: Any = dist.ReduceOp.SUM  # with which torch compares operations, and does not say so


@dataclass(frozen=True)
class Members:
    """Ranks of one host, ``names`` in the world, and what they have found that they share.

    ``library`` is native code, if all have it, and ``arenas`` what each may write to. ``direct``: their processes may
    read each other's memory, too. ``crowded``: there are more ranks than cores.
    """

    names: Sequence[int]
    processes: Sequence[Process]
    memory: Memory
    library: Native | None
    arenas: Arenas | None
    direct: bool
    crowded: bool

    def native(self) -> tuple[Native, Group] | None:
        if self.library is None:
            return None
        addresses = [] if self.arenas is None else self.arenas.addresses()
        return self.library, Group.of(self.memory, addresses, self.crowded)

    def collectives(self, native: tuple[Native, Group] | None, *, rows: bool = False) -> Collectives:
        """What these ranks do together; with ``rows`` those that have native code gather and scatter by it."""
        rendezvous = BySemaphores(self.memory) if native is None else ByNative(*native)
        if self.direct:
            pids = [process.pid for process in self.processes]
            return Direct(self.memory, rendezvous, self.names, table.SHM.name, pids, rows and native is not None)
        return Collectives(self.memory, rendezvous, self.names, table.SHM.name)


class LaneGroup(CpuGroup):
    """A group whose collectives run in a lane, and whose messages go by gloo."""

    def __init__(self, collectives: AnyCollectives, lane: Lane, gloo: dist.ProcessGroupGloo) -> None:
        super().__init__(table.SHM, collectives)
        self.lane = lane
        self._gloo: Any = gloo  # whose methods are in no list of torch's
        add_gloo_inside(self, gloo)
        self._closed = False

    def shutdown(self) -> None:
        """After what has been asked for; who waits for this rank then, learns that it has left.

        A forked child that ends leaves alone what its parent goes on with.
        """
        if not self._closed and not self.lane.forked:
            self._closed = True
            self.close()

    def close(self) -> None:
        """What `shutdown` does once."""
        self.lane.close()

    def begin(self, what: str, outputs: Sequence[Tensor], task: Task, asynchronous: bool) -> ShmWork:
        course = ByStep(task, self.lane.collectives)
        return self.lane.begin(what, outputs, course, sum(tensor.nbytes for tensor in outputs), asynchronous)

    # --- messages

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        self.lane.check_process()
        self.check_memory("send", tensor)
        work: dist.Work = self._gloo.send([tensor.detach().contiguous()], peer, tag)
        return work

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        return self._receive(tensors, lambda whole: self._gloo.recv([whole], peer, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        return self._receive(tensors, lambda whole: self._gloo.recv_anysource([whole], tag))

    def _receive(self, tensors: Sequence[Tensor], begin: Callable[[Tensor], dist.Work]) -> dist.Work:
        (tensor,) = tensors
        self.lane.check_process()
        self.check_memory("recv", tensor)
        target = tensor.data
        if target.is_contiguous():
            return begin(target)
        whole = target.contiguous()
        return _Received(begin(whole), target, whole)


class ShmGroup(LaneGroup):
    """The group of some ranks of one host."""

    def __init__(self, members: Members, gloo: dist.ProcessGroupGloo, timeout: timedelta) -> None:
        native = members.native()
        collectives = members.collectives(native, rows=True)
        self._native = None if native is None else NativeCollectives(collectives, *native, members.arenas)
        self.arenas = members.arenas
        super().__init__(collectives, Lane(collectives, members.processes, timeout.total_seconds()), gloo)
        self._said = False

    def close(self) -> None:
        super().close()
        if self.arenas is not None:
            self.arenas.own.close()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor that the ranks reduce where it lies, if all of theirs were made so; a usual one if it is small,
        or where there is no more memory for that, which is said once."""
        self.lane.check_process()
        if self.arenas is None or numel * dtype.itemsize * self.size() <= SMALL_BYTES:
            return torch.empty(numel, dtype=dtype)
        made = self.arenas.own.empty(numel, dtype)
        if made is not None:
            return made
        if not self._said:
            self._said = True
            sys.stderr.write(
                f"shardwright: rank {self.lane.name} has no more memory to share, so that large all-reduces of the shm "
                "backend copy in and out of it\n"
            )
        return torch.empty(numel, dtype=dtype)

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist.Work:  # type: ignore[override]
        if self._native is not None and isinstance(opts, _Options) and len(tensors) == 1:
            (tensor,) = tensors
            self.check_memory("all_reduce", tensor)
            if not opts.asyncOp and opts.reduceOp == _SUM and (begun := self.sum_at_once(tensor)):
                return EndedWork(tensors) if begun is True else begun
            course = self._native.all_reduce(tensor, opts.reduceOp)
            if course is not None:
                return self.lane.begin("all_reduce", tensors, course, tensor.nbytes, opts.asyncOp)
        return super().allreduce(tensors, opts, op, timeout)

    def sum_at_once(self, tensor: Tensor) -> ShmWork | bool:
        """Sum a tensor in place, by native code and little else, as other ranks may have `allreduce` do.

        True where it has ended, what is to be waited for where others come later; False, and nothing is done, where
        native code does not sum such a tensor, or something else is under way.
        """
        if self._native is None or not (tensor.is_cpu and is_plain(tensor)):
            return False
        course, at = self._native.repeated(tensor.dtype, tensor.numel()), tensor.data_ptr()
        return False if course is None else self.lane.at_once("all_reduce", tensor, course, at, at)

    def gather_at_once(self, output: Tensor, tensor: Tensor) -> ShmWork | bool:
        """`all_gather_single` of a small tensor, as `sum_at_once` otherwise."""
        if self._native is None or not (tensor.is_cpu and is_plain(tensor) and is_plain(output)):
            return False
        if output.nbytes != tensor.nbytes * self.size():
            return False
        course = self._native.repeated(tensor.dtype, tensor.numel(), gathers=True)
        own, into = tensor.data_ptr(), output.data_ptr()
        return False if course is None else self.lane.at_once("all_gather_into_tensor", output, course, own, into)

    def summed(self, tensor: Tensor, reduction: Reduction) -> Steps:
        """As `allreduce` sums it, which another rank may call for the same tensor."""
        operation = dist.ReduceOp(dist.ReduceOp.RedOpType.__members__[reduction.name])
        course = None if self._native is None else self._native.all_reduce(tensor, operation)
        return super().summed(tensor, reduction) if course is None else [course]

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        if self._native is not None and opts is not None:
            what = "all_gather_into_tensor"
            self.check_whole(what, "output", output, "input", tensor)
            course = self._native.all_gather(output, tensor)
            if course is not None:
                return self.lane.begin(what, [output], course, output.nbytes, opts.asyncOp)
        return super().all_gather_single(output, tensor, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        if self._native is not None and opts is not None:
            what = "reduce_scatter_tensor"
            self.check_whole(what, "input", tensor, "output", output)
            course = self._native.reduce_scatter(output, tensor, opts.reduceOp)
            if course is not None:
                return self.lane.begin(what, [output], course, output.nbytes, opts.asyncOp)
        return super().reduce_scatter_single(output, tensor, opts)

    # --- several tensors in one collective

    def moves_together(self, dtype: torch.dtype, *, sums: bool) -> bool:
        """Whether these ranks gather several tensors of that dtype as one, or scatter ``sums`` of them, without a copy
        that has all of them."""
        return self._native is not None and (not sums or reduces(dtype, "SUM"))

    def all_gather_together(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], asynchronous: bool = False
    ) -> dist.Work:
        """``outputs[i]`` has the elements of ``inputs[i]`` from every rank, in the order of the ranks. All are of one
        dtype, of which `moves_together` is true."""
        what = "all_gather_together"
        _check_alike(what, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            self.check_whole(what, "output", output, "input", tensor)
        return self._begin_together(what, outputs, self._moving.all_gather_together(outputs, inputs), asynchronous)

    def reduce_scatter_together(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], asynchronous: bool = False
    ) -> dist.Work:
        """``inputs[i]`` has one part for every rank; the sum of this rank's goes to ``outputs[i]``. As
        `all_gather_together` otherwise."""
        what = "reduce_scatter_together"
        _check_alike(what, inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            self.check_whole(what, "input", tensor, "output", output)
        return self._begin_together(what, outputs, self._moving.reduce_scatter_together(outputs, inputs), asynchronous)

    @property
    def _moving(self) -> NativeCollectives:
        assert self._native is not None
        return self._native

    def _begin_together(
        self, what: str, outputs: Sequence[Tensor], course: NativeCollective, asynchronous: bool
    ) -> dist.Work:
        return self.lane.begin(what, outputs, course, sum(output.nbytes for output in outputs), asynchronous)


def _check_alike(what: str, tensors: Sequence[Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        named = ", ".join(sorted(map(str, dtypes))) or "none"
        raise UsageError(f"{what} got tensors of {named}; expected one or more, all of one dtype")


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
