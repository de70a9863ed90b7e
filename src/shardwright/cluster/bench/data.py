"""Test data with known reductions: what every rank sends, and what each must receive, element by element.

Rank r repeats a pattern of `PERIOD` small whole numbers of its own. Part p of a buffer begins `_SHIFT` times p further
into the pattern, so that a part in the wrong place is wrong in its elements. The period is prime: pieces that a
collective swaps, which have round sizes, do not look alike. All sums are exact in the dtype, so that an element is
right or wrong, without a tolerance; where there are more ranks than a dtype can count, as many of them as it can
contribute to each element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

PERIOD = 65_521
_SHIFT = 4_099
DTYPES = {
    "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64, "half": torch.float16,
    "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64,
}  # fmt: skip
# The largest whole number up to which a dtype has them all, or what is enough.
_LARGEST = {torch.int8: 127, torch.uint8: 255, torch.float16: 2048, torch.bfloat16: 256}
_LARGE_ENOUGH = 1 << 20


def _numbers(rank: int, ranks: int, reduction: str, dtype: torch.dtype) -> Tensor:
    largest = _LARGEST.get(dtype, _LARGE_ENOUGH)
    generator = torch.Generator().manual_seed(7919 * rank + 1)
    place = torch.arange(PERIOD, device="cpu")
    if reduction == "prod":
        doublings = largest.bit_length() - 1
        may = (place + rank) % ranks < doublings
        return 1 + may * torch.randint(0, 2, (PERIOD,), generator=generator, device="cpu")
    most = 1000 if reduction in ("max", "min") else max(1, largest // ranks)
    drawn = torch.randint(0, min(most, 1000, largest) + 1, (PERIOD,), generator=generator, device="cpu")
    return drawn * ((place + rank) % ranks < largest) if reduction == "sum" else drawn


@lru_cache(maxsize=256)
def pattern(rank: int, ranks: int, reduction: str, dtype: torch.dtype) -> Tensor:
    """Return the data that rank ``rank`` of ``ranks`` sends, in ``dtype`` [PERIOD].

    Cached by all that it is made of, a seed among them; callers read it alone.
    """
    return _numbers(rank, ranks, reduction, dtype).to(dtype)


@lru_cache(maxsize=256)
def reduced(ranks: int, reduction: str, dtype: torch.dtype) -> Tensor:
    """Return the patterns of all ranks, reduced [PERIOD].

    Cached by all that it is made of; callers read it alone.
    """
    total = _numbers(0, ranks, reduction, dtype)
    joins: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum,
    }  # fmt: skip
    for rank in range(1, ranks):
        total = joins[reduction](total, _numbers(rank, ranks, reduction, dtype))
    return total.to(dtype)


def _begun(numbers: Tensor, part: int) -> Tensor:
    return numbers.roll(-_SHIFT * part)


def fill(buffer: Tensor, numbers: Tensor, part: int = 0) -> None:
    """Write part ``part`` of the pattern's repetitions into ``buffer`` [n]."""
    numbers = _begun(numbers, part).to(buffer.device)
    whole = buffer.numel() // PERIOD * PERIOD
    buffer[:whole].view(-1, PERIOD).copy_(numbers)
    buffer[whole:].copy_(numbers[: buffer.numel() - whole])


def count_wrong(buffer: Tensor, numbers: Tensor, part: int = 0) -> int:
    """Return the number of elements of ``buffer`` [n] that differ from what `fill` writes there; NaN differs."""
    numbers = _begun(numbers, part).to(buffer.device)
    whole = buffer.numel() // PERIOD * PERIOD
    wrong = (buffer[:whole].view(-1, PERIOD) != numbers).sum()
    return int(wrong + (buffer[whole:] != numbers[: buffer.numel() - whole]).sum())
