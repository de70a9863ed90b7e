"""All-reduces, all-gathers and reduce-scatters by native code: one call each, unless others are waited for."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.backends.segment.arena import Arenas
from shardwright.backends.segment.collectives import Collectives
from shardwright.backends.segment.flats import is_plain
from shardwright.backends.segment.memory import DATA_BYTES, SLOTS_BYTES, SMALL_BYTES
from shardwright.backends.segment.native import GATHERED, OPERATIONS, TYPES, Group, Native, Told, reduces
from shardwright.backends.segment.notes import Note

_WAITING, _DONE, _DIFFER = 0, 1, 2  # what native code answers
_NUMBER = struct.Struct("<I")  # with which a head begins
_OPERATIONS = {kind: kind.name for kind in dist.ReduceOp.RedOpType.__members__.values()}
_MOST_KINDS = 1024  # that are remembered: batches of ever new sizes may have any number of them


class _Kind(NamedTuple):
    """What calls on tensors of one dtype and size have in common."""

    head: bytes  # behind the number, and what follows it on which all must agree
    elements: int
    type_code: int
    operation_code: int
    one_stage: bool
    scatters: bool = False


class NativeCollectives:
    """Those of one group. Ranks that call something else meanwhile meet them at their first stage.

    ``arenas``, of which ``group`` has the addresses, live as long as these may be under way.
    """

    def __init__(self, collectives: Collectives, native: Native, group: Group, arenas: Arenas | None) -> None:
        self.collectives, self.native, self.group, self.arenas = collectives, native, group, arenas
        self.told = Told()  # of the one that is under way: there is one at a time

    def all_reduce(self, tensor: Tensor, reduce_op: Any) -> NativeCollective | None:
        """The next one; None for what native code does not reduce."""
        kind = _reducing(tensor.dtype, tensor.numel(), reduce_op.op, self.collectives.size)
        if kind is None:
            return None
        # Steps in Python would not meet the native code of ranks whose tensors are plain.
        flat = tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.data)
        return NativeCollective(self, kind, flat, flat, tensor)

    def all_gather(self, output: Tensor, tensor: Tensor) -> NativeCollective | None:
        """The next one; None for what is large, or does not lie as it is to be read: steps in Python meet it."""
        if tensor.nbytes > SLOTS_BYTES or not (is_plain(output) and is_plain(tensor)):
            return None
        return NativeCollective(self, _gathering(tensor.dtype, tensor.numel()), tensor, output, output)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduce_op: Any) -> NativeCollective | None:
        """The next one; None as for `all_gather`, and for what native code does not reduce."""
        if output.nbytes > SLOTS_BYTES or not (is_plain(output) and is_plain(tensor)):
            return None
        kind = _scattering(output.dtype, output.numel(), reduce_op.op, self.collectives.size)
        return None if kind is None else NativeCollective(self, kind, tensor, output, output)


@lru_cache(_MOST_KINDS)
def _reducing(dtype: torch.dtype, numel: int, operation: Any, size: int) -> _Kind | None:
    name = _OPERATIONS[operation]
    if not reduces(dtype, name):
        return None
    head = Note(0, "all_reduce", dtype, numel, name).head()[_NUMBER.size :]
    return _Kind(head, numel, TYPES[dtype], OPERATIONS[name], numel * dtype.itemsize * size <= SMALL_BYTES)


@lru_cache(_MOST_KINDS)
def _scattering(dtype: torch.dtype, numel: int, operation: Any, size: int) -> _Kind | None:
    name = _OPERATIONS[operation]
    if not reduces(dtype, name):
        return None
    note = Note(0, "reduce_scatter", dtype, 0, name).head()[_NUMBER.size :] + struct.pack(f"={size}q", *[numel] * size)
    one_stage = numel * dtype.itemsize * size <= SMALL_BYTES
    return _Kind(note, numel, TYPES[dtype], OPERATIONS[name], one_stage, scatters=True)


@lru_cache(_MOST_KINDS)
def _gathering(dtype: torch.dtype, numel: int) -> _Kind:
    operation, code = GATHERED
    nbytes = numel * dtype.itemsize
    return _Kind(
        Note(0, "all_gather", dtype, numel).head()[_NUMBER.size :], nbytes, code, operation, nbytes <= DATA_BYTES
    )


class NativeCollective:
    """One of them, under way: what this rank gives, where the result goes, and the ``tensor`` that is to have it."""

    __slots__ = ("_all", "_begun", "_head", "_into", "_kind", "_own", "_tensor")

    def __init__(self, native: NativeCollectives, kind: _Kind, own: Tensor, into: Tensor, tensor: Tensor) -> None:
        self._all, self._kind, self._own, self._into, self._tensor = native, kind, own, into, tensor
        self._begun = False

    @property
    def one_stage(self) -> bool:
        """Whether the others can end it, once this rank has come to it."""
        return self._kind.one_stage

    def advance(self, timeout_s: float) -> bool:
        native, told, rendezvous = self._all.native, self._all.told, self._all.collectives.rendezvous
        if not self._begun:
            self._begin(told, rendezvous.stage)
        answer = native.collective(self._all.group, told, int(timeout_s * 1e9))
        rendezvous.stage = told.stage
        if answer == _WAITING:
            return False
        if answer == _DIFFER:
            self._all.collectives.compare(self._head)
        if self._into is not self._tensor:
            self._tensor.data.copy_(self._into)
        self._own = self._into = self._tensor  # what was read lives no longer than it has to
        return True

    wait = advance  # as it is awaited where it is one step of several

    def _begin(self, told: Told, stage: int) -> None:
        kind, collectives = self._kind, self._all.collectives
        collectives.number += 1
        self._head = _NUMBER.pack(collectives.number % (1 << 32)) + kind.head
        told.head, told.note_bytes = self._head, len(self._head)
        told.own, told.data, told.count = self._own.data_ptr(), self._into.data_ptr(), kind.elements
        told.type, told.operation, told.scatters = kind.type_code, kind.operation_code, kind.scatters
        told.step, told.waits, told.stage = 0, 0, stage
        self._begun = True
