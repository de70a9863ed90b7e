"""Random numbers by global position: the same number for an element, however its tensor is split, on any device.

Element i of a tensor under a key gets a hash of (key, i): a counter-based generator in the manner of Salmon et al.,
*Parallel random numbers: as easy as 1, 2, 3* (2011), with a 32-bit integer finaliser in place of rounds of Philox,
since a dropout mask needs few bits. The two halves of the key enter before and between the multiplications, so that
the streams of two keys are not shifts or permutations of each other.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

_WORD = 1 << 32
# The multipliers of the finaliser: odd, with few bits of bias after three xor-shifts.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B  # also in `mask_kernel`
_CACHED_WORDS = 1 << 16


def uniform(
    key: int, shape: Sequence[int], offsets: Sequence[int], local_shape: Sequence[int], device: torch.device
) -> Tensor:
    """Numbers in [0, 1), float32 and uniform on its 2^24 steps, for a part of a tensor of global ``shape``.

    The part has ``local_shape`` and starts at ``offsets``.
    """

    def write(word: Tensor, numbers: Tensor) -> None:
        numbers.copy_((word >> 8).bitwise_and_(0xFFFFFF)).mul_(2.0**-24)

    return _filled(torch.float32, write, key, shape, offsets, local_shape, device)


def fine(
    key: int, shape: Sequence[int], offsets: Sequence[int], local_shape: Sequence[int], device: torch.device
) -> Tensor:
    """The numbers of `uniform` to 2^52 steps, in float64: the middles of these, none of which is 0 or 1."""

    def write(first: Tensor, second: Tensor, numbers: Tensor) -> None:
        numbers.copy_((first >> 6).bitwise_and_(0x3FFFFFF)).mul_(1 << 26)
        numbers.add_((second >> 6).bitwise_and_(0x3FFFFFF)).add_(0.5).mul_(2.0**-52)

    return _filled(torch.float64, write, key, shape, offsets, local_shape, device, words=2)


def integers(
    key: int, low: int, high: int, shape: Sequence[int], offsets: Sequence[int], local_shape: Sequence[int],
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Whole numbers of [low, high), int64. The other arguments as of `uniform`.

    A number is as likely as another to within one in 2^16, and where more than 2^16 are drawn from, to within the
    number of them in 2^63.
    """
    span = high - low

    def write(word: Tensor, numbers: Tensor) -> None:
        numbers.copy_(word).bitwise_and_(_WORD - 1).mul_(span).bitwise_right_shift_(32).add_(low)

    def write_wide(first: Tensor, second: Tensor, numbers: Tensor) -> None:
        numbers.copy_(first).bitwise_left_shift_(32).bitwise_or_(second.to(torch.int64).bitwise_and_(_WORD - 1))
        if span < 1 << 63:
            numbers.bitwise_and_((1 << 63) - 1).remainder_(span)
        elif span < 1 << 64:  # 64 bits without a sign from ``span`` on are, as int64, the negative ones from here on
            beyond = (numbers < 0) & (numbers >= span - (1 << 64))
            numbers.sub_(beyond * (span - (1 << 64)))
        numbers.add_(low)

    wide = span > 1 << 16
    written = write_wide if wide else write
    return _filled(torch.int64, written, key, shape, offsets, local_shape, device, words=1 + wide)


def stream(key: int, number: int) -> int:
    """The key of another stream of numbers, for an operator that draws several times."""
    return mixed(mixed(key) + number)


def kept(
    key: int, p: float, shape: Sequence[int], offsets: Sequence[int], local_shape: Sequence[int], device: torch.device
) -> Tensor:
    """Return which elements survive, as bools: each with probability ``1 - p``. Arguments as of `uniform`."""
    threshold = round((1 - p) * _WORD)
    if threshold in (0, _WORD):
        return torch.full(tuple(local_shape), threshold > 0, device=device)

    if device.type == "cuda" and (mask := one_kernel(device)) is not None:
        return mask(*_runs(shape, offsets, local_shape, device), mixed(key), threshold).view(tuple(local_shape))

    def write(word: Tensor, mask: Tensor) -> None:
        torch.lt(word, threshold - _WORD // 2, out=mask)

    return _filled(torch.bool, write, key, shape, offsets, local_shape, device)


def words_below(key: int, p: float) -> tuple[int, int, int] | None:
    """Return what a kernel compares words with: the halves of the mixed key, and the limit of those that survive.

    None where all survive, or none.
    """
    threshold = round((1 - p) * _WORD)
    if threshold in (0, _WORD):
        return None
    return _signed(mixed(key)), _signed(mixed(key) >> 32), threshold - _WORD // 2


def positions(shape: Sequence[int], offsets: Sequence[int], local_shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the global positions of the elements of a part, one after the other, modulo 2^32, as int32."""
    bases, length = _runs(shape, offsets, local_shape, device)
    return (bases[:, None] + torch.arange(length, dtype=torch.int32, device=device)).flatten()


Mask = Callable[[Tensor, int, int, int], Tensor]
"""Of runs (as of `_runs`), a mixed key and a threshold makes the mask that `kept` gives, a row for each run."""


@cache
def one_kernel(device: torch.device) -> Mask | None:
    """Return what makes a mask on a GPU in one pass over memory in place of a dozen; None where that cannot be.

    The kernel is used after it has given here the bits of the operators that are called without it.

    Cached by the device. It does not matter for numbers which of the two is given: both give the same bits.
    """

    def mask(bases: Tensor, length: int, key: int, threshold: int) -> Tensor:
        return below(bases, length, _signed(key), _signed(key >> 32), threshold - _WORD // 2)

    bases = torch.arange(67, dtype=torch.int32, device=device) * 64_000_003
    key, threshold = mixed(1), _WORD // 3
    try:
        from shardwright.compiler.lower.operators.mask_kernel import below  # triton comes with torch for GPUs alone

        expected = [
            _below(rows, 1001, _signed(key), _signed(key >> 32), threshold - _WORD // 2) for rows in (bases, bases[:1])
        ]
        found = [mask(rows, 1001, key, threshold) for rows in (bases, bases[:1])]
        problem = "" if all(map(torch.equal, found, expected)) else "the kernel gives other bits"
    except Exception as error:  # there are as many as there are compilers that may be missing
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if not problem:
        return mask
    warnings.warn(f"each dropout mask is made by a dozen kernels, as it cannot be by one: {problem}", stacklevel=2)
    return None


def _below(bases: Tensor, length: int, first: int, second: int, limit: int) -> Tensor:
    """Return whether the words of runs are below a limit."""
    position = bases[:, None] + torch.arange(length, dtype=torch.int32, device=bases.device)
    return _finalised(position, first, second) < limit


def mixed(value: int) -> int:
    """A well mixed 64-bit integer: the finaliser of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) % (1 << 64)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return value ^ (value >> 31)


def _signed(word: int) -> int:
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _filled(
    dtype: torch.dtype, write: Callable[..., None], key: int, shape: Sequence[int], offsets: Sequence[int],
    local_shape: Sequence[int], device: torch.device, words: int = 1,
) -> Tensor:  # fmt: skip
    """A tensor of ``local_shape`` into whose blocks ``write`` turned some words of 32 random bits for each element."""
    bases, length = _runs(shape, offsets, local_shape, device)
    filled = torch.empty(len(bases), length, dtype=dtype, device=device)
    # A dozen passes over a block in the cache are several times as fast as over the whole tensor; a GPU has no need.
    block = _CACHED_WORDS if device.type == "cpu" else max(filled.numel(), 1)
    columns = max(min(length, block), 1)
    rows = block // columns
    step = torch.arange(columns, dtype=torch.int32, device=device)
    keys = [mixed(key), *(stream(key, number) for number in range(1, words))]
    for column in range(0, length, columns):
        for row in range(0, len(bases), rows):
            part = filled[row : row + rows, column : column + columns]
            position = (bases[row : row + rows, None] + _signed(column)) + step[: part.shape[1]]
            words_of = [_finalised(position.clone(), _signed(of), _signed(of >> 32)) for of in keys[:-1]]
            last = _finalised(position, _signed(keys[-1]), _signed(keys[-1] >> 32))
            write(*words_of, last, part)
    return filled.view(tuple(local_shape))


def _finalised(word: Tensor, first: int, second: int) -> Tensor:
    """Replace each position by 32 random bits, which depend on the two halves of a key.

    int32 wraps around; >> repeats the sign bit, which is masked away.
    """
    word ^= first
    word ^= (word >> 16).bitwise_and_(0xFFFF)
    word *= _signed(_FIRST)
    word ^= second
    word ^= (word >> 15).bitwise_and_(0x1FFFF)
    word *= _signed(_SECOND)
    word ^= (word >> 16).bitwise_and_(0xFFFF)
    return word


def _runs(
    shape: Sequence[int], offsets: Sequence[int], local_shape: Sequence[int], device: torch.device
) -> tuple[Tensor, int]:
    """The part as runs of consecutive elements: the position of the first of each, and how long all of them are.

    Positions are in row-major order in the whole tensor, modulo 2^32, as int32: beyond 4e9 elements numbers repeat.
    """
    cut = max((dim for dim, size in enumerate(shape) if local_shape[dim] != size), default=0)
    length = math.prod(local_shape[cut:])
    start = sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
    bases = torch.full((1,), start % _WORD, device=device)  # without a copy to the device, which would wait for it
    for dim in range(cut):
        stride = math.prod(shape[dim + 1 :])
        bases = (bases[:, None] + torch.arange(local_shape[dim], device=device) * stride).flatten() % _WORD
    return bases.to(torch.int32), length
