"""An all-gather of several small tensors by one collective.

It reads as a local program prints it:

    b1, c1 = all_gather_together(comm, ("dp",), "slice", (b, {"dim": 0, "size": 8}), (c, {"dim": 0, "size": 6}))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.mesh.collectives import (
    Axes,
    Communicator,
    Cut,
    LateSum,
    cut_up,
    late_sum_of,
    own_rows,
    put_together,
    sent_part,
    take,
)

Begun = Callable[[], list[Tensor]]
"""An all-gather under way, as a function that waits for it and returns its results; it is called once."""


class AllGatherTogether(torch.autograd.Function):
    """An all-gather of several tensors by one collective, whose backward reduce-scatters or slices them."""

    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        cuts: Sequence[Cut],
        adjoint: str,
        reduced_in: torch.dtype | None,
        late: LateSum | None,
        begun: Begun | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.comm, ctx.cuts, ctx.adjoint, ctx.reduced_in, ctx.late = comm, cuts, adjoint, reduced_in, late
        ctx.set_materialize_grads(False)
        whole = _gather(tensors, comm, cuts) if begun is None else begun()
        ctx.shapes, ctx.like = [x.shape for x in whole], [tensor.detach() for tensor in tensors]
        return tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """One of which what was differentiated does not depend, on all ranks alike, has a place there, and no sum."""
        like, there = ctx.like, [x is not None for x in gradients]
        found = [like[0].new_zeros(shape) if x is None else x for x, shape in zip(gradients, ctx.shapes, strict=True)]
        if ctx.reduced_in is not None:
            found = [x.to(ctx.reduced_in) for x in found]

        def parts(of: Sequence[Tensor]) -> list[Tensor | None]:
            return [part.to(like[0].dtype) if is_there else None for part, is_there in zip(of, there, strict=True)]

        if ctx.adjoint != "reduce_scatter":
            summed = parts(_take(found, ctx.comm, ctx.cuts))
        elif ctx.late is None:
            rows, own = _rows_to_sum(found, ctx.comm, ctx.cuts)
            summed = parts(own(ctx.comm.reduce_scatter(rows, ctx.cuts[0].axes)))
        else:
            rows, own = _rows_to_sum(found, ctx.comm, ctx.cuts)
            wait = ctx.comm.start_reduce_scatter(rows, ctx.cuts[0].axes)
            summed = ctx.late.begun(lambda: parts(own(wait())), parts(like))
        return None, None, None, None, None, None, *summed


def _gather(tensors: Sequence[Tensor], comm: Communicator, cuts: Sequence[Cut]) -> list[Tensor]:
    part, whole = _parts_to_gather(tensors, comm, cuts)
    return whole(comm.all_gather(part, cuts[0].axes))


def _parts_to_gather(
    tensors: Sequence[Tensor], comm: Communicator, cuts: Sequence[Cut]
) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Return what a rank sends, and what makes whole tensors of the rows that come of it."""
    alike = [sent_part(x, comm, cut) for x, cut in zip(tensors, cuts, strict=True)]
    shapes = [x.shape for x in alike]

    def whole(rows: Tensor) -> list[Tensor]:
        everyones = torch.split(rows, [shape.numel() for shape in shapes], 1)
        return [
            put_together(everyone.reshape(len(rows), *shape), cut.dim, cut.parts(comm))
            for everyone, shape, cut in zip(everyones, shapes, cuts, strict=True)
        ]

    return torch.cat([x.reshape(-1) for x in alike]), whole


def _rows_to_sum(
    gradients: Sequence[Tensor], comm: Communicator, cuts: Sequence[Cut]
) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Return what every member is sent, as rows, and what makes this rank's parts of the sum of its own."""
    everyones = [cut_up(x, cut.dim, cut.parts(comm)) for x, cut in zip(gradients, cuts, strict=True)]
    shapes = [x.shape[1:] for x in everyones]

    def own(mine: Tensor) -> list[Tensor]:
        pieces = torch.split(mine, [shape.numel() for shape in shapes])
        return [own_rows(piece.view(shape), comm, cut) for piece, shape, cut in zip(pieces, shapes, cuts, strict=True)]

    return torch.cat([x.flatten(1) for x in everyones], 1), own


def _take(gradients: Sequence[Tensor], comm: Communicator, cuts: Sequence[Cut]) -> list[Tensor]:
    return [take(x, comm, cut) for x, cut in zip(gradients, cuts, strict=True)]


def all_gather_together(
    comm: Communicator,
    axes: Axes,
    adjoint: Literal["slice", "reduce_scatter"],
    *tensors: tuple[Tensor, dict[str, Any]],
    reduced_in: torch.dtype | None = None,
    begun: Begun | None = None,
) -> tuple[Tensor, ...]:
    """`all_gather` of some small tensors of one dtype over ``axes``, each with the other arguments of its own."""
    cuts = [_cut_of(axes, **how) for _, how in tensors]
    parts = [tensor for tensor, _ in tensors]
    late = late_sum_of(parts[0])
    found: tuple[Tensor, ...] = AllGatherTogether.apply(comm, cuts, adjoint, reduced_in, late, begun, *parts)  # type: ignore[no-untyped-call]
    return found


def begin_all_gather_together(comm: Communicator, axes: Axes, *tensors: tuple[Tensor, dict[str, Any]]) -> Begun:
    """Begin what `all_gather_together` then waits for."""
    cuts = [_cut_of(axes, **how) for _, how in tensors]
    part, whole = _parts_to_gather([tensor.detach() for tensor, _ in tensors], comm, cuts)
    wait = comm.start_all_gather(part, axes)
    return lambda: whole(wait())


def _cut_of(axes: Axes, dim: int, size: int, within: Axes = (), unit: int = 1) -> Cut:
    return Cut(dim, axes, size, within, unit)
