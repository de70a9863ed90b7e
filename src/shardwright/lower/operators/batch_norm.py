"""Batch normalisation of local parts, with the statistics of all ranks together or of each on its own.

What goes over the values is native code on a CPU (batch_norm.c), which takes a tenth to a half of the time of torch's
kernels. It is those on other devices, where nothing can be compiled, for dtypes that native code does not know, and
where a sample has but few values of a channel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.compiler import compiled
from shardwright.mesh.collectives import Axes, Communicator

Sizes = Sequence[int]
_MANY = 1 << 17  # values, from which torch's statistics are worth several calls
_FEWEST_IN_A_ROW = 4  # values of a channel in a sample, from which native code is faster
_MOST_THREADS = 4  # of a rank, up to which one thread of native code is faster than torch's kernels on all


class _ByTorch:
    """By torch's kernels, on any device and with every dtype."""

    @staticmethod
    def statistics(x: Tensor) -> Tensor:
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

    @staticmethod
    def normalised(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, scale: Tensor, eps: float
    ) -> Tensor:
        """``(x − mean) · scale · weight + bias``, where ``scale`` is one over the root of ``variance + eps``."""
        if not x.numel():
            return x.clone()
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    def gradient_sums(x: Tensor, gradient: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Σ(dy · x̂) and Σdy of the values here, for every channel, where x̂ is x centred by ``mean`` and scaled."""
        if not x.numel():
            return mean.new_zeros(2, len(mean))
        some_weight = scale  # neither sum has it as a factor, but on a GPU both are made like it
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, some_weight, None, None, mean, scale, True, 0.0, [False, True, True]
        )
        return torch.stack([of_weight, of_bias])

    @staticmethod
    def gradient(
        x: Tensor, gradient: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, scale: Tensor, eps: float,
        sums: Tensor, count: int,
    ) -> Tensor:  # fmt: skip
        """The gradient of ``x``, from ``sums`` over all ``count`` values of a channel.

        But for dy itself it is a normalisation of x again, whose weight and bias are these sums.
        """
        total_normal, total = sums
        factor = scale if weight is None else scale * weight
        less = factor / -count
        d_x = _ByTorch.normalised(x, less * total_normal, less * total, mean, variance, scale, eps)
        return d_x.addcmul_(gradient, factor.view(_along_channels(x)))


class _Natively:
    """By native code: the same for float32 and float64 on a CPU, in one pass over memory each."""

    def __init__(self, path: Path) -> None:
        library, values, number = ctypes.CDLL(str(path)), ctypes.c_void_p, ctypes.c_int64
        takes = {
            "statistics": (values, number, number, number, values, values),
            "normalise": (values, number, number, number, values, values, values, values, values),
            "gradient_sums": (values, values, number, number, number, values, values, values, values),
            "gradient": (
                values, values, number, number, number, values, values, values, values, values, ctypes.c_double, values,
            ),
        }  # fmt: skip
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, types in takes.items():
            for dtype in (torch.float32, torch.float64):
                function = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
                function.argtypes, function.restype = types, None
                self._functions[name, dtype] = function

    def takes(self, x: Tensor, *others: Tensor | None) -> bool:
        """Whether it works out the normalisation of ``x``, with the weight and what else there is for each channel."""
        return (
            x.dtype in (torch.float32, torch.float64)
            and x.numel() >= _FEWEST_IN_A_ROW * x.shape[0] * x.shape[1] > 0
            and x.is_contiguous()
            and torch.get_num_threads() <= _MOST_THREADS
            and all(other is None or (other.dtype == x.dtype and other.is_contiguous()) for other in others)
        )

    def statistics(self, x: Tensor) -> Tensor:
        """As those of `_ByTorch`, as are all."""
        found = x.new_empty(2, x.shape[1])
        mean, variance = _rows(found)
        self._functions["statistics", x.dtype](x.data_ptr(), *_sizes(x), mean, variance)
        return found

    def normalised(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, scale: Tensor,
        eps: float,
    ) -> Tensor:  # fmt: skip
        found = torch.empty_like(x)
        self._functions["normalise", x.dtype](
            x.data_ptr(), *_sizes(x), mean.data_ptr(), scale.data_ptr(), _at(weight), _at(bias), found.data_ptr()
        )
        return found

    def gradient_sums(self, x: Tensor, gradient: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        found = x.new_empty(2, x.shape[1])
        self._functions["gradient_sums", x.dtype](
            x.data_ptr(), gradient.data_ptr(), *_sizes(x), mean.data_ptr(), scale.data_ptr(), *_rows(found)
        )
        return found

    def gradient(
        self, x: Tensor, gradient: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, scale: Tensor,
        eps: float, sums: Tensor, count: int,
    ) -> Tensor:  # fmt: skip
        gradient, sums = gradient.contiguous(), sums.contiguous()
        found = torch.empty_like(x)
        self._functions["gradient", x.dtype](
            x.data_ptr(), gradient.data_ptr(), *_sizes(x), mean.data_ptr(), scale.data_ptr(), _at(weight),
            *_rows(sums), count, found.data_ptr(),
        )  # fmt: skip
        return found


def _sizes(x: Tensor) -> tuple[int, int, int]:
    samples, channels = x.shape[:2]
    return samples, channels, x.numel() // (samples * channels)


def _at(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def _rows(pair: Tensor) -> tuple[int, int]:
    """Where the two rows of a contiguous tensor lie."""
    at = pair.data_ptr()
    return at, at + pair.shape[1] * pair.element_size()


@cache
def _native() -> _Natively | None:
    flags = ["-fopenmp-simd"]  # sums in several lanes, and nothing of OpenMP that runs
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        flags += ["-mavx2", "-mfma"]
    path = compiled(Path(__file__).with_name("batch_norm.c"), *flags, opens=_Natively)
    return None if path is None else _Natively(path)


def _by(x: Tensor, *others: Tensor | None) -> type[_ByTorch] | _Natively:
    """What works out a normalisation: ranks may differ in it, as what they have to agree in is made by torch."""
    native = _native() if x.device.type == "cpu" else None
    return native if native is not None and native.takes(x, *others) else _ByTorch


class _BatchNorm(torch.autograd.Function):
    """Normalisation over the batches of all ranks along ``axes``, or of this one alone where there is no ``comm``.

    With n values per channel in all, centred and scaled to x̂, and sums over all of them,
    dx = weight / σ · (dy − Σdy / n − x̂ · Σ(dy · x̂) / n).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comm: Communicator | None,
        axes: Axes, counts: Sizes,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        by = _by(x, weight, bias)
        local = by.statistics(x)
        mean, variance = local.unbind() if comm is None else _merged(local, comm, axes, counts)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, variance, scale)
        ctx.communication = comm, axes, sum(counts)
        ctx.by, ctx.eps = by, eps
        ctx.mark_non_differentiable(mean, scale, variance)
        return by.normalised(x, weight, bias, mean, variance, scale, eps), mean, scale, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight, mean, variance, scale = ctx.saved_tensors
        comm, axes, count = ctx.communication
        values, gradient = x.to(mean.dtype), gradient.to(mean.dtype)
        sums = ctx.by.gradient_sums(values, gradient, mean, scale)
        kind = mean.dtype if weight is None else weight.dtype
        d_weight, d_bias = (
            part.to(kind) if wanted else None for part, wanted in zip(sums, ctx.needs_input_grad[1:3], strict=True)
        )
        totals = sums if comm is None else comm.all_reduce(sums.clone(), axes)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, d_bias, None, None, None, None
        d_x = ctx.by.gradient(values, gradient, weight, mean, variance, scale, ctx.eps, totals, count)
        return d_x.to(x.dtype), d_weight, d_bias, None, None, None, None


def _along_channels(x: Tensor) -> list[int]:
    """The shape in which a number for each channel meets those of ``x``."""
    return [1, -1, *[1] * (x.ndim - 2)]


def _statistics_by_differences(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance from sums of differences from about the mean.

    Of many values on a CPU they take less than half of the time of torch's own kernel.
    """
    count = x.numel() // x.shape[1]
    about = x.sum([dim for dim in range(x.ndim) if dim != 1]) / count
    apart = x - about.view(_along_channels(x))
    squares, rest = _ByTorch.gradient_sums(apart, apart, torch.zeros_like(about), torch.ones_like(about)) / count
    return about + rest, squares - rest.square()


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


def batch_norm_running(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, comm: Communicator | None, axes: Axes, counts: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm`, with the new running mean and (unbiased) running variance behind its results."""
    normal, mean, scale, variance = _BatchNorm.apply(x, weight, bias, eps, comm, axes, counts)  # type: ignore[no-untyped-call]
    new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
    unbiased = variance * sum(counts) / (sum(counts) - 1)
    new_var = torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)
    return normal, mean, scale, new_mean, new_var


def batch_norm_of_replica(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, counts: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Batch normalisation of each rank's own part; running statistics are its share of the mean over ranks, by values
    per channel.

    Results as of ``aten._native_batch_norm_legit_functional``.
    """
    mine = x.numel() // x.shape[1]
    if mine and _by(x, weight, bias) is not _ByTorch:
        results = batch_norm_running(x, weight, bias, running_mean, running_var, momentum, eps, None, (), [mine])
    elif mine:
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
