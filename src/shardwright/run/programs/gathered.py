"""Tensors that are gathered where they are used, and not kept whole until the backward: above all split parameters.

Autograd would keep the gathered tensor of every layer. While a program runs that gathers some again, what autograd is
about to keep is compared with them: in their place it keeps this rank's part. The first operator whose backward needs
the whole gathers that once more, and it lives until the last has had it. All ranks run the same operators, so that
their backwards gather in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.mesh.collectives import Communicator
from shardwright.torch_private import MemoryOf, changes_of

Step = tuple[Callable[..., Tensor], dict[str, Any]]


class _Gathered:
    """How a gathered tensor is made of this rank's part, and for how many it is still to be made."""

    def __init__(self, name: str, part: Tensor, comm: Communicator, steps: Sequence[Step]) -> None:
        self._name, self._part, self._changes = name, part.detach(), changes_of(part)
        self._comm, self._steps = comm, steps
        self._whole: Tensor | None = None
        self.needed = 0

    def again(self) -> Tensor:
        """The gathered tensor, for one of those that need it."""
        whole = self._whole if self._whole is not None else self._gather()
        self.needed -= 1
        self._whole = whole if self.needed > 0 else None
        return whole

    def _gather(self) -> Tensor:
        if changes_of(self._part) != self._changes:
            raise UsageError(
                f"{self._name}, which the backward gathers again, was changed in place since the forward; call "
                "backward() before optimizer.step()"
            )
        with torch.no_grad():
            whole = self._part
            for function, arguments in self._steps:
                whole = function(whole, self._comm, **arguments)
        return whole


@dataclass(frozen=True)
class _Part:
    """What is kept in place of a tensor that lies in gathered memory."""

    gathered: _Gathered
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.gathered.again().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Whole:
    """Any other tensor. Torch looks for changes itself only where it has kept the tensor itself."""

    kept: Tensor
    changes: int

    def tensor(self) -> Tensor:
        if changes_of(self.kept) != self.changes:
            raise UsageError(
                f"a tensor of shape {list(self.kept.shape)} that the backward needs was changed in place since the "
                "forward; call backward() before optimizer.step()"
            )
        return self.kept


class GatheredAgain:
    """Local programs call this as ``again(all_gather(w, ...), w, "w", comm, [(all_gather, {...})])``."""

    def __init__(self) -> None:
        self._known: dict[MemoryOf, _Gathered] = {}

    def __call__(self, whole: Tensor, part: Tensor, name: str, comm: Communicator, steps: Sequence[Step]) -> Tensor:
        if torch.is_grad_enabled():
            self._known[MemoryOf(whole)] = _Gathered(name, part, comm, steps)
        return whole

    @contextmanager
    def keeping_parts(self) -> Iterator[None]:
        """Inside, autograd keeps the parts of what is gathered again."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._known = {}  # so that a part lives no longer than what needs it

    def _pack(self, kept: Tensor) -> _Part | _Whole:
        found = self._known.get(MemoryOf(kept))
        if found is None:
            # Detached: a result that its own backward kept with its history would never be freed.
            return _Whole(kept.detach(), changes_of(kept))
        found.needed += 1
        return _Part(found, tuple(kept.size()), tuple(kept.stride()), int(kept.storage_offset()))


def _unpack(packed: _Part | _Whole) -> Tensor:
    return packed.tensor()
