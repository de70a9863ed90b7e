"""All-reduces by native code: one call each, unless others are waited for."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.backends.segment.arena import Arenas
from shardwright.backends.segment.collectives import Collectives
from shardwright.backends.segment.native import OPERATIONS, TYPES, AllReduce, Group, Native
from shardwright.backends.segment.notes import Note

_WAITING, _DONE, _DIFFER = 0, 1, 2  # what native code answers
_NUMBER = struct.Struct("<I")  # with which a head begins
_WITH_ADDRESSES = (Tensor, torch.nn.Parameter)  # of their numbers; a subclass may keep its numbers in other tensors
_OPERATIONS = {kind: kind.name for kind in dist.ReduceOp.RedOpType.__members__.values()}


class _Kind(NamedTuple):
    """What calls on tensors of one dtype and size have in common."""

    head: bytes  # behind the number
    numel: int
    type_code: int
    operation_code: int


class NativeAllReduces:
    """Those of one group. Ranks that call something else meanwhile meet them at their first stage.

    ``arenas``, of which ``group`` has the addresses, live as long as these may be under way.
    """

    def __init__(self, collectives: Collectives, native: Native, group: Group, arenas: Arenas | None) -> None:
        self.collectives, self.native, self.group, self.arenas = collectives, native, group, arenas
        self.told = AllReduce()  # of the one that is under way: there is one at a time
        self._kinds: dict[tuple[torch.dtype, int, Any], _Kind | None] = {}

    def of(self, tensor: Tensor, reduce_op: Any) -> NativeAllReduce | None:
        """The next one; None for what native code does not reduce."""
        key = tensor.dtype, tensor.numel(), reduce_op.op
        try:
            kind = self._kinds[key]
        except KeyError:
            kind = self._kinds[key] = self._kind(*key)
        return None if kind is None else NativeAllReduce(self, kind, tensor)

    def _kind(self, dtype: torch.dtype, numel: int, operation: Any) -> _Kind | None:
        name = _OPERATIONS[operation]
        if dtype not in TYPES or name not in OPERATIONS or (name == "AVG" and not dtype.is_floating_point):
            return None
        head = Note(0, "all_reduce", dtype, numel, name).head()[_NUMBER.size :]
        return _Kind(head, numel, TYPES[dtype], OPERATIONS[name])


class NativeAllReduce:
    """One of them, under way."""

    __slots__ = ("_all", "_begun", "_flat", "_head", "_kind", "_tensor")

    def __init__(self, all_reduces: NativeAllReduces, kind: _Kind, tensor: Tensor) -> None:
        self._all, self._kind, self._tensor, self._begun = all_reduces, kind, tensor, False

    def advance(self, timeout_s: float) -> bool:
        native, told, rendezvous = self._all.native, self._all.told, self._all.collectives.rendezvous
        if not self._begun:
            self._begin(told, rendezvous.stage)
        answer = native.all_reduce(self._all.group, told, int(timeout_s * 1e9))
        rendezvous.stage = told.stage
        if answer == _WAITING:
            return False
        if answer == _DIFFER:
            self._all.collectives.compare(self._head)
        if self._flat is not self._tensor:
            self._tensor.data.copy_(self._flat)
        return True

    def _begin(self, told: AllReduce, stage: int) -> None:
        tensor, kind, collectives = self._tensor, self._kind, self._all.collectives
        plain = type(tensor) in _WITH_ADDRESSES and tensor.is_contiguous() and not tensor.is_neg()
        # Steps in Python would not meet the native code of ranks whose tensors are plain.
        self._flat = tensor if plain else torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.data)
        collectives.number += 1
        self._head = _NUMBER.pack(collectives.number % (1 << 32)) + kind.head
        told.head, told.data, told.count = self._head, self._flat.data_ptr(), kind.numel
        told.type, told.operation = kind.type_code, kind.operation_code
        told.step, told.waits, told.stage = 0, 0, stage
        self._begun = True
