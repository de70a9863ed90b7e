"""The layout of a safetensors file: https://github.com/huggingface/safetensors.

Eight bytes have the length of the header, which is JSON; then come the elements of one tensor after the other.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.checkpoint.format.manifest import Box
from shardwright.errors import CheckpointError

# The names of its dtypes.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

Described = tuple[torch.dtype, tuple[int, ...]]
"""A tensor's dtype and shape."""


@dataclass(frozen=True)
class FileLayout:
    """A file of tensors: its ``begin``, where in it each tensor starts, in their order, and how long it is."""

    begin: bytes
    starts: Mapping[str, int]
    size_bytes: int


def size_of(tensor: Described) -> int:
    """Return the bytes that the elements of a tensor take."""
    dtype, shape = tensor
    return math.prod(shape) * dtype.itemsize


def lay_out(tensors: Mapping[str, Described]) -> FileLayout:
    """The file of these tensors. Raises `CheckpointError` for a dtype that safetensors does not have."""
    for name, (dtype, _) in tensors.items():
        if dtype not in _DTYPES:
            raise CheckpointError(f"safetensors cannot hold {name}, which is {dtype}; write a .pt file")
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))  # each is then aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for name in order:
        dtype, shape = tensors[name]
        starts[name], end = at, at + size_of(tensors[name])
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return FileLayout(begin, {name: len(begin) + start for name, start in starts.items()}, len(begin) + at)


def write_box(
    descriptor: int, start: int, shape: tuple[int, ...], item_bytes: int, box: Box, memory: memoryview
) -> None:
    """Write the elements of a box of a tensor that begins at ``start`` in a file."""
    if not box.numel:
        return
    size = len(memory) // math.prod(box.sizes[: _together(shape, box)])
    for number, at in enumerate(_runs(shape, box)):
        rest, where = memory[number * size : (number + 1) * size], start + at * item_bytes
        while rest:
            done = os.pwrite(descriptor, rest, where)
            rest, where = rest[done:], where + done


def _together(shape: tuple[int, ...], box: Box) -> int:
    """From which dim on the elements of a box lie in one row."""
    dims = len(shape)
    while dims and box.sizes[dims - 1] == shape[dims - 1]:
        dims -= 1
    return max(dims - 1, 0)


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[int]:
    """Return where in the tensor each row of elements of a box begins.

    >>> list(_runs((3, 4), Box((1, 2), (2, 2))))
    [6, 10]
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    outer = _together(shape, box)
    for index in itertools.product(*(range(size) for size in box.sizes[:outer])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False))
