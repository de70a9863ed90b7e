"""The gradients of replicated parameters, joined and reduced while the backward runs.

A bucket is two functions of the local program. ``reduce_gradients`` is the identity forward; backward it begins one
flat all-reduce in place. ``later``, with which the program begins, is the identity too; backward it waits for that; a
single bucket with which the backward ends waits for itself.
Autograd comes last to what was made first, so that all the rest of the backward runs in between. Both stand inside
autograd's dataflow: `torch.autograd.grad`, hooks on parameters and ``.grad`` all see reduced gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.mesh.collectives import Axes, Communicator, views_into
from shardwright.errors import UsageError
from shardwright.runtime.overlap.bucket_reductions import Flight, Turns
from shardwright.runtime.overlap.owned import is_owned, least_references
from shardwright.runtime.overlap.unreduced import Unreduced


class GradientReduction(Unreduced):
    """Local programs call this as ``reduce_gradients(comm, ("dp",), weight=weight, bias=bias)``.

    While `deferred`, gradients are kept here instead, unreduced, and join the next reduction of their parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self._deferring = False
        # parameter -> over which axes -> sum of gradients that are not reduced yet, and who reduces it
        self._kept: dict[str, dict[Axes, tuple[Tensor, Communicator]]] = {}
        least_references()  # found out here, and not within the first backward

    def later(self, *buckets: tuple[Tensor, ...]) -> list[Tensor]:
        """The parameters of each bucket, one after the other; their gradients are waited for in the backward."""
        if not torch.is_grad_enabled():
            return [parameter for parameters in buckets for parameter in parameters]
        turns, found = Turns(len(buckets)), list[Tensor]()
        for number, parameters in enumerate(buckets):
            found += _Later.apply(self, Flight(turns, number), *parameters)  # type: ignore[no-untyped-call]
        return found

    def __call__(self, comm: Communicator, axes: Axes, **parameters: Tensor) -> tuple[Tensor, ...]:
        """Parameters as `later` gave them, or, with which the backward ends, as they are."""
        given = tuple(parameters.values())
        if not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in given)):
            return given
        flight = getattr(given[0].grad_fn, "flight", None)
        result: tuple[Tensor, ...] = _Bucket.apply(self, comm, axes, flight, tuple(parameters), *given)  # type: ignore[no-untyped-call]
        return result

    @property
    def deferring(self) -> bool:
        return self._deferring

    @property
    def keeps(self) -> bool:
        """Whether gradients are kept here, which `join` adds."""
        return bool(self._kept)

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

    @property
    def kept(self) -> Collection[str]:
        return self._kept.keys()

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            del self._kept[name]

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Backwards inside leave the gradients of these parameters unreduced, and their ``.grad`` as it was."""
        self.begin()
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    def reduce(
        self,
        keys: Sequence[str],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        comm: Communicator,
        axes: Axes,
        flight: Flight | None,
        owned: bool,
    ) -> list[Tensor | None]:
        """The sums over the ranks, to be read when they have landed, or None for each where reduction is deferred.

        Args:
            gradients: None for a parameter of which what was differentiated does not depend, on all ranks alike: it has
                a place in the bucket, and no sum.
            flight: what they land with; without one they are waited for here.
            owned: whether nobody else has the gradient, where it is a single one.

        Raises:
            UsageError: where reduction is deferred, and a hook waits for a gradient.
        """
        if self._deferring:
            self._refuse_hooks(keys)
            for key, gradient in zip(keys, gradients, strict=True):
                if gradient is not None:
                    kept = self._kept.setdefault(key, {})
                    kept[axes] = (kept[axes][0] + gradient if axes in kept else gradient.clone()), comm
            return [None] * len(keys)
        known = [g is not None or axes in self._kept.get(key, {}) for key, g in zip(keys, gradients, strict=True)]
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        # Flat in either case: another rank may own the gradient of its part, and all make the same call.
        flat, pieces = (found[0].view(-1), found) if owned else _joined(found, comm, axes)
        if self._kept:
            for key, piece in zip(keys, pieces, strict=True):
                if axes in self._kept.get(key, {}):
                    piece += self._kept[key].pop(axes)[0]
        if flight is None:
            comm.all_reduce(flat, axes)
        else:
            flight.start(keys, partial(comm.start_all_reduce, flat, axes))
        # What is kept over other axes, `join` adds.
        return [piece if is_known else None for piece, is_known in zip(pieces, known, strict=True)]

    def _refuse_hooks(self, keys: Sequence[str]) -> None:
        if name := self.hooked(keys):
            raise UsageError(
                f"{name} has a hook on its gradient, which inside of accumulate() would be given that of several "
                "batches together; call each backward outside of it, which reduces each gradient, or change gradients "
                "between the last backward and optimizer.step()"
            )

    def landed(self, flight: Flight, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The same gradients, once they have been reduced."""
        flight.land()
        return list(gradients)


def _joined(gradients: list[Tensor], comm: Communicator, axes: Axes) -> tuple[Tensor, list[Tensor]]:
    """A flat copy of gradients, to be summed over ``axes``, and the view of each into it."""
    flat = comm.empty(sum(gradient.numel() for gradient in gradients), gradients[0], axes)
    torch.cat([gradient.reshape(-1) for gradient in gradients], out=flat)
    return flat, views_into(flat, gradients)


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduction: GradientReduction, flight: Flight, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.reduction, ctx.flight = reduction, flight
        ctx.set_materialize_grads(False)  # where reduction is deferred there are none
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.reduction.landed(ctx.flight, gradients)


class _Bucket(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        reduction: GradientReduction,
        comm: Communicator,
        axes: Axes,
        flight: Flight | None,
        keys: Sequence[str],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.reduction, ctx.comm, ctx.axes, ctx.keys, ctx.flight = reduction, comm, axes, keys, flight
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        owned = len(gradients) == 1 and gradients[0] is not None and is_owned(gradients[0])
        reduced = ctx.reduction.reduce(ctx.keys, ctx.parameters, gradients, ctx.comm, ctx.axes, ctx.flight, owned)
        return None, None, None, None, None, *reduced


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduction: GradientReduction, key: str, parameter: Tensor) -> Tensor:
        ctx.reduction, ctx.key = reduction, key
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.reduction.late(ctx.key, gradient)
