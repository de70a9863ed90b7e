"""Operators on local parts that torch does not have: what `local` calls where the same operator would be wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shardwright.compiler.capture import operators
from shardwright.compiler.capture.tracing import written
from shardwright.compiler.lower.operators.attention import attention_by as attention_by
from shardwright.compiler.lower.operators.attention import attention_with_dropout as attention_with_dropout
from shardwright.compiler.lower.operators.batch_norm import batch_norm as batch_norm
from shardwright.compiler.lower.operators.batch_norm import batch_norm_of_replica as batch_norm_of_replica
from shardwright.compiler.lower.operators.batch_norm import batch_norm_per_replica as batch_norm_per_replica
from shardwright.compiler.lower.operators.batch_norm import batch_norm_running as batch_norm_running
from shardwright.compiler.lower.operators.batch_norm import sum_in_place as sum_in_place
from shardwright.compiler.lower.operators.experts import experts as experts
from shardwright.compiler.lower.operators.guard import Guard
from shardwright.compiler.lower.operators.ring_attention import balanced_ring_attention as balanced_ring_attention
from shardwright.compiler.lower.operators.ring_attention import causal_attention as causal_attention
from shardwright.compiler.lower.operators.ring_attention import ring_attention as ring_attention
from shardwright.compiler.mesh.collectives import Axes, Communicator

Sizes = Sequence[int]


class _Readers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, cast: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.dtype = source.dtype
        ctx.set_materialize_grads(False)
        return tuple(cast.view_as(cast) for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        last, *others = [gradient for gradient in reversed(gradients) if gradient is not None]
        total = last.to(ctx.dtype, copy=True)
        for gradient in others:
            total += gradient  # added as numbers of the wider dtype, to which each is exact
        return total, None, None


def readers_of(cast: Tensor, source: Tensor, count: int) -> Sequence[Tensor]:
    """Return a cast of ``source`` for each of its readers, whose gradients are cast back one by one and then summed."""
    if not (torch.is_grad_enabled() and source.requires_grad):
        return [cast] * count
    found: tuple[Tensor, ...] = _Readers.apply(source, cast.detach(), count)  # type: ignore[no-untyped-call]
    return found


class _AddedElsewhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, broadcast: Sizes, factor: float) -> Tensor:
        ctx.bias = bias.shape, bias.dtype, tuple(broadcast), factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        shape, dtype, broadcast, factor = ctx.bias
        return gradient, (gradient.sum_to_size(broadcast) * factor).reshape(shape).to(dtype), None, None


def added_elsewhere(x: Tensor, bias: Tensor, broadcast: Sizes | None = None, factor: float = 1) -> Tensor:
    """``x``, an addend of a sum over ranks to which another rank adds ``factor * bias`` in the shape ``broadcast``.

    The gradient of the bias is that of the whole sum: every rank makes it for itself, and none has to send it.
    """
    found: Tensor = _AddedElsewhere.apply(x, bias, broadcast or bias.shape, factor)  # type: ignore[no-untyped-call]
    return found


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shapes: Sequence[Sizes], dtypes: Sequence[torch.dtype], connected: Sequence[bool], *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.operands = [
            (x.shape, x.dtype) if wanted else None for x, wanted in zip(operands, ctx.needs_input_grad[3:], strict=True)
        ]
        ctx.device = operands[0].device
        ctx.set_materialize_grads(False)
        made = [torch.zeros(tuple(s), dtype=d, device=ctx.device) for s, d in zip(shapes, dtypes, strict=True)]
        ctx.mark_non_differentiable(
            *(x for x, differentiable in zip(made, connected, strict=True) if not differentiable)
        )
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(gradient is None for gradient in gradients):  # as operators of torch pass it on
            return None, None, None, *(None for _ in ctx.operands)
        zeros = [x and torch.zeros(x[0], dtype=x[1], device=ctx.device) for x in ctx.operands]
        return None, None, None, *zeros


def nothing(
    shapes: Sequence[Sizes], dtypes: Sequence[torch.dtype], connected: Sequence[bool], *operands: Tensor
) -> Tensor | tuple[Tensor, ...]:
    """Return what an operator makes of an empty part: results that are empty, or that add nothing to a sum over ranks.

    Many operators of torch refuse empty tensors. The results that are ``connected`` have a gradient on other ranks:
    they have one here, too, of every operand that has one, so that the backward comes to the same collectives.
    """
    results: tuple[Tensor, ...] = _Nothing.apply(shapes, dtypes, connected, *operands)  # type: ignore[no-untyped-call]
    return results[0] if len(results) == 1 else results


def nothing_but_bias(
    shape: Sizes, dtype: torch.dtype, bias: Tensor, broadcast: Sizes, factor: float, *operands: Tensor
) -> Tensor:
    """Return what a product with nothing to sum over makes here: zeros, to which another rank adds the bias."""
    [nothing_here] = _Nothing.apply([shape], [dtype], [True], *operands)  # type: ignore[no-untyped-call]
    return added_elsewhere(nothing_here, bias, broadcast, factor)


def linear_bias_elsewhere(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x @ weight.T``: one addend of a sum over ranks, to which another rank adds the bias."""
    return added_elsewhere(functional.linear(x, weight), bias)


def product_bias_elsewhere(bias: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """``alpha * (a @ b)``: one addend of a sum over ranks, to which another rank adds ``beta * bias``."""
    product = a @ b
    return added_elsewhere(product if alpha == 1 else product * alpha, bias, factor=beta)


def convolution_bias_elsewhere(op: str, x: Tensor, weight: Tensor, bias: Tensor, *settings: Any) -> Tensor:
    """The convolution ``op`` without its bias: one addend of a sum over ranks, to which another rank adds the bias."""
    result = getattr(torch.ops.aten, op)(x, weight, None, *settings)
    return added_elsewhere(result, bias, (len(bias), *[1] * (weight.ndim - 2)))


def grouped_mm(x: Tensor, matrices: Tensor, ends: Tensor, first: int, last: int) -> Tensor:
    """Return `written.grouped_mm` of the rows from ``first`` to ``last``; ``ends`` counts them all."""
    return written.grouped_mm(x, matrices, ends.clamp(first, last) - first)


def copy(x: Tensor, source: Tensor) -> Tensor:
    """``source`` in the shape and dtype of ``x``: torch's functional copy has no derivative."""
    return source.to(x.dtype).expand_as(x)


def scatter_of_complex(op: str, x: Tensor, source: Tensor, *where: Any) -> Tensor:
    """Return ``x`` with a slice of it replaced, as ``op`` does it: torch knows its derivative for real numbers alone.

    A dim ``where`` is counted from the front, as the real tensors have one dim more.
    """
    real = (torch.view_as_real(each.resolve_conj()) for each in (x, source.to(x.dtype)))
    return torch.view_as_complex(getattr(torch.ops.aten, op)(*real, *where))


def mean(x: Tensor, dims: Sequence[int], keepdim: bool, count: int, dtype: torch.dtype | None) -> Tensor:
    """The local part of a mean over ``dims`` that have ``count`` elements on all ranks together."""
    return x.sum(tuple(dims), keepdim=keepdim, dtype=dtype) / count


def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int, first_row: int, rows: int, guard: Guard, number: int
) -> Tensor:
    """The lookup in the part of a table of ``rows`` rows that starts at ``first_row``; rows elsewhere give zeros.

    Indices below the first part and above the last one are not masked: torch refuses them. Where ``guard`` guards the
    operator, of the ``number`` that it has in the graph, they give no numbers, so that the loss is none.
    """
    held = weight.shape[0]
    local = indices - first_row
    outside = torch.zeros_like(indices, dtype=torch.bool)
    if first_row > 0 or guard.on:
        outside |= local < 0
    if first_row + held < rows or guard.on:
        outside |= local >= held
    padding = padding_idx - first_row
    found = functional.embedding(
        local.masked_fill(outside, 0), weight, padding if padding_idx >= 0 and 0 <= padding < held else None
    ).masked_fill(outside.unsqueeze(-1), 0)
    if guard.on:
        wrong = (indices < 0) | (indices >= rows)
        guard.note(number, indices, wrong)
        found = found.masked_fill(wrong.unsqueeze(-1), math.nan)
    return found


def widened(logits: Tensor) -> Tensor:
    """Return logits of half precision in float32, and others as they are."""
    return logits.float() if logits.dtype in operators.HALF else logits


class _CrossEntropy(torch.autograd.Function):
    """The summed cross entropy of samples of whose logits each rank along ``axes`` has those of some classes.

    With l the logarithm of the summed exponentials of all logits of a sample, its loss is l − x of its class, and the
    gradient of a logit x is exp(x − l), less one for its class. Each rank works out l and the loss of a share of the
    samples, from what all ranks have of them.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignored: int, first: int, comm: Communicator, axes: Axes
    ) -> Tensor:
        counted = target != ignored
        local = target - first
        here = counted & (local >= 0) & (local < logits.shape[1])
        given, logits = logits, widened(logits)
        at = torch.where(here, local, 0).unsqueeze(1)
        chosen = torch.where(here, logits.gather(1, at).squeeze(1), 0) if logits.shape[1] else logits.sum(1)
        ranks = comm.mesh.group(comm.rank, axes)
        share = max(1, math.ceil(counted.numel() / len(ranks)))
        ours = torch.stack([logits.logsumexp(1).flatten(), chosen.flatten(), counted.flatten().to(logits.dtype)])
        shares = functional.pad(ours, (0, share * len(ranks) - counted.numel())).view(3, -1, share).unbind(1)
        found = torch.stack(comm.all_to_all([part[:2].contiguous() for part in shares], axes))
        total, counts = found[:, 0].logsumexp(0), shares[ranks.index(comm.rank)][2]
        loss = torch.where(counts > 0, total - found[:, 1].sum(0), 0).sum(0, keepdim=True)
        everyone = comm.all_gather(torch.cat([total, loss]), axes)
        totals = everyone[:, :-1].flatten()[: counted.numel()].view_as(counted)
        ctx.save_for_backward(given, totals, counted, here, at)
        return everyone[:, -1].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        logits, total, counted, here, at = ctx.saved_tensors
        found = (widened(logits) - total.unsqueeze(1)).exp_()
        if logits.shape[1]:
            found.scatter_add_(1, at, -here.unsqueeze(1).to(found.dtype))
        return found.mul_(counted.unsqueeze(1) * gradient).to(logits.dtype), None, None, None, None, None


def cross_entropy(
    logits: Tensor, target: Tensor, ignored: int, first: int, classes: int, guard: Guard, number: int,
    comm: Communicator, axes: Axes,
) -> Tensor:  # fmt: skip
    """The summed cross entropy over all ``classes``, of which ``logits`` (n, c, ...) has those from ``first`` on.

    Two collectives forward, none backward. Targets that are no class are refused as torch refuses them; where ``guard``
    is on for the operator, of the ``number`` that it has in the graph, the loss is no number then.
    """
    wrong = (target != ignored) & ((target < 0) | (target >= classes))
    if not guard.on and wrong.any():
        raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")
    found: Tensor = _CrossEntropy.apply(logits, target, ignored, first, comm, axes)  # type: ignore[no-untyped-call]
    if guard.on:
        guard.note(number, target, wrong)
        found = found.masked_fill(wrong.any(), math.nan)
    return found
