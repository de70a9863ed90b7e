"""Random operators on local parts: what `local_draws` calls, so that numbers do not depend on how a tensor is split.

Each gets the key of its operator in the present step, the global shape of what it draws, and where its part starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.common import torch_private
from shardwright.compiler.lower.operators import randomness
from shardwright.errors import UsageError

Sizes = Sequence[int]


class _Drawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, *operands: Tensor) -> Tensor:
        ctx.operands = [
            (x.shape, x.dtype) if wanted else None for x, wanted in zip(operands, ctx.needs_input_grad[1:], strict=True)
        ]
        return numbers.view_as(numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(x and torch.zeros(x[0], dtype=x[1], device=gradient.device) for x in ctx.operands)


def _drawn(numbers: Tensor, *operands: Tensor | float) -> Tensor:
    """``numbers`` that were drawn by ``operands``, whose gradients are zero, as those of torch are."""
    wanted = [x for x in operands if isinstance(x, Tensor) and x.requires_grad]
    if not wanted or not numbers.is_floating_point():
        return numbers
    result: Tensor = _Drawn.apply(numbers, *wanted)  # type: ignore[no-untyped-call]
    return result


def _demand(condition: Tensor, text: str) -> None:
    """Refuse what is drawn by where a condition does not hold; on a GPU without waiting for it, as torch does."""
    if condition.device.type != "cpu":
        torch_private.assert_on_device(condition, text)
    elif not condition:
        raise UsageError(text)


# Dropout


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (gradient * mask).mul_(ctx.scale), None, None


def kept(p: float, key: int, shape: Sizes, offsets: Sizes, local_shape: Sizes, device: torch.device) -> Tensor:
    """The mask of `native_dropout`, drawn apart from what it masks."""
    return randomness.kept(key, p, shape, offsets, local_shape, device)


def native_dropout(
    x: Tensor, p: float, key: int | Tensor, shape: Sizes, offsets: Sizes, local_shape: Sizes | None = None
) -> tuple[Tensor, Tensor]:
    """Dropout of the part of a tensor of global ``shape`` that starts at ``offsets``, and its mask.

    In place of the key may stand the mask, as `kept` gives it: what is then left is operators of torch alone.
    """
    scale = 1 / (1 - p) if p < 1 else 0.0
    if isinstance(key, Tensor):
        return x * key * scale, key
    mask = randomness.kept(key, p, shape, offsets, local_shape or x.shape, x.device)
    return _Dropout.apply(x, mask, scale), mask  # type: ignore[no-untyped-call]


def dropout(
    x: Tensor, p: float, key: int | Tensor, shape: Sizes, offsets: Sizes, local_shape: Sizes | None = None
) -> Tensor:
    """`native_dropout` without the mask."""
    return native_dropout(x, p, key, shape, offsets, local_shape)[0]


def recurrent(
    op: str, x: Tensor, states: Sequence[Tensor] | Tensor, parameters: Sequence[Tensor], has_biases: bool, layers: int,
    p: float, train: bool, bidirectional: bool, batch_first: bool, key: int, shape: Sizes, offsets: Sizes,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A recurrent network ``op`` layer by layer, so that what is dropped between its layers is drawn by position.

    ``shape`` is the global shape of what a layer gives, of which the part here starts at ``offsets``.
    """
    several = not isinstance(states, Tensor)
    given = tuple(states) if several else (states,)
    split = [state.chunk(layers) for state in given]
    each = len(parameters) // layers
    last: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        own = [parts[layer] for parts in split]
        x, *after = getattr(torch.ops.aten, op).input(
            x, own if several else own[0], list(parameters[layer * each : (layer + 1) * each]), has_biases, 1, 0.0,
            train, bidirectional, batch_first,
        )  # fmt: skip
        last.append(tuple(after))
        if layer < layers - 1:
            x = dropout(x, p, randomness.stream(key, layer), shape, offsets)
    return x, *(torch.cat(parts) for parts in zip(*last, strict=True))


# Uniform numbers


def _between(drawn: Tensor, low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Numbers of [0, 1) as ones of [low, high) in a dtype; those that would be rounded to ``high`` become ``low``."""
    if (low, high) != (0, 1):
        drawn = drawn.to(torch.promote_types(dtype, torch.float32)).mul_(high - low).add_(low)
    numbers = drawn.to(dtype)
    return numbers.masked_fill_(numbers >= high, low) if high > low else numbers


def _uniform(
    key: int, low: float, high: float, shape: Sizes, offsets: Sizes, local_shape: Sizes, dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    if dtype.is_complex:
        parts = (
            _uniform(of, low, high, shape, offsets, local_shape, dtype.to_real(), device)
            for of in (key, randomness.stream(key, 1))
        )
        return torch.complex(*parts)
    numbers = randomness.fine if dtype == torch.float64 else randomness.uniform
    drawn = numbers(key, shape, offsets, local_shape, device)
    return drawn if drawn.dtype == dtype and (low, high) == (0, 1) else _between(drawn, low, high, dtype)


def rand(
    key: int, shape: Sizes, offsets: Sizes, local_shape: Sizes, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Uniform numbers in [0, 1)."""
    return _uniform(key, 0, 1, shape, offsets, local_shape, dtype, device)


def uniform(x: Tensor, low: float, high: float, key: int, shape: Sizes, offsets: Sizes) -> Tensor:
    """Uniform numbers in [low, high), in place of the numbers of ``x``."""
    return _drawn(_uniform(key, low, high, shape, offsets, x.shape, x.dtype, x.device), x)


def rrelu(
    x: Tensor, lower: float, upper: float, key: int, shape: Sizes, offsets: Sizes, with_noise: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """``x`` where it is positive, elsewhere times a slope in [lower, upper) of its own.

    With noise the slopes come along; they are 1 where ``x`` is positive.
    """
    drawn = _uniform(key, lower, upper, shape, offsets, x.shape, x.dtype, x.device)
    slopes = drawn.masked_fill_(~(x <= 0), 1)
    return (x * slopes, slopes) if with_noise else x * slopes


# Whole numbers


def randint(
    key: int, low: int, high: int, shape: Sizes, offsets: Sizes, local_shape: Sizes, dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Whole numbers in [low, high); a dtype that cannot hold all of them has the nearest that it can."""
    drawn = randomness.integers(key, low, high, shape, offsets, local_shape, device)
    if dtype == torch.int64:
        return drawn
    numbers = drawn.to(dtype)
    return numbers.masked_fill_(numbers >= high, low) if dtype.is_floating_point else numbers


def random(x: Tensor, low: int, high: int, key: int, shape: Sizes, offsets: Sizes) -> Tensor:
    """Whole numbers in [low, high), in place of the numbers of ``x``."""
    return _drawn(randint(key, low, high, shape, offsets, x.shape, x.dtype, x.device), x)


def randint_below(x: Tensor, high: Tensor, dtype: torch.dtype, key: int, shape: Sizes, offsets: Sizes) -> Tensor:
    """Whole numbers from 0 to below the one in ``high``, which every rank has, in the shape of ``x``."""
    refuse_range(0, int(high), dtype)
    return randint(key, 0, int(high), shape, offsets, x.shape, dtype, x.device)


def refuse_range(low: int, high: int, dtype: torch.dtype) -> None:
    """Refuse to draw from no number, or from numbers that a dtype does not have.

    Raises:
        UsageError: where it is so.
    """
    if high <= low:
        raise UsageError(f"random numbers from {low} to below {high}: there is none; the first must be the smaller")
    info = torch.finfo(dtype) if dtype.is_floating_point else None if dtype == torch.bool else torch.iinfo(dtype)
    least, most = (info.min, info.max) if info else (0, 1)
    if low < least or high - 1 > most:
        raise UsageError(f"random numbers from {low} to below {high}: {dtype} has {least:g} to {most:g} only")


def randperm(key: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers from 0 to below ``n`` in any order, alike on every rank: the order of as many words of 64 bits."""
    words = randomness.integers(key, -(1 << 63), 1 << 63, (n,), (0,), (n,), device)
    return words.argsort(stable=True).to(dtype)


# Normal numbers


def _standard_normal(key: int, shape: Sizes, offsets: Sizes, local_shape: Sizes, device: torch.device) -> Tensor:
    """Normal numbers in float64, by the inverse of their distribution."""
    # The middles of the 2^24 steps of `uniform`, in float64, are neither 0 nor 1.
    drawn = randomness.uniform(key, shape, offsets, local_shape, device).to(torch.float64).add_(2.0**-25)
    numbers: Tensor = torch.special.ndtri(drawn)
    return numbers


def randn(
    key: int, shape: Sizes, offsets: Sizes, local_shape: Sizes, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Normal numbers; those of a complex dtype have a variance of 1/2 in each of their parts."""
    numbers = _standard_normal(key, shape, offsets, local_shape, device)
    if dtype.is_complex:
        other = _standard_normal(randomness.stream(key, 1), shape, offsets, local_shape, device)
        numbers = torch.complex(numbers, other).mul_(math.sqrt(0.5))
    return numbers.to(dtype)


def normal(
    mean: Tensor | float, std: Tensor | float, key: int, shape: Sizes, offsets: Sizes, local_shape: Sizes,
    dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """Normal numbers, each of its own mean and standard deviation where these are tensors."""
    if isinstance(std, Tensor):
        _demand((std >= 0).all(), "a standard deviation of normal numbers is below 0, or is no number")
    wide = torch.complex128 if dtype.is_complex else torch.float64
    numbers = randn(key, shape, offsets, local_shape, wide, device)
    moved = numbers * (std.detach() if isinstance(std, Tensor) else std)
    moved = moved + (mean.detach() if isinstance(mean, Tensor) else mean)
    return _drawn(moved.to(dtype), mean, std)


def normal_like(x: Tensor, mean: float, std: float, key: int, shape: Sizes, offsets: Sizes) -> Tensor:
    """Normal numbers in place of the numbers of ``x``."""
    return _drawn(normal(mean, std, key, shape, offsets, x.shape, x.dtype, x.device), x)


# Other distributions, by the inverses of their distribution functions


def exponential(x: Tensor, rate: float, key: int, shape: Sizes, offsets: Sizes) -> Tensor:
    """Exponential numbers, all positive, in place of the numbers of ``x``."""
    numbers = randomness.fine(key, shape, offsets, x.shape, x.device).log_().div_(-rate).to(x.dtype)
    return _drawn(numbers.clamp_min_(torch.finfo(x.dtype).tiny), x)


def cauchy(x: Tensor, median: float, sigma: float, key: int, shape: Sizes, offsets: Sizes) -> Tensor:
    """Numbers of a Cauchy distribution in place of the numbers of ``x``."""
    drawn = randomness.fine(key, shape, offsets, x.shape, x.device)
    return _drawn(drawn.sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median).to(x.dtype), x)


def log_normal(x: Tensor, mean: float, std: float, key: int, shape: Sizes, offsets: Sizes) -> Tensor:
    """Numbers whose logarithms are normal, in place of the numbers of ``x``."""
    numbers = _standard_normal(key, shape, offsets, x.shape, x.device).mul_(std).add_(mean).exp_()
    return _drawn(numbers.to(x.dtype), x)


def geometric(x: Tensor, p: float, key: int, shape: Sizes, offsets: Sizes) -> Tensor:
    """Return the trials until the first success, of probability ``p``, in place of the numbers of ``x``."""
    drawn = randomness.fine(key, shape, offsets, x.shape, x.device)
    return _drawn(drawn.log_().div_(math.log1p(-p)).ceil_().clamp_min_(1).to(x.dtype), x)


def bernoulli(x: Tensor, p: float | Tensor, key: int, shape: Sizes, offsets: Sizes) -> Tensor:
    """Ones with probability ``p``, and zeros, of the dtype and shape of ``x``, which starts at ``offsets``."""
    if isinstance(p, Tensor):
        _demand(((p >= 0) & (p <= 1)).all(), "a probability of bernoulli is not between 0 and 1")
    drawn = randomness.fine(key, shape, offsets, x.shape, x.device)
    return _drawn(torch.lt(drawn, p).to(x.dtype), x, p)


def poisson(rates: Tensor, key: int, shape: Sizes, offsets: Sizes) -> Tensor:
    """Numbers of a Poisson distribution for each of ``rates``: the smallest whose distribution function is drawn."""
    _demand(((rates >= 0) & rates.isfinite()).all(), "a rate of Poisson numbers is below 0, or is no finite number")
    wide = rates.detach().double()
    drawn = randomness.fine(key, shape, offsets, rates.shape, rates.device)
    # Between 0 and 9 deviations and 40 above the mean lies all that 2^52 steps can tell apart.
    below, above = torch.full_like(wide, -1), (wide + 9 * wide.sqrt() + 40).floor_()
    for _ in range(int(above.max()).bit_length() if above.numel() else 0):  # when all is found, nothing moves
        middle = ((below + above) / 2).floor_()
        reached = torch.special.gammaincc(middle + 1, wide) >= drawn
        above, below = torch.where(reached, middle, above), torch.where(reached, below, middle)
    return _drawn(above.to(rates.dtype), rates)


# Choices


def multinomial(
    weights: Tensor, samples: int, replacement: bool, key: int, shape: Sizes, offsets: Sizes, local_shape: Sizes
) -> Tensor:
    """Positions in the last dim of ``weights``, chosen by them. Those that weigh nothing are not chosen.

    Without replacement, those come first whose exponential waiting times are shortest. ``shape`` is then that of the
    weights, and else that of the result; so are ``offsets`` and ``local_shape``.
    """
    wide = weights.detach().double()
    sums = wide.sum(-1)
    proper = (wide >= 0).all() & ((sums > 0) & sums.isfinite()).all()
    _demand(proper, "the weights of a multinomial choice are not all 0 or more, or their sum is not above 0 and finite")
    drawn = randomness.fine(key, shape, offsets, local_shape, weights.device)
    if not replacement:
        return (drawn.log_().neg_() / wide).topk(samples, -1, largest=False)[1]
    ends = wide.cumsum(-1)
    found = torch.searchsorted(ends, drawn * ends[..., -1:], right=True)
    return found.clamp_max_(weights.shape[-1] - 1)
