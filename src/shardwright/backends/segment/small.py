"""All-reduces of small tensors, in one call of native code each."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.backends.segment.collectives import SMALL_BYTES, Collectives
from shardwright.backends.segment.native import OPERATIONS, TYPES, Group, Native
from shardwright.backends.segment.notes import Note

_WAITING, _DONE, _DIFFER = 0, 1, 2  # what native code answers
_NUMBER = struct.Struct("<I")  # with which a head begins
_OPERATIONS = {kind: kind.name for kind in dist.ReduceOp.RedOpType.__members__.values()}


class _Kind(NamedTuple):
    """What calls on tensors of one dtype and size have in common."""

    head: bytes  # behind the number
    nbytes: int
    type_code: int
    operation_code: int


class Small:
    """Those of one group. They meet the steps of others, where these come to the same without native code."""

    def __init__(self, collectives: Collectives, native: Native, group: Group) -> None:
        self.collectives, self.native, self.group = collectives, native, group
        self._kinds: dict[tuple[torch.dtype, int, Any], _Kind | None] = {}

    def of(self, tensor: Tensor, reduce_op: Any) -> SmallAllReduce | None:
        """The next one; None for what native code does not reduce."""
        key = tensor.dtype, tensor.numel(), reduce_op.op
        try:
            kind = self._kinds[key]
        except KeyError:
            kind = self._kinds[key] = self._kind(*key)
        return None if kind is None else SmallAllReduce(self, kind, tensor)

    def _kind(self, dtype: torch.dtype, numel: int, operation: Any) -> _Kind | None:
        name, nbytes = _OPERATIONS[operation], numel * dtype.itemsize
        fits = dtype in TYPES and nbytes * self.collectives.size <= SMALL_BYTES and name in OPERATIONS
        if not fits or (name == "AVG" and not dtype.is_floating_point):
            return None
        head = Note(0, "all_reduce", dtype, numel, name).head()[_NUMBER.size :]
        return _Kind(head, nbytes, TYPES[dtype], OPERATIONS[name])


class SmallAllReduce:
    """One of them, under way."""

    __slots__ = ("_begun", "_flat", "_head", "_kind", "_small", "_tensor")

    def __init__(self, small: Small, kind: _Kind, tensor: Tensor) -> None:
        self._small, self._kind, self._tensor, self._begun = small, kind, tensor, False

    def advance(self, timeout_s: float) -> bool:
        small, kind, begun = self._small, self._kind, self._begun
        collectives = small.collectives
        if not begun:
            self._begin(collectives)
        answer = small.native.all_reduce(
            small.group, collectives.rendezvous.stage, begun, self._head, len(self._head), self._flat.data_ptr(),
            kind.nbytes, self._tensor.numel(), kind.type_code, kind.operation_code, int(timeout_s * 1e9),
        )  # fmt: skip
        if answer == _WAITING:
            return False
        if answer == _DIFFER:
            collectives.compare(self._head)
        if self._flat is not self._tensor:
            self._tensor.data.copy_(self._flat)
        return True

    def _begin(self, collectives: Collectives) -> None:
        """Native code comes to the next stage for this rank."""
        tensor = self._tensor
        plain = tensor.is_contiguous() and not tensor.is_neg()
        self._flat = tensor if plain else tensor.data.resolve_neg().clone(memory_format=torch.contiguous_format)
        collectives.number += 1
        self._head = _NUMBER.pack(collectives.number % (1 << 32)) + self._kind.head
        collectives.rendezvous.stage, self._begun = collectives.rendezvous.next_stage(), True
