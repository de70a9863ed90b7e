"""Collectives on CPU tensors by MPI, in the tensors' own memory: contiguous tensors are not copied, but lists of them.

Everything here is blocking: what is to be stepped through has ended already. Tensors are moved by the size of their
elements, so that every dtype travels; they are reduced as what they are. MPI knows no bfloat16 and no float16: those
are summed in float32, block by block, and rounded once at the end, so that the result is the nearest number to a sum in
float32, on every rank the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from shardwright.distributed.backends import table
from shardwright.distributed.backends.group import Steps
from shardwright.distributed.backends.segment.flats import flat_of, flats_of
from shardwright.distributed.backends.segment.reduction import Reduction as KnownReduction

LARGEST_COUNT = 2**31 - 1  # MPI counts in C ints
# Reductions go block by block. MPI holds a copy of what it reduces; one of 4 MiB stays in the cache and in the heap,
# while one of 64 MiB is taken from the kernel anew at each call, and takes twice as long as blocks do.
_BLOCK_BYTES = 4 << 20
_WIDENED = (torch.float16, torch.bfloat16)

_MOVED = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T, 16: MPI.C_DOUBLE_COMPLEX}
_DATATYPES = {
    torch.int8: MPI.INT8_T, torch.int16: MPI.INT16_T, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T, torch.uint16: MPI.UINT16_T, torch.uint32: MPI.UINT32_T, torch.uint64: MPI.UINT64_T,
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, **dict.fromkeys(_WIDENED, MPI.FLOAT), torch.bool: MPI.C_BOOL,
    torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX,
}  # fmt: skip
_OPERATIONS = {
    "SUM": MPI.SUM, "AVG": MPI.SUM, "PRODUCT": MPI.PROD, "MAX": MPI.MAX, "MIN": MPI.MIN, "BAND": MPI.BAND,
    "BOR": MPI.BOR, "BXOR": MPI.BXOR,
}  # fmt: skip
# Of two booleans the sum and the larger are "or", the product and the smaller are "and", as for NCCL.
_OF_BOOLEANS = {
    "SUM": MPI.LOR, "MAX": MPI.LOR, "BOR": MPI.LOR, "BXOR": MPI.LXOR, "PRODUCT": MPI.LAND, "MIN": MPI.LAND,
    "BAND": MPI.LAND,
}  # fmt: skip


@dataclass(frozen=True)
class Reduction:
    """A reduction in MPI's words; ``averages``: the mean over ``size`` ranks; ``widened``: computed in float32."""

    datatype: MPI.Datatype
    op: MPI.Op
    size: int
    averages: bool
    widened: bool

    @classmethod
    def of(cls, reduce_op: Any, dtype: torch.dtype, size: int) -> Reduction:
        """Raises `UsageError` for a pair of operation and dtype that has no meaning."""
        name = KnownReduction.of(table.MPI.name, reduce_op, dtype, size).name
        ops = _OF_BOOLEANS if dtype == torch.bool else _OPERATIONS
        return cls(_DATATYPES[dtype], ops[name], size, name == "AVG", dtype in _WIDENED)

    def block(self) -> int:
        """Elements of `_BLOCK_BYTES`."""
        return _BLOCK_BYTES // self.datatype.Get_size()

    def wide(self, block: Tensor) -> Tensor:
        """Return a block as it is reduced: in float32 if `widened`, else the block itself."""
        return block.float() if self.widened else block

    def finished(self, summed: Tensor) -> Tensor:
        """Return what all ranks have summed, as it is asked for."""
        return summed.div_(self.size) if self.averages else summed


class Transfer:
    """The collectives of one communicator. ``largest_count`` is the most elements that one call of MPI may count."""

    def __init__(self, comm: MPI.Comm, largest_count: int = LARGEST_COUNT) -> None:
        self.comm, self.largest_count = comm, largest_count
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def reduction(self, reduce_op: Any, tensor: Tensor) -> Reduction:
        return Reduction.of(reduce_op, tensor.dtype, self.size)

    def barrier(self) -> Steps:
        self.comm.Barrier()
        return ()

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps:
        flat, finish = flat_of(tensor)
        for block in _cut(flat, min(self.largest_count, reduction.block())):
            wide = reduction.wide(block)
            self.comm.Allreduce(MPI.IN_PLACE, _numbers(wide, reduction), reduction.op)
            block.copy_(reduction.finished(wide))
        finish()
        return ()

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction) -> Steps:
        flat, finish = flat_of(tensor)
        for block in _cut(flat, min(self.largest_count, reduction.block())):
            wide = reduction.wide(block)
            buffer = _numbers(wide, reduction)
            if self.rank != root:
                self.comm.Reduce(buffer, None, reduction.op, root)
                continue
            self.comm.Reduce(MPI.IN_PLACE, buffer, reduction.op, root)
            block.copy_(reduction.finished(wide))
        if self.rank == root:
            finish()
        return ()

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        flat, finish = flat_of(tensor)
        for block in _cut(flat, self.largest_count):
            self.comm.Bcast(_elements(block), root)
        if self.rank != root:
            finish()
        return ()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Steps:
        flat, finish = flat_of(output)
        part, _ = flat_of(tensor)
        rows = flat.view(self.size, part.numel())
        if flat.numel() <= self.largest_count:
            self.comm.Allgather(_elements(part), _elements(rows))
        else:
            for columns in self._columns(part.numel()):
                gathered = rows.new_empty(self.size, columns.stop - columns.start)
                self.comm.Allgather(_elements(part[columns]), _elements(gathered))
                rows[:, columns] = gathered
        finish()
        return ()

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
        if len({output.numel() for output in outputs}) > 1:
            for root, output in enumerate(outputs):
                if root == self.rank:
                    output.copy_(tensor)
                self.broadcast(output, root)
            return ()
        gathered = tensor.new_empty(self.size, tensor.numel())
        self.all_gather(gathered, tensor)
        for output, row in zip(outputs, gathered, strict=True):
            output.copy_(row.view_as(output))
        return ()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Steps:
        part, finish = flat_of(output)
        flat, _ = flat_of(tensor)
        rows = flat.view(self.size, part.numel())
        whole = flat.numel() <= self.largest_count and not reduction.widened
        for columns in [slice(None)] if whole else self._columns(part.numel(), reduction.block()):
            mine = reduction.wide(part[columns])
            wide = rows[:, columns].to(mine.dtype).contiguous()
            self.comm.Reduce_scatter_block(_numbers(wide, reduction), _numbers(mine, reduction), reduction.op)
            part[columns].copy_(reduction.finished(mine))
        finish()
        return ()

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], reduction: Reduction) -> Steps:
        if len({tensor.numel() for tensor in tensors}) == 1:
            return self.reduce_scatter(output, torch.cat(flats_of(tensors)[0]), reduction)
        for root, tensor in enumerate(tensors):
            reduced = tensor.clone(memory_format=torch.contiguous_format)
            self.reduce(reduced, root, reduction)
            if root == self.rank:
                output.copy_(reduced.view_as(output))
        return ()

    def exchange(self, kind: str, outputs: Mapping[int, Tensor], inputs: Mapping[int, Tensor], root: int = 0) -> Steps:
        """Every rank decides for itself what it sends: all must send one message for each that is awaited."""
        into, finish = flats_of(list(outputs.values()))
        received = dict(zip(outputs, into, strict=True))
        sent = dict(zip(inputs, flats_of(list(inputs.values()))[0], strict=True))
        if self.rank in received:
            received.pop(self.rank).copy_(sent.pop(self.rank))
        requests = [r for peer, tensor in received.items() for r in self.receive(tensor, peer, 0)]
        requests += [r for peer, tensor in sent.items() for r in self.send(tensor, peer, 0)]
        MPI.Request.Waitall(requests)
        finish()
        return ()

    def send(self, tensor: Tensor, peer: int, tag: int) -> list[MPI.Request]:
        """Of a contiguous tensor, which must live until the requests are done."""
        return [self.comm.Isend(_elements(block), peer, tag) for block in self._messages(tensor)]

    def receive(self, tensor: Tensor, peer: int, tag: int) -> list[MPI.Request]:
        """Into a contiguous tensor."""
        return [self.comm.Irecv(_elements(block), peer, tag) for block in self._messages(tensor)]

    def _messages(self, tensor: Tensor) -> Iterator[Tensor]:
        """An empty tensor is a message, too: somebody waits for it."""
        return iter(_cut(tensor.view(-1), self.largest_count) or (tensor,))

    def _columns(self, columns: int, most: int | None = None) -> Iterator[slice]:
        width = max(1, min(self.largest_count // self.size, most or columns))
        return (slice(start, min(start + width, columns)) for start in range(0, columns, width))


def _cut(flat: Tensor, most: int) -> tuple[Tensor, ...]:
    """In parts of at most ``most`` elements, none of them empty."""
    return tuple(flat[start : start + most] for start in range(0, flat.numel(), most))


def _numbers(tensor: Tensor, reduction: Reduction) -> list[Any]:
    return [_memory(tensor), reduction.datatype]


def _elements(tensor: Tensor) -> list[Any]:
    return [_memory(tensor), _MOVED[tensor.element_size()]]


def _memory(tensor: Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
