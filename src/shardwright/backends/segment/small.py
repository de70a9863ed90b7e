"""The all-reduce of a small tensor, in one call of native code."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwright.backends.segment.collectives import SMALL_BYTES, Collectives, flat_of
from shardwright.backends.segment.native import OPERATIONS, TYPES, Group, Native


class SmallAllReduce:
    """Under way among the ranks of ``collectives``; it meets the steps of others, where these come without it."""

    def __init__(self, collectives: Collectives, native: Native, group: Group, tensor: Tensor, operation: str) -> None:
        self._collectives, self._native, self._group = collectives, native, group
        self._tensor, self._operation = tensor, operation
        self._begun = False

    @classmethod
    def of(
        cls, collectives: Collectives, native: Native, group: Group, tensor: Tensor, reduce_op: Any
    ) -> SmallAllReduce | None:
        """None for what native code does not reduce."""
        operation = getattr(reduce_op, "op", reduce_op).name
        fits = tensor.dtype in TYPES and tensor.nbytes * collectives.size <= SMALL_BYTES and operation in OPERATIONS
        if not fits or (operation == "AVG" and not tensor.dtype.is_floating_point):
            return None
        return cls(collectives, native, group, tensor, operation)

    def advance(self, timeout_s: float) -> bool:
        rendezvous = self._collectives.rendezvous
        begun = self._begun
        if not begun:
            self._flat, self._finish = flat_of(self._tensor)
            self._note = self._collectives.note("all_reduce", self._flat, self._operation)
            self._head = self._note.head()
            rendezvous.stage, self._begun = rendezvous.next_stage(), True
        flat = self._flat
        answer = self._native.all_reduce(
            self._group, rendezvous.stage, begun, self._head, flat.data_ptr(), flat.nbytes, flat.numel(),
            TYPES[flat.dtype], OPERATIONS[self._operation], int(timeout_s * 1e9),
        )  # fmt: skip
        if answer == _DIFFER:
            self._collectives.compare(self._note)
        if answer == _DONE:
            self._finish()
        return answer != _WAITING


_WAITING, _DONE, _DIFFER = 0, 1, 2
