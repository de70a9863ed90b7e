"""Parameters that are stored split, gathered where they are used, and not kept whole until the backward.

Autograd would keep the gathered tensor of every layer. While a program runs that gathers some again, what autograd is
about to keep is compared with them: in their place it keeps this rank's part, and the backward gathers that once more.
All ranks run the same operators, so that their backwards gather in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.mesh.collectives import Communicator
from shardwright.torch_private import MemoryOf, changes_of

Step = tuple[Callable[..., Tensor], dict[str, Any]]


@dataclass(frozen=True)
class _Gathered:
    """How a gathered tensor is made of this rank's part."""

    name: str
    part: Tensor
    changes: int
    comm: Communicator
    steps: Sequence[Step]

    def again(self) -> Tensor:
        if changes_of(self.part) != self.changes:
            raise UsageError(
                f"the parameter {self.name} was changed between the forward and the backward, which gathers it again; "
                "call backward() before optimizer.step()"
            )
        with torch.no_grad():
            whole = self.part
            for function, arguments in self.steps:
                whole = function(whole, self.comm, **arguments)
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
            self._known[MemoryOf(whole)] = _Gathered(name, part.detach(), changes_of(part), comm, steps)
        return whole

    def keeping_parts(self) -> AbstractContextManager[None]:
        """Inside, autograd keeps the parts of what is gathered again; what was noted before is forgotten."""
        self._known = {}
        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        return hooks

    def _pack(self, kept: Tensor) -> _Part | _Whole:
        found = self._known.get(MemoryOf(kept))
        if found is None:
            # Detached: a result that its own backward kept with its history would never be freed.
            return _Whole(kept.detach(), changes_of(kept))
        return _Part(found, tuple(kept.size()), tuple(kept.stride()), int(kept.storage_offset()))


def _unpack(packed: _Part | _Whole) -> Tensor:
    return packed.tensor()
