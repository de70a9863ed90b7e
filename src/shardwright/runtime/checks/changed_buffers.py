"""The buffers that a forward changes.

DistributedDataParallel gives all ranks rank 0's before the next forward, and leaves on each rank what takes the place
of a buffer. So what ranks make of them must be the same; only the statistics of batch normalisation are taken to be
those of rank 0's own samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.common import torch_private
from shardwright.data.loading.same_data import checksum
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.lockstep import Turns
from shardwright.errors import UsageError
from shardwright.runtime.checks.digests import brought, mixed

_BITS = 20  # of a digest, whose squares many ranks then sum without a rounding
_SMALL_BYTES = 2**20


@dataclass(frozen=True)
class Place:
    """The place where a module has a buffer, or None."""

    name: str
    buffers: dict[str, Any]
    own: str
    is_statistic: bool  # of batch normalisation

    @property
    def now(self) -> Any:
        return self.buffers.get(self.own)


def places_of(model: nn.Module) -> list[Place]:
    """Return where the model's modules have buffers; what several modules share stands at each."""
    return [
        Place(f"{path}.{own}".lstrip("."), torch_private.buffers_in(module), own, torch_private.is_batch_norm(module))
        for path, module in model.named_modules()
        for own in torch_private.buffers_in(module)
    ]


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[set[str]]:
    """Leave the model's buffers as they were, whatever is done to them inside.

    Yields:
        what at the end gets the names of those that were changed, but for those of batch normalisation.
    """
    before: list[tuple[Place, Any, Any]] = [(place, place.now, _copy(place.now)) for place in places_of(model)]
    changed: set[str] = set()
    try:
        yield changed
        changed.update(p.name for p, _, copy in before if not p.is_statistic and not _equal(p.now, copy))
    finally:
        with torch.no_grad():
            for place, buffer, copy in before:
                place.buffers[place.own] = buffer.copy_(copy) if _alike(buffer, copy) else copy


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _alike(a: Any, b: Any) -> bool:
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return both and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _equal(a: Any, b: Any) -> bool:
    return a is b is None or (_alike(a, b) and torch.equal(a, b))


class ChangedBuffers:
    """Tells whether the forwards of all ranks make the same of a model's buffers.

    Args:
        changing: the names of those that are known to be changed, which are always looked at; others, where one takes
            the place of another or torch counts a change, and small ones in some forwards, since torch counts none of
            what is written to ``buffer.data``.
    """

    def __init__(self, model: nn.Module, changing: Collection[str]) -> None:
        self._places = [place for place in places_of(model) if not place.is_statistic]
        self._changing = frozenset(changing)
        self._turns = Turns()
        self._before: list[tuple[Any, int]] = []

    def begin(self) -> None:
        """Called before a forward."""
        self._before = [(place.now, _version(place.now)) for place in self._places]

    def end(self) -> dict[str, Any]:
        """The buffers to compare: those that the forward since `begin` has changed, if there was one, and others."""
        self._turns.next()
        before, self._before = self._before or [(place.now, _version(place.now)) for place in self._places], []
        return {
            place.name: place.now
            for place, (buffer, version) in zip(self._places, before, strict=True)
            if place.name in self._changing
            or place.now is not buffer
            or _version(buffer) != version
            or (self._turns.due and buffer is not None and buffer.nbytes <= _SMALL_BYTES)
        }


def _version(buffer: Any) -> int:
    return torch_private.version(buffer) if isinstance(buffer, Tensor) and not buffer.is_inference() else 0


def digest(buffers: dict[str, Any], device: torch.device) -> Tensor:
    """Return a whole number below 2**20 that other values of the buffers would nearly never give, 0 without buffers.

    It is a scalar of float64 on ``device``, which is not waited for.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, name in enumerate(sorted(buffers)):
        total += mixed(_sum_of_words(buffers[name], device) + number)
    top: Tensor = (total >> (64 - _BITS)) & (2**_BITS - 1)
    return top.double()


def _sum_of_words(buffer: Any, device: torch.device) -> Tensor:
    """All bits of a buffer, each word times a number that belongs to its position, modulo 2**64."""
    if not isinstance(buffer, Tensor):
        return torch.ones((), dtype=torch.int64, device=device)
    kind = {1: torch.uint8, 2: torch.int16}.get(buffer.element_size(), torch.int32)
    words = buffer.detach().resolve_conj().resolve_neg().reshape(-1).view(kind).to(torch.int64) + 1
    factors = mixed(torch.arange(1, len(words) + 1, device=words.device)) | 1
    return brought((words * factors).sum(), device)


def refusal(names: Collection[str]) -> str:
    """Return what is said where ranks make different buffers of these."""
    return (
        f"the forward changes the buffer {', '.join(sorted(names))} by the samples of each rank, of which "
        "DistributedDataParallel keeps what rank 0 makes of its own; change it outside of the loss function, by what "
        "this returns beside the loss, or write the step so that it can be captured"
    )


def refuse_unlike(buffers: dict[str, Any], samples: int) -> None:
    """Say which buffer ranks have made different ones of; all ranks call it together, each with its ``samples``.

    Raises:
        UsageError: on every rank, where there is one.
    """
    everyone = from_all_ranks(({name: checksum(buffer) for name, buffer in buffers.items()}, samples))
    for name in sorted({name for theirs, _ in everyone for name in theirs}):
        if len({theirs.get(name) for theirs, _ in everyone}) == 1:
            continue
        without = [rank for rank, (_, count) in enumerate(everyone) if count == 0]
        if len({theirs.get(name) for theirs, count in everyone if count}) == 1:
            raise UsageError(
                f"the forward changes the buffer {name}, but not on rank {without[0]}, which has no samples of this "
                "batch; pass batches with samples for every rank, as of sw.loader(..., drop_last=True), or write the "
                "step so that it can be captured"
            )
        raise UsageError(refusal([name]))
