"""All-reduces, all-gathers and reduce-scatters by native code: one call each, unless others are waited for."""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.distributed.backends.segment.collectives import Collectives
from shardwright.distributed.backends.segment.flats import is_plain
from shardwright.distributed.backends.segment.memory import DATA_BYTES, SMALL_BYTES
from shardwright.distributed.backends.segment.native import (
    GATHERED,
    OPERATIONS,
    TYPES,
    CollectiveCall,
    Group,
    Native,
    reduces,
)
from shardwright.distributed.backends.segment.notes import Note

_WAITING, DONE, _DIFFER = 0, 1, 2  # what native code answers
_NUMBER = struct.Struct("<I")  # with which a head begins
_OPERATIONS = {kind: kind.name for kind in dist.ReduceOp.RedOpType.__members__.values()}
_SUM = dist.ReduceOp.RedOpType.__members__["SUM"]
_MOST_KINDS = 1024  # that are remembered: batches of ever new sizes may have any number of them


class _Kind(NamedTuple):
    """The common part of calls on tensors of one dtype and size."""

    head: bytes  # behind the number, and what follows it on which all must agree
    elements: int
    type_code: int
    operation_code: int
    one_stage: bool
    scatters: bool = False


class NativeCollectives:
    """Those of one group. Ranks that call something else meanwhile meet them at their first stage."""

    def __init__(self, collectives: Collectives, native: Native, group: Group) -> None:
        self.collectives, self.native, self.group = collectives, native, group
        self.call = CollectiveCall()  # of the one that is under way: there is one at a time

    def all_reduce(self, tensor: Tensor, reduce_op: Any) -> NativeCollective | None:
        """The next one; None for what native code does not reduce."""
        kind = _reducing(tensor.dtype, tensor.numel(), reduce_op.op, self.collectives.size)
        if kind is None:
            return None
        flat = _plain_of(tensor)  # steps in Python would not meet the native code of ranks whose tensors are plain
        return NativeCollective(self, kind, flat, flat, tensor)

    def repeated(self, tensor: Tensor) -> RepeatedCollective | None:
        """Return a sum that can be repeated for tensors like this one; None for what native code does not sum."""
        kind = _reducing(tensor.dtype, tensor.numel(), _SUM, self.collectives.size) if is_plain(tensor) else None
        return None if kind is None else RepeatedCollective(self, kind)

    def all_gather(self, output: Tensor, tensor: Tensor) -> NativeCollective | None:
        """The next one; None for what does not lie as it is to be read: steps in Python meet it."""
        if not (is_plain(output) and is_plain(tensor)):
            return None
        return NativeCollective(self, _gathering(tensor.dtype, tensor.numel()), tensor, output, output)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduce_op: Any) -> NativeCollective | None:
        """The next one; None as for `all_gather`, and for what native code does not reduce."""
        if not (is_plain(output) and is_plain(tensor)):
            return None
        kind = _scattering(output.dtype, output.numel(), reduce_op.op, self.collectives.size)
        return None if kind is None else NativeCollective(self, kind, tensor, output, output)


def _plain_of(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose numbers lie in their order."""
    return (
        tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.data)
    )


@lru_cache(_MOST_KINDS)
def _reducing(dtype: torch.dtype, numel: int, operation: Any, size: int) -> _Kind | None:
    """Return what sums of such tensors have in common; None where native code does not sum them.

    Cached by all that it is made of: a dtype, whole numbers, and a kind of operation that carries no factor.
    """
    name = _OPERATIONS[operation]
    if not reduces(dtype, name):
        return None
    head = Note(0, "all_reduce", dtype, numel, name).head()[_NUMBER.size :]
    return _Kind(head, numel, TYPES[dtype], OPERATIONS[name], numel * dtype.itemsize * size <= SMALL_BYTES)


@lru_cache(_MOST_KINDS)
def _scattering(dtype: torch.dtype, numel: int, operation: Any, size: int) -> _Kind | None:
    """Return what reduce-scatters of such tensors have in common; None where native code does not sum them.

    Cached by all that it is made of, as `_reducing`.
    """
    name = _OPERATIONS[operation]
    if not reduces(dtype, name):
        return None
    note = Note(0, "reduce_scatter", dtype, 0, name).head()[_NUMBER.size :] + struct.pack(f"={size}q", *[numel] * size)
    one_stage = numel * dtype.itemsize * size <= SMALL_BYTES
    return _Kind(note, numel, TYPES[dtype], OPERATIONS[name], one_stage, scatters=True)


@lru_cache(_MOST_KINDS)
def _gathering(dtype: torch.dtype, numel: int) -> _Kind:
    """Return what gathers of such tensors have in common.

    Cached by all that it is made of, a dtype and a whole number.
    """
    operation, code = GATHERED
    nbytes = numel * dtype.itemsize
    head = Note(0, "all_gather", dtype, numel).head()[_NUMBER.size :]
    return _Kind(head, nbytes, code, operation, nbytes <= DATA_BYTES)


class NativeCollective:
    """A pending native collective: the operand of this rank, the memory for the result, and the ``output`` tensor."""

    def __init__(self, native: NativeCollectives, kind: _Kind, own: Tensor, into: Tensor, output: Tensor) -> None:
        self._all, self._kind, self._begun = native, kind, False
        self._tensors: tuple[Tensor, Tensor, Tensor] | None = (own, into, output)

    @property
    def one_stage(self) -> bool:
        """Return whether other ranks can complete it once this rank has entered it."""
        return self._kind.one_stage

    def advance(self, timeout_s: float) -> bool:
        native, call, rendezvous = self._all.native, self._all.call, self._all.collectives.rendezvous
        assert self._tensors is not None
        own, into, output = self._tensors
        if not self._begun:
            self._begin(call, rendezvous.stage, own, into)
        answer = native.collective(self._all.group, call, int(timeout_s * 1e9))
        rendezvous.stage = call.stage
        if answer == _WAITING:
            return False
        if answer == _DIFFER:
            self._all.collectives.compare(self._head)
        if into is not output:
            output.data.copy_(into)
        self._tensors = None  # what was read lives no longer than it has to
        return True

    wait = advance  # as it is awaited where it is one step of several

    def _begin(self, call: CollectiveCall, stage: int, own: Tensor, into: Tensor) -> None:
        kind, collectives = self._kind, self._all.collectives
        collectives.number += 1
        self._head = _NUMBER.pack(collectives.number % (1 << 32)) + kind.head
        call.head, call.note_bytes = self._head, len(self._head)
        call.count = kind.elements
        call.type, call.operation, call.scatters = kind.type_code, kind.operation_code, kind.scatters
        call.own, call.data = own.data_ptr(), into.data_ptr()
        call.step, call.waits, call.stage = 0, 0, stage
        self._begun = True


class RepeatedCollective:
    """One of one tensor of a dtype and a size, which is begun again and again."""

    def __init__(self, native: NativeCollectives, kind: _Kind) -> None:
        self.one_stage = kind.one_stage
        self._collectives = native.collectives
        self._go_on, self._group = native.native.collective, ctypes.byref(native.group)
        self._head = ctypes.create_string_buffer(_NUMBER.pack(0) + kind.head, _NUMBER.size + len(kind.head))
        self.call = CollectiveCall(
            head=ctypes.cast(self._head, ctypes.c_char_p), note_bytes=len(self._head), count=kind.elements,
            type=kind.type_code, operation=kind.operation_code,
        )  # fmt: skip
        self._by_reference = ctypes.byref(self.call)
        self.answer = _WAITING
        self.begin = partial(native.native.again, self._group, self._by_reference)
        """Called with its number, the addresses of what this rank gives and of the result, the stage of this rank and
        for how many nanoseconds others are waited for. Returns the ``answer``; ``call`` has the new stage then."""

    def advance(self, timeout_s: float) -> bool:
        if self.answer == _WAITING:
            self.answer = self._go_on(self._group, self._by_reference, int(timeout_s * 1e9))
            self._collectives.rendezvous.stage = self.call.stage
        if self.answer == _DIFFER:
            self._collectives.compare(self._head.raw)
        return bool(self.answer != _WAITING)
