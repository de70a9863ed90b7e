"""Batch normalisation of local parts, with the statistics of all ranks together or of each on its own.

On GPUs the kernels of `torch.nn.SyncBatchNorm` read half precision as it is, and keep their sums in float32: for each
value of a bf16 image they move 16 bytes forward and backward, where operators that cast it before move 60.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler.mesh.collectives import Axes, Communicator

Sizes = Sequence[int]
Running = tuple[Tensor, Tensor, float]
"""The running mean and variance of each channel, and the momentum."""
_WITH_KERNELS = ("cuda",)
_MOST = 2**31 - 1  # values that the kernels count
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class _BatchNorm(torch.autograd.Function):
    """Normalisation over the batches of all ranks along ``axes``, by torch's kernels.

    With n values per channel in all, centred and scaled to x̂, and sums over all of them,
    dx = weight / σ · (dy − Σdy / n − x̂ · Σ(dy · x̂) / n).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running | None, eps: float,
        comm: Communicator, axes: Axes, counts: Sizes,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        of_ranks = comm.all_gather(_statistics(x), axes)
        mean, variance, scale, *new_running = _merged(of_ranks, counts, eps, running)
        ctx.save_for_backward(x, weight, mean, variance, scale)
        ctx.eps, ctx.comm, ctx.axes, ctx.values = eps, comm, axes, sum(counts)
        ctx.mark_non_differentiable(mean, scale, *new_running)
        if _has_kernels(x):
            return _normalised_by_kernel(x, weight, bias, mean, scale), mean, scale, *new_running
        return _normalised(x, weight, bias, mean, variance, eps), mean, scale, *new_running

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight, mean, variance, scale = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        dtype, by_kernels = x.dtype, _has_kernels(x)
        if by_kernels:
            gradient = gradient.contiguous(memory_format=_format(x))
        else:
            x, gradient = x.to(mean.dtype), gradient.to(mean.dtype)
        sums = (_sums_by_kernel if by_kernels else _gradient_sums)(x, gradient, mean, scale)
        means = ctx.comm.all_reduce(sums.clone(), ctx.axes) / ctx.values
        d_x = None
        if wants_x and by_kernels:
            d_x = _d_x_by_kernel(x, gradient, weight, mean, scale, means)
        elif wants_x:
            d_x = _d_x(x, gradient, weight, mean, variance, scale, means, ctx.eps).to(dtype)
        d_weight, d_bias = sums if weight is None else sums.to(weight.dtype)
        of_affine = d_weight if wants_weight else None, d_bias if wants_bias else None
        return d_x, *of_affine, None, None, None, None, None


def _has_kernels(x: Tensor) -> bool:
    """Return whether the kernels of `torch.nn.SyncBatchNorm` take x; what ranks tell each other is the same without."""
    return x.device.type in _WITH_KERNELS and 0 < x.numel() <= _MOST and x.is_contiguous(memory_format=_format(x))


def _format(x: Tensor) -> torch.memory_format:
    """Return the order in which the values of x lie, if they lie in one; the kernels want gradients alike."""
    last = _FORMATS.get(x.ndim)
    return torch.contiguous_format if last is None or not x.is_contiguous(memory_format=last) else last


def _normalised_by_kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor) -> Tensor:
    """Return `_normalised` of values as they are."""
    factor, shift = (part if part is None else part.to(mean.dtype) for part in (weight, bias))
    unread = 0.0  # the kernel has the scale, with eps in it
    return torch.batch_norm_elemt(x, factor, shift, mean, scale, unread)


def _sums_by_kernel(x: Tensor, gradient: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Return `_gradient_sums` of values as they are."""
    of_bias, of_centred, *_ = torch.batch_norm_backward_reduce(gradient, x, mean, scale, None, True, False, False)
    return torch.stack([of_centred * scale, of_bias])


def _d_x_by_kernel(
    x: Tensor, gradient: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, means: Tensor
) -> Tensor:
    """Return `_d_x` of values as they are."""
    of_products, of_gradients = means
    weight = weight if weight is None else weight.to(mean.dtype)
    # The kernel divides sums by whole numbers of 32 bits, which are too few for the values of very many ranks.
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    return torch.batch_norm_backward_elemt(gradient, x, mean, scale, weight, of_gradients, of_products / scale, one)


def _d_x(
    x: Tensor, gradient: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, scale: Tensor, means: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of x; ``means`` are those of dy · x̂ and of dy."""
    of_products, of_gradients = means
    # But for dy itself the gradient is a normalisation of x again, whose weight and bias are the means.
    factor = scale if weight is None else scale * weight
    d_x = _normalised(x, -factor * of_products, -factor * of_gradients, mean, variance, eps)
    return d_x.addcmul_(gradient, factor.view(_along_channels(x)))


def _statistics(x: Tensor) -> Tensor:
    """The mean and the variance of every channel: (2, channels), float32 at least."""
    if _has_kernels(x):
        return torch.stack(torch.batch_norm_update_stats(x, None, None, 0.0))
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    if not x.numel():
        return values.new_zeros(2, x.shape[1])
    dims = [dim for dim in range(x.ndim) if dim != 1]
    if x.device.type != "cpu":
        variance, mean = torch.var_mean(values, dims, correction=0)
        return torch.stack([mean, variance])
    # On a CPU torch's own kernel takes four times as long as sums of differences from about the mean.
    count = x.numel() // x.shape[1]
    about = values.sum(dims) / count
    apart = values - about.view(_along_channels(x))
    squares, rest = _gradient_sums(apart, apart, torch.zeros_like(about), torch.ones_like(about)) / count
    return torch.stack([about + rest, squares - rest.square()])


def _merged(of_ranks: Tensor, counts: Sizes, eps: float, running: Running | None) -> list[Tensor]:
    """The mean, the variance and 1 / root(variance + eps) of the values of all ranks, and the new running statistics.

    ``of_ranks`` has the means and the variances (ranks, 2, channels) of each of them, of which rank i has ``counts[i]``
    values. All ranks get the same numbers.

    Chan, Golub, LeVeque, *Updating formulae and a pairwise algorithm for computing sample variances* (1979): sums of
    x and x² would lose everything in float32 when the mean is large.
    """
    means, variances = of_ranks.double().unbind(1)
    values = sum(counts)
    # Made on the device: what is copied there is waited for.
    shares = torch.cat([means.new_full((len([*same]), 1), count / values) for count, same in groupby(counts)])
    base = means[next(rank for rank, count in enumerate(counts) if count)]  # differences from it stay small
    mean = base + (shares * (means - base)).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    new = list[Tensor]()
    if running is not None:
        *before, momentum = running
        unbiased = variance * values / (values - 1)
        for old, found in zip(before, (mean, unbiased), strict=True):
            new.append(torch.lerp(old.double(), found, momentum).to(old.dtype))
    return [part.to(of_ranks.dtype) for part in (mean, variance, (variance + eps).rsqrt())] + new


def _along_channels(x: Tensor) -> list[int]:
    """The shape in which a number for each channel meets those of ``x``."""
    return [1, -1, *[1] * (x.ndim - 2)]


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    if not x.numel():
        return x.clone()
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled)


def _gradient_sums(x: Tensor, gradient: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Σ(dy · x̂) and Σdy of the values here, for every channel, where x̂ is x centred and scaled: (2, channels)."""
    if not x.numel():
        return mean.new_zeros(2, len(mean))
    some_weight = scale  # neither sum has it as a factor, but on a GPU both are made like it
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, x, some_weight, None, None, mean, scale, True, 0.0, [False, True, True]
    )
    return torch.stack([of_weight, of_bias])


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comm: Communicator, axes: Axes, counts: Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation of ``x`` (n, channels, ...) with the statistics of all ranks along ``axes``.

    ``counts`` are the values per channel that each of them has, in rank order. Returns the result, the mean and the
    reciprocal standard deviation of every channel. One collective forward, one backward; the gradients of ``weight``
    and ``bias`` are sums over the values here.
    """
    return _BatchNorm.apply(x, weight, bias, None, eps, comm, axes, counts)  # type: ignore[no-any-return, no-untyped-call]


def batch_norm_running(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, comm: Communicator, axes: Axes, counts: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm`, with the new running mean and (unbiased) running variance behind its results."""
    running = running_mean, running_var, momentum
    return _BatchNorm.apply(x, weight, bias, running, eps, comm, axes, counts)  # type: ignore[no-any-return, no-untyped-call]


def batch_norm_of_replica(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, counts: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise this rank's part of a batch, and return its share of the running statistics.

    The shares of all ranks add up to the mean over ranks, each weighted by its values per channel.

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
            totals = comm.all_reduce(torch.cat([share.reshape(-1) for share in alike]), axes)
            for share, total in zip(alike, torch.split(totals, [share.numel() for share in alike]), strict=True):
                share.copy_(total.view_as(share))
    return []
