"""The gradients of replicated parameters, joined and reduced while the backward runs.

A bucket is one function of the local program: the identity forward, one flat all-reduce in place backward. It stands
inside autograd's dataflow, so that `torch.autograd.grad`, hooks on parameters and `.grad` all see reduced gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.mesh.collectives import Axes, Communicator


class GradientReduction:
    """Local programs call this as ``reduce_gradients(comm, ("dp",), weight=weight, bias=bias)``.

    While `deferred`, gradients are kept here instead, unreduced, and join the next reduction of their parameters.
    """

    def __init__(self) -> None:
        self._deferring = False
        # parameter -> over which axes -> sum of gradients that are not reduced yet, and who reduces it
        self._kept: dict[str, dict[Axes, tuple[Tensor, Communicator]]] = {}

    def __call__(self, comm: Communicator, axes: Axes, **parameters: Tensor) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = _Bucket.apply(  # type: ignore[no-untyped-call]
            self, comm, axes, tuple(parameters), *parameters.values()
        )
        return result

    @property
    def deferring(self) -> bool:
        return self._deferring

    def join(self, key: str, parameter: Tensor) -> Tensor:
        """``parameter``, whose backward adds what is kept of its gradient, where no bucket of the program does.

        The last batch of an accumulation may have a plan under which the gradient is whole on every rank.
        """
        if self._deferring or key not in self._kept:
            return parameter
        joined: Tensor = _Join.apply(self, key, parameter)  # type: ignore[no-untyped-call]
        return joined

    def late(self, key: str, gradient: Tensor) -> Tensor:
        """The gradient with what is still kept of it, reduced."""
        if self._deferring or key not in self._kept:
            return gradient
        for axes, (kept, comm) in self._kept.pop(key).items():
            comm.all_reduce(kept, axes)
            gradient = gradient + kept
        return gradient

    def forget(self) -> None:
        """Drop what is kept."""
        self._kept.clear()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Backwards inside leave the gradients of these parameters unreduced, and their ``.grad`` as it was."""
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    def reduce(
        self, keys: Sequence[str], gradients: Sequence[Tensor], comm: Communicator, axes: Axes
    ) -> list[Tensor | None]:
        """The sums over the ranks, or None for each where reduction is deferred."""
        if self._deferring:
            for key, gradient in zip(keys, gradients, strict=True):
                kept = self._kept.setdefault(key, {})
                kept[axes] = (kept[axes][0] + gradient if axes in kept else gradient.clone()), comm
            return [None] * len(keys)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        for key, piece in zip(keys, pieces, strict=True):
            if axes in self._kept.get(key, {}):
                piece += self._kept[key].pop(axes)[0].reshape(-1)
        comm.all_reduce(flat, axes)  # what is kept over other axes, `join` adds
        return [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]


class _Bucket(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, reduction: GradientReduction, comm: Communicator, axes: Axes, keys: Sequence[str], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.reduction, ctx.comm, ctx.axes, ctx.keys = reduction, comm, axes, keys
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *ctx.reduction.reduce(ctx.keys, gradients, ctx.comm, ctx.axes)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduction: GradientReduction, key: str, parameter: Tensor) -> Tensor:
        ctx.reduction, ctx.key = reduction, key
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.reduction.late(ctx.key, gradient)
