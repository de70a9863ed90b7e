"""The benchmarked collectives: their calls, the contents of their buffers, and their bandwidth formulas.

Each is torch.distributed's own on the default process group, whichever backend that has. torch's all-reduce and
broadcast work in place: out of place they are that after a copy. An all-to-all and a send and receive are in place
after their buffer was copied aside. The copies are part of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.cluster.bench.data import count_wrong, fill, pattern, reduced
from shardwright.compiler.mesh.processes import all_gather_single, reduce_scatter_single

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row: an operation on so many elements per rank (``count``) of a dtype, among so many ranks."""

    count: int
    dtype: torch.dtype
    device: torch.device
    rank: int
    ranks: int
    reduction: str = "sum"
    root: int = 0

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.ranks

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.ranks

    def mine(self, rank: int | None = None) -> Tensor:
        return pattern(self.rank if rank is None else rank, self.ranks, self.reduction, self.dtype)

    def reduced(self) -> Tensor:
        return reduced(self.ranks, self.reduction, self.dtype)


@dataclass(frozen=True)
class Buffers:
    """The buffers that a rank sends and receives; in place the two share memory."""

    sent: Tensor
    received: Tensor

    @property
    def in_place(self) -> bool:
        return self.sent.untyped_storage().data_ptr() == self.received.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Operation:
    """A collective.

    Args:
        program: nccl-tests' name for it.
        factor: bus bandwidth over algorithm bandwidth, from the number of ranks.
        fill, call, wrong: set the buffers, run once, count the wrong elements of this rank.
        shown_reduction: what the column redop shows; None for the reduction.
        rooted: whether the column root shows the root.
        sends_all, receives_all: whether a buffer has a part for each rank, which is then a multiple of 16 bytes, as in
            nccl-tests.
    """

    program: str
    factor: Callable[[int], float]
    fill: Callable[[Case, Buffers], None]
    call: Callable[[Case, Buffers], object]
    wrong: Callable[[Case, Buffers], int]
    shown_reduction: str | None = "none"
    rooted: bool = False
    sends_all: bool = False
    receives_all: bool = False

    @property
    def _splits(self) -> bool:
        return self.sends_all or self.receives_all

    def count(self, size_bytes: int, itemsize: int, ranks: int) -> int:
        """Return the elements of the row's column ``count``: those that each rank sends or receives."""
        elements = size_bytes // itemsize
        if not self._splits:
            return elements
        step = 16 // itemsize
        return elements // ranks // step * step

    def bytes(self, count: int, itemsize: int, ranks: int) -> int:
        """Return the bytes of the row's column ``size``: the larger of the two buffers."""
        return count * itemsize * (ranks if self._splits else 1)

    def buffers(self, case: Case, in_place: bool) -> Buffers:
        """Return fresh buffers for a case. In place, the smaller is this rank's part of the larger."""
        every = case.count * case.ranks
        sends, receives = (every if of_all else case.count for of_all in (self.sends_all, self.receives_all))
        whole = torch.zeros(max(sends, receives), dtype=case.dtype, device=case.device)
        if not in_place:
            other = torch.zeros(min(sends, receives), dtype=case.dtype, device=case.device)
            return Buffers(whole, other) if sends >= receives else Buffers(other, whole)
        part = whole.narrow(0, case.rank * case.count, case.count) if sends != receives else whole
        return Buffers(whole, part) if sends >= receives else Buffers(part, whole)


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _fill_whole(case: Case, buffers: Buffers) -> None:
    fill(buffers.sent, case.mine())


def _fill_parts(case: Case, buffers: Buffers) -> None:
    for part, piece in enumerate(buffers.sent.view(case.ranks, case.count)):
        fill(piece, case.mine(), part)


def _wrong_by_rank(case: Case, buffers: Buffers, part: int) -> int:
    """Return the wrong elements where part r of what arrived came from rank r, which sent its part ``part``."""
    pieces = enumerate(buffers.received.view(case.ranks, case.count))
    return sum(count_wrong(piece, case.mine(rank), part) for rank, piece in pieces)


def _aside(buffers: Buffers) -> Tensor:
    return buffers.sent.clone() if buffers.in_place else buffers.sent


def _call_all_reduce(case: Case, buffers: Buffers) -> None:
    if not buffers.in_place:
        buffers.received.copy_(buffers.sent)
    dist.all_reduce(buffers.received, _REDUCTIONS[case.reduction])


def _call_broadcast(case: Case, buffers: Buffers) -> None:
    if not buffers.in_place and case.rank == case.root:
        buffers.received.copy_(buffers.sent)
    dist.broadcast(buffers.received, case.root)


def _call_sendrecv(case: Case, buffers: Buffers) -> None:
    if case.ranks == 1:
        buffers.received.copy_(_aside(buffers))
        return
    send = dist.P2POp(dist.isend, _aside(buffers), case.right)
    receive = dist.P2POp(dist.irecv, buffers.received, case.left)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        "all_reduce_perf", lambda n: 2 * _ring(n), _fill_whole, _call_all_reduce,
        lambda case, b: count_wrong(b.received, case.reduced()), shown_reduction=None,
    ),
    "all_gather": Operation(
        "all_gather_perf", _ring, _fill_whole, lambda case, b: all_gather_single(b.received, b.sent),
        lambda case, b: _wrong_by_rank(case, b, 0), receives_all=True,
    ),
    "reduce_scatter": Operation(
        "reduce_scatter_perf", _ring, _fill_parts,
        lambda case, b: reduce_scatter_single(b.received, b.sent, _REDUCTIONS[case.reduction]),
        lambda case, b: count_wrong(b.received, case.reduced(), case.rank), shown_reduction=None, sends_all=True,
    ),
    "all_to_all": Operation(
        "alltoall_perf", _ring, _fill_parts, lambda case, b: dist.all_to_all_single(b.received, _aside(b)),
        lambda case, b: _wrong_by_rank(case, b, case.rank), sends_all=True, receives_all=True,
    ),
    "broadcast": Operation(
        "broadcast_perf", lambda n: 1.0, _fill_whole, _call_broadcast,
        lambda case, b: count_wrong(b.received, case.mine(case.root)), rooted=True,
    ),
    "sendrecv": Operation(
        "sendrecv_perf", lambda n: 1.0, _fill_whole, _call_sendrecv,
        lambda case, b: count_wrong(b.received, case.mine(case.left)), shown_reduction=None,
    ),
}  # fmt: skip
