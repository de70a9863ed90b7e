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
from weakref import ref

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.mesh.collectives import Axes, Communicator
from shardwright.mesh.together import all_gather_together
from shardwright.torch_private import MemoryOf, changes_of

Step = tuple[Callable[..., Tensor], dict[str, Any]]
Gather = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""What makes whole tensors of this rank's parts."""


class _Gathered:
    """A tensor that is gathered again, and for how many it is still to be."""

    def __init__(self, collective: _Collective) -> None:
        self._collective = collective
        self.whole: Tensor | None = None
        self.needed = 0

    def again(self) -> Tensor:
        """The gathered tensor, for one of those that need it."""
        if self.whole is None:
            self._collective.run(self)
        whole = self.whole
        assert whole is not None
        self.needed -= 1
        if self.needed <= 0:
            self.whole = None
        return whole


class _Collective:
    """How tensors are gathered together of this rank's parts. It keeps none that nobody needs any more."""

    def __init__(self, names: Sequence[str], parts: Sequence[Tensor], gather: Gather) -> None:
        self._names, self._parts, self._gather = names, [part.detach() for part in parts], gather
        self._changes = [changes_of(part) for part in parts]
        self._members: list[ref[_Gathered]] = []

    def members(self) -> list[_Gathered]:
        """What stands for each of the gathered tensors."""
        made = [_Gathered(self) for _ in self._parts]
        self._members = [ref(member) for member in made]
        return made

    def run(self, asking: _Gathered) -> None:
        """Give what is gathered to those that are still needed, one of which asks for it."""
        for name, part, changes in zip(self._names, self._parts, self._changes, strict=True):
            if changes_of(part) != changes:
                raise UsageError(
                    f"{name}, which the backward gathers again, was changed in place since the forward; call "
                    "backward() before optimizer.step()"
                )
        with torch.no_grad():
            wholes = self._gather(self._parts)
        for found, whole in zip(self._members, wholes, strict=True):
            member = found()
            if member is not None and (member is asking or member.needed > 0):
                member.whole = whole


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
    """Local programs call this as ``again(all_gather(w, ...), w, "w", comm, [(all_gather, {...})])``.

    Or, for what one collective gathers, as ``again.together(all_gather_together(...), ("w", "v"), comm, ("dp",), (w,
    {...}), (v, {...}))``.
    """

    def __init__(self) -> None:
        self._known: dict[MemoryOf, _Gathered] = {}

    def __call__(self, whole: Tensor, part: Tensor, name: str, comm: Communicator, steps: Sequence[Step]) -> Tensor:
        def gather(parts: Sequence[Tensor]) -> Sequence[Tensor]:
            [gathered] = parts
            for function, arguments in steps:
                gathered = function(gathered, comm, **arguments)
            return [gathered]

        self._note([whole], _Collective([name], [part], gather))
        return whole

    def together(
        self,
        wholes: Sequence[Tensor],
        names: Sequence[str],
        comm: Communicator,
        axes: Axes,
        *parts: tuple[Tensor, dict[str, Any]],
    ) -> Sequence[Tensor]:
        """``wholes``, which were gathered of ``parts``, each with the other arguments of its own."""
        hows = [how for _, how in parts]

        def gather(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return all_gather_together(comm, axes, "slice", *zip(tensors, hows, strict=True))

        self._note(wholes, _Collective(names, [part for part, _ in parts], gather))
        return wholes

    def _note(self, wholes: Sequence[Tensor], collective: _Collective) -> None:
        if torch.is_grad_enabled():
            self._known.update(zip(map(MemoryOf, wholes), collective.members(), strict=True))

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
