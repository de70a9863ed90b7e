"""Blocks of a program whose inside is not kept for the backward, but computed again there from what the block is given.

While a block runs, autograd is given a number in place of every tensor that it is about to keep. The first of them that
the backward needs has the block computed once more, from the same tensors, by the same operators and with the same
random numbers, which are drawn by position: what autograd is then about to keep, in the same order, is what it needs.
All ranks run the same operators, so that their backwards compute, and communicate, in the same order. Gradients follow
the graph of the first run; that of the second one is never followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import LoweringError
from shardwright.mesh.collectives import Communicator

Inside = Callable[..., None]
"""A block as a function of the communicator, the keys of random numbers, the device and what it is given."""


class _Enough(Exception):
    """Everything is made again that was kept: what would follow is not needed."""


class _Given(torch.autograd.Function):
    """Keeps what a block is given as autograd keeps tensors: noticing changes, and where others say how, in their way.

    Nothing flows through it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(ctx.saved_tensors))


class _Run:
    """One run of a block in a forward."""

    def __init__(self, inside: Callable[..., None], device: torch.device, given: Sequence[Tensor]) -> None:
        self._inside, self._device = inside, device
        self._wanted = [tensor.requires_grad for tensor in given]
        with torch.enable_grad():
            anchor = torch.empty(0, requires_grad=True)
            self._given = _Given.apply(anchor, *(x.detach() for x in given))  # type: ignore[no-untyped-call]
        self._kept: list[tuple[torch.Size, torch.dtype]] = []
        self._made: dict[int, Tensor] = {}

    def keep(self, tensor: Tensor) -> _Place:
        """Where a tensor is to be found again."""
        self._kept.append((tensor.shape, tensor.dtype))
        return _Place(self, len(self._kept) - 1)

    def take(self, number: int) -> Tensor:
        """A tensor that was to be kept; it is held no longer than until it is asked for."""
        if number not in self._made:
            self._made = dict(enumerate(self._make()))
        return self._made.pop(number)

    def _make(self) -> list[Tensor]:
        made: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            made.append(tensor.detach())
            if len(made) == len(self._kept):
                raise _Enough
            return made[-1]

        saved = self._given.grad_fn.saved_tensors
        given = (x.detach().requires_grad_(wanted) for x, wanted in zip(saved, self._wanted, strict=True))
        off = torch.autocast(self._device.type, enabled=False)  # casts are operators of the program
        with torch.enable_grad(), off, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            try:
                self._inside(*given)
            except _Enough:
                pass
        found = [(tensor.shape, tensor.dtype) for tensor in made]
        if found != self._kept:
            raise LoweringError(
                f"a block that the backward computes again keeps {found}, and kept {self._kept} before: one of its "
                "operators does not do the same twice; leave its module out of recompute="
            )
        return made


@dataclass(frozen=True)
class _Place:
    run: _Run
    number: int


@contextmanager
def recomputed(
    inside: Inside, comm: Communicator, key: Callable[[int], int], device: torch.device, given: Sequence[Tensor]
) -> Iterator[None]:
    """Programs run a block ``with recomputed(block_1, comm, key, device, [x, w]):``.

    ``block_1`` does the same as what stands inside, as a function.
    """
    if not torch.is_grad_enabled():
        yield
        return
    run = _Run(partial(inside, comm, key, device), device, given)
    with torch.autograd.graph.saved_tensors_hooks(run.keep, lambda place: place.run.take(place.number)):
        yield
