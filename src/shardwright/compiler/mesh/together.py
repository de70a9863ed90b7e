"""An all-gather of several small tensors by one collective.

It reads as a local program prints it:

    b1, c1 = all_gather_together(comm, ("dp",), "slice", (b, {"dim": 0, "size": 8}), (c, {"dim": 0, "size": 6}))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.mesh.collectives import (
    Axes,
    Communicator,
    Cut,
    check_rows,
    cut_up,
    narrow,
    padded,
    put_together,
    take,
)


class AllGatherTogether(torch.autograd.Function):
    """An all-gather of several tensors by one collective, whose backward reduce-scatters or slices them."""

    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        cuts: Sequence[Cut],
        adjoint: str,
        reduced_in: torch.dtype | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.comm, ctx.cuts, ctx.adjoint, ctx.reduced_in = comm, cuts, adjoint, reduced_in
        ctx.set_materialize_grads(False)
        whole = _gather(tensors, comm, cuts)
        ctx.shapes, ctx.like = [x.shape for x in whole], tensors[0]
        return tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """One of which what was differentiated does not depend, on all ranks alike, has a place there, and no sum."""
        adjoint = _scatter_sums if ctx.adjoint == "reduce_scatter" else _take
        found = [ctx.like.new_zeros(shape) if x is None else x for x, shape in zip(gradients, ctx.shapes, strict=True)]
        if ctx.reduced_in is not None:
            found = [x.to(ctx.reduced_in) for x in found]
        parts = [part.to(ctx.like.dtype) for part in adjoint(found, ctx.comm, ctx.cuts)]
        return (
            None,
            None,
            None,
            None,
            *(part if x is not None else None for part, x in zip(parts, gradients, strict=True)),
        )


def _gather(tensors: Sequence[Tensor], comm: Communicator, cuts: Sequence[Cut]) -> list[Tensor]:
    parts = [cut.parts(comm) for cut in cuts]
    for x, cut, of in zip(tensors, cuts, parts, strict=True):
        check_rows(x, cut, of.mine[1] - of.mine[0], comm)
    alike = [padded(x, cut.dim, of.widest) for x, cut, of in zip(tensors, cuts, parts, strict=True)]
    rows = comm.all_gather(torch.cat([x.reshape(-1) for x in alike]), cuts[0].axes)
    everyones = torch.split(rows, [x.numel() for x in alike], 1)
    return [
        put_together(everyone.reshape(len(rows), *x.shape), cut.dim, of)
        for everyone, x, cut, of in zip(everyones, alike, cuts, parts, strict=True)
    ]


def _scatter_sums(gradients: Sequence[Tensor], comm: Communicator, cuts: Sequence[Cut]) -> list[Tensor]:
    parts = [cut.parts(comm) for cut in cuts]
    everyones = [cut_up(x, cut.dim, of) for x, cut, of in zip(gradients, cuts, parts, strict=True)]
    mine = comm.reduce_scatter(torch.cat([x.flatten(1) for x in everyones], 1), cuts[0].axes)
    pieces = torch.split(mine, [x[0].numel() for x in everyones])
    return [
        narrow(piece.view(x.shape[1:]), cut.dim, (0, of.mine[1] - of.mine[0])).contiguous()
        for piece, x, cut, of in zip(pieces, everyones, cuts, parts, strict=True)
    ]


def _take(gradients: Sequence[Tensor], comm: Communicator, cuts: Sequence[Cut]) -> list[Tensor]:
    return [take(x, comm, cut) for x, cut in zip(gradients, cuts, strict=True)]


def all_gather_together(
    comm: Communicator,
    axes: Axes,
    adjoint: Literal["slice", "reduce_scatter"],
    *tensors: tuple[Tensor, dict[str, Any]],
    reduced_in: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """`all_gather` of some small tensors of one dtype over ``axes``, each with the other arguments of its own."""
    cuts = [_cut_of(axes, **how) for _, how in tensors]
    parts = (tensor for tensor, _ in tensors)
    found: tuple[Tensor, ...] = AllGatherTogether.apply(comm, cuts, adjoint, reduced_in, *parts)  # type: ignore[no-untyped-call]
    return found


def _cut_of(axes: Axes, dim: int, size: int, within: Axes = (), unit: int = 1) -> Cut:
    return Cut(dim, axes, size, within, unit)
