"""Batch normalisation of local parts, with the statistics of all ranks together or of each on its own.

What goes over the values is native code on a CPU (batch_norm.c), which takes a tenth to a half of the time of torch's
kernels. It is those on other devices, where nothing can be compiled, for dtypes that native code does not know, and
where a sample has two or three values of a channel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.common.native_code import compiled
from shardwright.compiler.mesh.collectives import Axes, Communicator

Sizes = Sequence[int]
Running = tuple[Tensor, Tensor, float]
"""The running mean and variance of each channel, and the momentum."""
Kept = tuple[Tensor, ...]
"""What the backward needs of the statistics."""

_MANY = 1 << 17  # values, from which torch's statistics are worth several calls
_FEWEST_IN_A_ROW = 4  # values of a channel in a sample, from which native code is faster
_FEWEST_ALONE = 1 << 17  # values of a part, from which it is, where torch has an operator for what is asked
_MOST_THREADS = 4  # of a rank, up to which one thread of native code is faster than torch's kernels on all


class Merged(NamedTuple):
    """The statistics of every channel over all ranks, at last the running ones, if there are any; ``scale`` is one over
    the root of ``variance + eps``."""

    mean: Tensor
    variance: Tensor
    scale: Tensor
    new_mean: Tensor | None = None
    new_variance: Tensor | None = None


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
    def result(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, of_ranks: Tensor, counts: tuple[int, ...], eps: float,
        running: Running | None,
    ) -> tuple[Tensor, Merged, Kept]:  # fmt: skip
        """``(x − mean) · scale · weight + bias`` with the statistics of all ranks, and these."""
        merged = _merged(of_ranks, counts, eps, running)
        return _normalised(x, weight, bias, merged[:3], eps), merged, merged[:3]

    @staticmethod
    def gradient_sums(x: Tensor, gradient: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
        """Σ(dy · x̂) and Σdy of the values here, for every channel, where x̂ is x centred and scaled: (2, channels), and
        the same to be summed over ranks in place."""
        mean, _, scale = kept
        sums = _gradient_sums(x, gradient, mean, scale)
        return sums, sums.clone()

    @staticmethod
    def gradient(
        x: Tensor, gradient: Tensor, weight: Tensor | None, kept: Kept, eps: float, totals: Tensor, values: int
    ) -> Tensor:
        """The gradient of ``x``, from the sums over all ``values`` of a channel.

        But for dy itself it is a normalisation of x again, whose weight and bias are these sums.
        """
        (total_normal, total), (_, _, scale) = totals, kept
        factor = scale if weight is None else scale * weight
        less = factor / -values
        d_x = _normalised(x, less * total_normal, less * total, kept, eps)
        return d_x.addcmul_(gradient, factor.view(_along_channels(x)))


_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_X = (_POINTER, _NUMBER, _NUMBER, _NUMBER)  # and the sizes in which batch_norm.c takes it
_MERGING = (_POINTER, _POINTER, _NUMBER)  # the statistics of ranks, their shares and their number


class _Natively:
    """By native code: the same of tensors of one dtype on a CPU, in one pass over memory each.

    Behind operators that fill the caches of a core each line of Python here counts.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        def function(name: str, *takes: type) -> Any:
            found = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
            found.argtypes, found.restype = takes, None
            return found

        self._statistics = function("statistics", *_X, _POINTER)
        self._merge = function(
            "merge", *_MERGING, _NUMBER, _REAL, _REAL, _POINTER, _POINTER, _REAL, _POINTER
        )  # fmt: skip
        self._result = function(
            "result", *_X, *_MERGING, _REAL, _REAL, _POINTER, _POINTER, _REAL, _POINTER, _POINTER, _POINTER, _POINTER
        )
        self._gradient_sums = function("gradient_sums", _POINTER, *_X, _POINTER, _POINTER)
        self._gradient = function("gradient", _POINTER, *_X, _POINTER, _POINTER, _POINTER, _REAL, _POINTER)

    @staticmethod
    def takes(x: Tensor, *others: Tensor | None) -> bool:
        """Whether it works out the normalisation of ``x``, with what there is for each channel."""
        if x.is_contiguous():
            size = x.numel() // (x.shape[0] * x.shape[1] or 1)
            if size != 1 and size < _FEWEST_IN_A_ROW:
                return False
        elif x.ndim != 4 or not x.is_contiguous(memory_format=torch.channels_last):
            return False
        return all(other is None or (other.dtype is x.dtype and other.is_contiguous()) for other in others)

    def statistics(self, x: Tensor) -> Tensor:
        samples, channels, size = _sizes(x)
        found = x.new_empty(2, channels)
        self._statistics(x.data_ptr(), samples, channels, size, found.data_ptr())
        return found

    def merged(self, of_ranks: Tensor, counts: tuple[int, ...], eps: float, running: Running | None) -> Merged:
        """As `_merged_step_by_step`."""
        ranks, _, channels = of_ranks.shape
        found = of_ranks.new_empty(5, channels)
        mean, variance, momentum = running or (None, None, 0.0)
        self._merge(
            of_ranks.data_ptr(), _shares(counts), ranks, channels, sum(counts), eps, _at(mean), _at(variance), momentum,
            found.data_ptr(),
        )  # fmt: skip
        return Merged(*found.unbind()[: 3 if running is None else 5])

    def result(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, of_ranks: Tensor, counts: tuple[int, ...],
        eps: float, running: Running | None,
    ) -> tuple[Tensor, Merged, Kept]:  # fmt: skip
        samples, channels, size = _sizes(x)
        found, merged = torch.empty_like(x), of_ranks.new_empty(5, channels)
        mean, variance, momentum = running or (None, None, 0.0)
        self._result(
            x.data_ptr(), samples, channels, size, of_ranks.data_ptr(), _shares(counts), len(counts), sum(counts), eps,
            _at(mean), _at(variance), momentum, _at(weight), _at(bias), merged.data_ptr(), found.data_ptr(),
        )  # fmt: skip
        return found, Merged(*merged.unbind()[: 3 if running is None else 5]), (merged,)

    def gradient_sums(self, x: Tensor, gradient: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
        samples, channels, size = _sizes(x)
        found = x.new_empty(2, 2, channels)
        self._gradient_sums(
            x.data_ptr(), gradient.data_ptr(), samples, channels, size, kept[0].data_ptr(), found.data_ptr()
        )
        sums, totals = found.unbind()
        return sums, totals

    def gradient(
        self, x: Tensor, gradient: Tensor, weight: Tensor | None, kept: Kept, eps: float, totals: Tensor, values: int
    ) -> Tensor:
        samples, channels, size = _sizes(x)
        found = torch.empty_like(x)
        self._gradient(
            x.data_ptr(), gradient.data_ptr(), samples, channels, size, kept[0].data_ptr(), _at(weight),
            totals.data_ptr(), values, found.data_ptr(),
        )  # fmt: skip
        return found


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """As batch_norm.c takes them: where channels come last each place is a sample of its own."""
    samples, channels = x.shape[:2]
    size = x.numel() // (samples * channels)
    return (samples, channels, size) if x.is_contiguous() else (samples * size, channels, 1)


def _at(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


@lru_cache(1024)
def _shares(counts: tuple[int, ...]) -> Any:
    """Of all values those of each rank, as native code takes them.

    Cached by the counts, of which it is a function; native code reads it alone.
    """
    return (ctypes.c_double * len(counts))(*[count / sum(counts) for count in counts])


_left_out = False  # whether native code is, since not all ranks have it


def natively_on_all(of_all_ranks: Callable[[bool], Sequence[bool]]) -> None:
    """Take native code if all ranks have it, else on none, so that replicas of a tensor stay the same to the last bit;
    ``of_all_ranks`` gives what each rank says."""
    global _left_out
    _left_out = False
    _left_out = not all(of_all_ranks(bool(_native())))


def _native() -> Mapping[torch.dtype, _Natively]:
    """By dtype."""
    return {} if _left_out else _compiled()


@cache
def _compiled() -> Mapping[torch.dtype, _Natively]:
    # Sums in several lanes, and nothing of OpenMP that runs; and each operation rounded on its own, as by torch.
    """Return native code by dtype, empty where there is none.

    Cached once, so that a process does not change its roundings between steps: the instructions of its processor stay
    the same, and the number of threads decides when it is first asked, on all ranks together (`natively_on_all`).
    """
    flags = ["-fopenmp-simd", "-ffp-contract=off"]
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        flags += ["-mavx2", "-mfma"]
    if torch.get_num_threads() > _MOST_THREADS:
        return {}
    path = compiled(Path(__file__).with_name("batch_norm.c"), *flags, opens=_opened)
    return {} if path is None else _opened(path)


def _opened(path: Path) -> Mapping[torch.dtype, _Natively]:
    library = ctypes.CDLL(str(path))
    return {dtype: _Natively(library, dtype) for dtype in (torch.float32, torch.float64)}


def _by(x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running | None) -> type[_ByTorch] | _Natively:
    """What works out a normalisation; ranks whose parts differ in size may differ in it."""
    native = _native().get(x.dtype) if x.is_cpu else None
    mean, variance, _ = running or (None, None, 0)
    return native if native is not None and native.takes(x, weight, bias, mean, variance) else _ByTorch


class _BatchNorm(torch.autograd.Function):
    """Normalisation over the batches of all ranks along ``axes``, or of this one alone where there is no ``comm``.

    With n values per channel in all, centred and scaled to x̂, and sums over all of them,
    dx = weight / σ · (dy − Σdy / n − x̂ · Σ(dy · x̂) / n).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running | None, eps: float,
        comm: Communicator | None, axes: Axes, counts: Sizes,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        by = _by(x, weight, bias, running)
        local = by.statistics(x)
        of_ranks = local.unsqueeze(0) if comm is None else comm.all_gather(local, axes)
        y, merged, kept = by.result(x, weight, bias, of_ranks, tuple(counts), eps, running)
        ctx.save_for_backward(x, weight, *kept)
        ctx.told = by, eps, comm, axes, sum(counts)
        ctx.mark_non_differentiable(*[found for found in merged if found is not None])
        return y, *merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight, *kept = ctx.saved_tensors
        by, eps, comm, axes, values = ctx.told
        dtype, kind = x.dtype, kept[0].dtype
        if dtype is not kind:
            x, gradient = x.to(kind), gradient.to(kind)
        if by is not _ByTorch and gradient.stride() != x.stride():
            gradient = torch.empty_like(x).copy_(gradient)
        sums, totals = by.gradient_sums(x, gradient, kept)
        if weight is not None and weight.dtype is not kind:
            sums = sums.to(weight.dtype)
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        d_weight, d_bias = sums.unbind()
        if comm is not None:
            totals = comm.all_reduce(totals, axes)
        d_x = None
        if wants_x:
            d_x = by.gradient(x, gradient, weight, kept, eps, totals, values)
            if dtype is not kind:
                d_x = d_x.to(dtype)
        of_affine = d_weight if wants_weight else None, d_bias if wants_bias else None
        return d_x, *of_affine, None, None, None, None, None


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
    squares, rest = _gradient_sums(apart, apart, torch.zeros_like(about), torch.ones_like(about)) / count
    return about + rest, squares - rest.square()


def _normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, kept: Kept, eps: float) -> Tensor:
    if not x.numel():
        return x.clone()
    mean, variance, _ = kept
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled)


def _gradient_sums(x: Tensor, gradient: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    if not x.numel():
        return mean.new_zeros(2, len(mean))
    some_weight = scale  # neither sum has it as a factor, but on a GPU both are made like it
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, x, some_weight, None, None, mean, scale, True, 0.0, [False, True, True]
    )
    return torch.stack([of_weight, of_bias])


def _merged(of_ranks: Tensor, counts: tuple[int, ...], eps: float, running: Running | None) -> Merged:
    """The statistics of all ranks together from the means and the variances (ranks, 2, channels) of each of them, of
    which rank i has ``counts[i]`` values; and the running ones, with an unbiased variance.

    Chan, Golub, LeVeque, *Updating formulae and a pairwise algorithm for computing sample variances* (1979): sums of
    x and x² would lose everything in float32 when the mean is large. All ranks get the same numbers, but for a last bit
    of the scale, whether they have native code or not.
    """
    if of_ranks.device.type != "cpu":
        return _merged_on_device(of_ranks, counts, eps, running)
    native = _native().get(of_ranks.dtype)
    if native is not None and all(old.dtype is of_ranks.dtype and old.is_contiguous() for old in (running or ())[:2]):
        return native.merged(of_ranks, counts, eps, running)
    return _merged_step_by_step(of_ranks, counts, eps, running)


def _merged_step_by_step(of_ranks: Tensor, counts: tuple[int, ...], eps: float, running: Running | None) -> Merged:
    """In float64 and in the order of the ranks."""
    values = sum(counts)
    (means, variances), shares = of_ranks.double().unbind(1), [count / values for count in counts]
    base = means[next(rank for rank, count in enumerate(counts) if count)]  # differences from it stay small
    mean, variance = torch.zeros_like(base), torch.zeros_like(base)
    for share, of_rank in zip(shares, means, strict=True):
        mean += share * (of_rank - base)
    mean += base
    for share, of_rank, around in zip(shares, means, variances, strict=True):
        variance += share * (around + (of_rank - mean).square())
    scale = 1 / (variance + eps).sqrt()
    new = list[Tensor]()
    if running is not None:
        *before, momentum = running
        unbiased = variance * values / (values - 1)
        for old, found in zip(before, (mean, unbiased), strict=True):
            new.append((old.double() + momentum * (found - old.double())).to(old.dtype))
    return Merged(*(part.to(of_ranks.dtype) for part in (mean, variance, scale)), *new)


def _merged_on_device(of_ranks: Tensor, counts: tuple[int, ...], eps: float, running: Running | None) -> Merged:
    """By few operators. What they need is made on the device: what is copied there is waited for."""
    means, variances = of_ranks.unbind(1)
    values = sum(counts)
    if len(set(counts)) == 1:
        between, mean = torch.var_mean(means, 0, correction=0)
        variance = variances.mean(0) + between
    else:
        weights = torch.cat([of_ranks.new_full((1, 1), count / values) for count in counts])
        base = means[next(rank for rank, count in enumerate(counts) if count)]
        mean = base + (weights * (means - base)).sum(0)
        variance = (weights * (variances + (means - mean).square())).sum(0)
    new = list[Tensor]()
    if running is not None:
        *before, momentum = running
        unbiased = variance * values / (values - 1)
        for old, found in zip(before, (mean, unbiased), strict=True):
            new.append(torch.lerp(old, found.to(old.dtype), momentum))
    return Merged(mean, variance, (variance + eps).rsqrt(), *new)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comm: Communicator, axes: Axes, counts: Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation of ``x`` (n, channels, ...) with the statistics of all ranks along ``axes``.

    ``counts`` are the values per channel that each of them has, in rank order. Returns the result, the mean and the
    reciprocal standard deviation of every channel. One collective forward, one backward; the gradients of ``weight``
    and ``bias`` are sums over the values here.
    """
    normal, *merged = _BatchNorm.apply(x, weight, bias, None, eps, comm, axes, counts)  # type: ignore[no-untyped-call]
    mean, _, scale, *_ = merged
    return normal, mean, scale


def batch_norm_running(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, comm: Communicator | None, axes: Axes, counts: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`batch_norm`, with the new running mean and (unbiased) running variance behind its results."""
    running = running_mean, running_var, momentum
    normal, *merged = _BatchNorm.apply(x, weight, bias, running, eps, comm, axes, counts)  # type: ignore[no-untyped-call]
    mean, _, scale, new_mean, new_variance = merged
    return normal, mean, scale, new_mean, new_variance


def batch_norm_of_replica(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, counts: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Batch normalisation of each rank's own part; running statistics are its share of the mean over ranks, by values
    per channel.

    Results as of ``aten._native_batch_norm_legit_functional``.
    """
    mine = x.numel() // x.shape[1]
    running = running_mean, running_var, momentum
    if x.numel() >= _FEWEST_ALONE and _by(x, weight, bias, running) is not _ByTorch:
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
