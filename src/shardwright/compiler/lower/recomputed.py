"""Blocks of a program whose inside is not kept for the backward, but computed again there from what the block is given.

While a block runs, autograd is given a number in place of every tensor that it is about to keep. Where the backward
comes to the block, it is computed once more, from the same tensors, by the same operators and with the same random
numbers, which are drawn by position: what autograd is then about to keep, in the same order, is what it needs. All
ranks come to it at the same place of their backwards, also those whose part is empty, and which keep nothing. Gradients
follow the graph of the first run; that of the second one is never followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.mesh.collectives import Communicator
from shardwright.errors import LoweringError


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, action: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.action = action
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # as they are they would be views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.action()
        return None, *gradients


def before_backward(action: Callable[[], None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the same tensors, such that a backward calls ``action`` before it comes to what made any of them."""
    flowing = [tensor for tensor in tensors if tensor.requires_grad]
    if not flowing or not torch.is_grad_enabled():
        return tuple(tensors)
    passed = iter(_Before.apply(action, *flowing))  # type: ignore[no-untyped-call]
    return tuple(next(passed) if tensor.requires_grad else tensor for tensor in tensors)


Inside = Callable[..., None]
"""A block as a function of the communicator, the keys of random numbers, the device, what is to be called behind the
last collective that is done again, and what the block is given."""


class _Enough(Exception):
    """Everything is made again that was kept, and all is communicated: what would follow is not needed."""


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
            anchor = torch.empty(0, requires_grad=True, device="cpu")
            self._given = _Given.apply(anchor, *(x.detach() for x in given))  # type: ignore[no-untyped-call]
        self._kept: list[tuple[torch.Size, torch.dtype]] = []
        self._made: dict[int, Tensor] = {}

    def before(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what the block makes for others, such that a backward first computes the block again."""
        return before_backward(self._make_again, outputs)

    def keep(self, tensor: Tensor) -> _Place:
        """Return where a tensor is to be found again."""
        self._kept.append((tensor.shape, tensor.dtype))
        return _Place(self, len(self._kept) - 1)

    def take(self, number: int) -> Tensor:
        """A tensor that was to be kept; it is held no longer than until it is asked for."""
        if number not in self._made:  # it was taken before: somebody looks at what autograd has saved
            self._make_again()
        return self._made.pop(number)

    def _make_again(self) -> None:
        self._made = dict(enumerate(self._make()))

    def _make(self) -> list[Tensor]:
        made: list[Tensor] = []
        communicated = False

        def note(tensor: Tensor) -> Tensor:
            made.append(tensor.detach())
            if communicated:
                stop()
            return made[-1]

        def enough() -> None:
            nonlocal communicated
            communicated = True
            stop()

        def stop() -> None:
            if len(made) >= len(self._kept):
                raise _Enough

        saved = self._given.grad_fn.saved_tensors
        given = (x.detach().requires_grad_(wanted) for x, wanted in zip(saved, self._wanted, strict=True))
        off = torch.autocast(self._device.type, enabled=False)  # casts are operators of the program
        with torch.enable_grad(), off, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            try:
                self._inside(enough, *given)
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


class _WithoutGradients:
    """A run of a block to which no backward comes."""

    def before(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs as they are."""
        return outputs


@contextmanager
def recomputed(
    inside: Inside, comm: Communicator, key: Callable[[int], int], device: torch.device, given: Sequence[Tensor]
) -> Iterator[_Run | _WithoutGradients]:
    """Run a block of a program with activation checkpointing.

    A program reads ``with recomputed(block_1, comm, key, device, [x, w]) as run:``.

    ``block_1`` does the same as what stands inside, as a function. What others read of the block is what ``run.before``
    makes of it.
    """
    if not torch.is_grad_enabled():
        yield _WithoutGradients()
        return
    run = _Run(partial(inside, comm, key, device), device, given)
    with torch.autograd.graph.saved_tensors_hooks(run.keep, lambda place: place.run.take(place.number)):
        yield run
