"""Which bytes of its memory a tensor lies in, from the first to the last; between them there may be others'."""

from __future__ import annotations

from torch import Tensor


def span(tensor: Tensor) -> tuple[int, int]:
    """Its first byte, counted from the beginning of its storage, and the first byte behind it."""
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + int(last) + 1 if tensor.numel() else begin) * tensor.itemsize


def meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two spans of one storage have a byte in common."""
    return one[0] < other[1] and other[0] < one[1]
