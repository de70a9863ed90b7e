"""Operators on local parts that torch does not have: what `local` calls where the same operator would be wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shardwright.graph.tracing import written
from shardwright.lower.attention import attention_with_dropout as attention_with_dropout
from shardwright.lower.attention import causal_attention as causal_attention
from shardwright.lower.guard import Guard
from shardwright.mesh.collectives import Axes, Communicator

Sizes = Sequence[int]
_MANY = 1 << 17  # values, from which statistics are worth several calls
_CACHED = 1 << 18  # values that stay in the caches of a CPU from one operator to the next


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
    def forward(ctx: Any, shape: Sizes, dtype: torch.dtype, *operands: Tensor) -> Tensor:
        ctx.operands = [
            (x.shape, x.dtype) if wanted else None for x, wanted in zip(operands, ctx.needs_input_grad[2:], strict=True)
        ]
        return torch.zeros(tuple(shape), dtype=dtype, device=operands[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [x and torch.zeros(x[0], dtype=x[1], device=gradient.device) for x in ctx.operands]
        return None, None, *zeros


def nothing(shapes: Sequence[Sizes], dtypes: Sequence[torch.dtype], *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
    """What an operator makes of an empty part: results that are empty, or that add nothing to a sum over ranks.

    Many operators of torch refuse empty tensors. The operands take part in the backward, as on other ranks.
    """
    results = tuple(
        _Nothing.apply(shape, dtype, *operands)  # type: ignore[no-untyped-call]
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return results[0] if len(results) == 1 else results


def nothing_but_bias(
    shape: Sizes, dtype: torch.dtype, bias: Tensor, broadcast: Sizes, factor: float, *operands: Tensor
) -> Tensor:
    """What a product with nothing to sum over makes here: zeros, to which another rank adds the bias."""
    nothing_here: Tensor = _Nothing.apply(shape, dtype, *operands)  # type: ignore[no-untyped-call]
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
    """What `written.grouped_mm` gives of rows, for those from ``first`` to ``last``; ``ends`` counts them all."""
    return written.grouped_mm(x, matrices, ends.clamp(first, last) - first)


def copy(x: Tensor, source: Tensor) -> Tensor:
    """``source`` in the shape and dtype of ``x``: torch's functional copy has no derivative."""
    return source.to(x.dtype).expand_as(x)


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


class _BatchNorm(torch.autograd.Function):
    """Normalisation over the batches of all ranks along ``axes``, by torch's own kernels where they go over values.

    With n values per channel in all, centred and scaled to x̂, and sums over all of them,
    dx = weight / σ · (dy − Σdy / n − x̂ · Σ(dy · x̂) / n). But for dy itself it is a normalisation of x again, whose
    weight and bias are these sums.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comm: Communicator, axes: Axes,
        counts: Sizes,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        mean, variance = _merged(_statistics(x), comm, axes, counts)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, variance, scale)
        ctx.communication = comm, axes, sum(counts)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, scale, variance)
        return _normalised(x, weight, bias, mean, variance, eps), mean, scale, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight, mean, variance, scale = ctx.saved_tensors
        comm, axes, count = ctx.communication
        values, gradient = x.to(mean.dtype), gradient.to(mean.dtype)
        sums = _gradient_sums(values, gradient, mean, scale)
        kind = mean.dtype if weight is None else weight.dtype
        d_weight, d_bias = (
            part.to(kind) if wanted else None for part, wanted in zip(sums, ctx.needs_input_grad[1:3], strict=True)
        )
        total_normal, total = comm.all_reduce(sums.clone(), axes)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, d_bias, None, None, None, None
        factor = scale if weight is None else scale * weight
        less = factor / -count
        d_x = _normalised(values, less * total_normal, less * total, mean, variance, ctx.eps)
        d_x.addcmul_(gradient, factor.view(_along_channels(x)))
        return d_x.to(x.dtype), d_weight, d_bias, None, None, None, None


def _along_channels(x: Tensor) -> list[int]:
    """The shape in which a number for each channel meets those of ``x``."""
    return [1, -1, *[1] * (x.ndim - 2)]


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    if not x.numel():
        return x.clone()
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled)


def _statistics(x: Tensor) -> Tensor:
    """The mean and the variance of every channel: (2, channels), float32 at least."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    if not x.numel():
        return values.new_zeros(2, x.shape[1])
    if x.device.type != "cpu":
        variance, mean = torch.var_mean(values, [dim for dim in range(x.ndim) if dim != 1], correction=0)
    elif x.numel() < _MANY:
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
    else:
        mean, variance = _statistics_by_differences(values)
    return torch.stack([mean, variance])


def _statistics_by_differences(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance from sums of differences from about the mean.

    Of many values on a CPU they take less than half of the time of torch's own kernel.
    """
    count = x.numel() // x.shape[1]
    about = x.sum([dim for dim in range(x.ndim) if dim != 1]) / count
    apart = x - about.view(_along_channels(x))
    squares, rest = _gradient_sums(apart, apart, torch.zeros_like(about), torch.ones_like(about)) / count
    return about + rest, squares - rest.square()


def _gradient_sums(x: Tensor, gradient: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Σ(dy · x̂) and Σdy of the values here, for every channel, where x̂ is x centred by ``mean`` and scaled."""
    if not x.numel():
        return mean.new_zeros(2, len(mean))
    some_weight = scale  # neither sum has it as a factor, but on a GPU both are made like it
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, x, some_weight, None, None, mean, scale, True, 0.0, [False, True, True]
    )
    return torch.stack([of_weight, of_bias])


def _merged(local: Tensor, comm: Communicator, axes: Axes, counts: Sizes) -> tuple[Tensor, Tensor]:
    """The mean and the variance of all ranks together, of which rank i has ``counts[i]`` values.

    Chan, Golub, LeVeque, *Updating formulae and a pairwise algorithm for computing sample variances* (1979): sums of
    x and x² would lose everything in float32 when the mean is large.
    """
    means, variances = comm.all_gather(local, axes).unbind(1)
    if len(set(counts)) == 1:
        between, mean = torch.var_mean(means, 0, correction=0)
        return mean, variances.mean(0) + between
    # Made on the device: what is copied there is waited for.
    weights = torch.cat([local.new_full((1, 1), count / sum(counts)) for count in counts])
    base = means[next(i for i, count in enumerate(counts) if count)]  # differences from it stay small
    mean = base + (weights * (means - base)).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comm: Communicator, axes: Axes, counts: Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation of ``x`` (n, channels, ...) with the statistics of all ranks along ``axes``.

    ``counts`` are the values per channel that each of them has, in rank order. Returns the result, the mean and the
    reciprocal standard deviation of every channel. One collective forward, one backward; the gradients of ``weight``
    and ``bias`` are sums over the values here.
    """
    normal, mean, scale, _ = _BatchNorm.apply(x, weight, bias, eps, comm, axes, counts)  # type: ignore[no-untyped-call]
    return normal, mean, scale


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
        at = torch.where(here, local, 0).unsqueeze(1)
        chosen = torch.where(here, logits.gather(1, at).squeeze(1), 0) if logits.shape[1] else logits.sum(1)
        ranks = comm.mesh.group(comm.rank, axes)
        share = max(1, math.ceil(counted.numel() / len(ranks)))
        sums = torch.cat([piece.logsumexp(1) for piece in _in_pieces(logits)])
        ours = torch.stack([sums.flatten(), chosen.flatten(), counted.flatten().to(logits.dtype)])
        shares = functional.pad(ours, (0, share * len(ranks) - counted.numel())).view(3, -1, share).unbind(1)
        found = torch.stack(comm.all_to_all([part[:2].contiguous() for part in shares], axes))
        total, counts = found[:, 0].logsumexp(0), shares[ranks.index(comm.rank)][2]
        loss = torch.where(counts > 0, total - found[:, 1].sum(0), 0).sum(0, keepdim=True)
        everyone = comm.all_gather(torch.cat([total, loss]), axes)
        totals = everyone[:, :-1].flatten()[: counted.numel()].view_as(counted)
        ctx.save_for_backward(logits, totals, counted, here, at)
        return everyone[:, -1].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        logits, total, counted, here, at = ctx.saved_tensors
        found = (logits - total.unsqueeze(1)).exp_()
        if logits.shape[1]:
            found.scatter_add_(1, at, -here.unsqueeze(1).to(found.dtype))
        return found.mul_(counted.unsqueeze(1) * gradient), None, None, None, None, None


def _in_pieces(logits: Tensor) -> Sequence[Tensor]:
    """Of so many samples that a CPU reads them from memory once for several operators."""
    if logits.device.type != "cpu" or logits.numel() <= _CACHED:
        return [logits]
    return torch.split(logits, max(1, _CACHED * len(logits) // logits.numel()))


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


def batch_norm_of_replica(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, counts: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Batch normalisation of each rank's own part; running statistics are its share of the mean over ranks, by values
    per channel.

    Results as of ``aten._native_batch_norm_legit_functional``.
    """
    mine = x.numel() // x.shape[1]
    if mine:
        results = torch.ops.aten._native_batch_norm_legit_functional(
            x, weight, bias, running_mean, running_var, True, momentum, eps
        )
    else:
        scale = x.new_ones(x.shape[1]) if weight is None else weight
        shift = x.new_zeros(x.shape[1]) if bias is None else bias
        shape = _along_channels(x)
        results = (x * scale.view(shape) + shift.view(shape), running_mean, running_var, running_mean, running_var)
    normal, mean, scale, new_mean, new_var = results
    share = mine / sum(counts)
    return normal, mean, scale, new_mean * share, new_var * share


def batch_norm_per_replica(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, comm: Communicator, axes: Axes, counts: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm_of_replica`, with the running statistics of all ranks."""
    results = batch_norm_of_replica(x, weight, bias, running_mean, running_var, momentum, eps, counts)
    sum_in_place(comm, axes, *results[3:])
    return results


def sum_in_place(comm: Communicator, axes: Axes, *shares: Tensor) -> list[Tensor]:
    """Sum tensors over ranks, by one collective for each dtype; the list of no results, as a program wants it."""
    for dtype in dict.fromkeys(share.dtype for share in shares):
        alike = [share for share in shares if share.dtype == dtype]
        with torch.no_grad():
            for share, total in zip(alike, comm.all_reduce_together(alike, axes), strict=True):
                share.copy_(total)
    return []


def batch_norm_running(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, comm: Communicator, axes: Axes, counts: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm`, with the new running mean and (unbiased) running variance behind its results."""
    normal, mean, scale, variance = _BatchNorm.apply(x, weight, bias, eps, comm, axes, counts)  # type: ignore[no-untyped-call]
    new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
    unbiased = variance * sum(counts) / (sum(counts) - 1)
    new_var = torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)
    return normal, mean, scale, new_mean, new_var
